// The token view: one response, each token coloured by what changed, its experts on request.
// Used by the live page (source: the API) and by the report (source: data inside the page).
"use strict";
var moeRL = window.moeRL || (window.moeRL = {});

(() => {
  const SVG = "http://www.w3.org/2000/svg";

  /** An element with properties and children; text is always text, never markup. */
  moeRL.make = (tag, properties = {}, ...children) => {
    const element = document.createElement(tag);
    moeRL.set(element, properties);
    element.append(...children.filter((child) => child !== null && child !== undefined));
    return element;
  };
  moeRL.svg = (tag, properties = {}, ...children) => {
    const element = document.createElementNS(SVG, tag);
    moeRL.set(element, properties);
    element.append(...children);
    return element;
  };
  moeRL.set = (element, properties) => {
    for (const [name, value] of Object.entries(properties)) {
      if (name.startsWith("on")) element[name] = value;
      else if (name === "style") for (const [key, v] of Object.entries(value)) element.style.setProperty(key, v);
      else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
    }
  };

  /** Give a select its options, [[value, text], ...], anew only if they are others: a list that is open would close. */
  moeRL.fill = (select, options, value) => {
    const key = JSON.stringify(options);
    if (select.dataset.key !== key) select.replaceChildren(...options.map(([name, text]) => moeRL.make("option", { value: name }, text)));
    select.dataset.key = key;
    select.value = value;
  };

  /** Black or white ink on a colour #rrggbb, by its luminance. */
  moeRL.inkOn = (colour) => {
    const [r, g, b] = [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16) / 255)
      .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.19 ? "#111" : "#fff";
  };

  moeRL.number = (value, digits = 3) =>
    value === null || value === undefined ? "–" : Math.abs(value) < 1e-12 ? "0" :
      (Math.abs(value) < 0.0001 || Math.abs(value) >= 1e5 ? scientific(value) : String(Number(value.toPrecision(digits)))).replace("-", "−");
  moeRL.superscript = (exponent) => String(exponent).replace(/[-0-9]/g, (c) => "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"["-0123456789".indexOf(c)]);
  const scientific = (value) => {
    const [digits, exponent] = value.toExponential(1).split("e");
    return `${digits}·10${moeRL.superscript(Number(exponent))}`;
  };
  const signed = (value) => (value > 0 ? "+" : "") + moeRL.number(value);

  const minus = (a, b) => (a === null || b === null ? null : a - b);
  const ROWS_TOKENS = 200, ROWS_UPDATES = 8; // up to this size, all updates of a response are shown, one row each
  const BOUNDS = [0.01, 0.05, 0.2, 0.7]; // nats; 0.7 is a ratio of 2

  const COLOURINGS = {
    changed: { name: (index) => (index.unit === "experts" ? "experts changed" : "sites changed"), kind: "sequence", value: (r, t) => r.changed[t] },
    natural: { name: () => "log-ratio, live routing", kind: "diverging", value: (r, t) => minus(r.logp_natural[t], r.old_logp[t]) },
    routing: { name: () => "log-ratio, part of routing", kind: "diverging", value: (r, t) => minus(r.logp_natural[t], r.logp_replayed[t]) },
  };

  /** Bin 0..8 of a value, and the label of each bin that is used. */
  const binner = (kind, top) => {
    if (kind === "diverging") {
      const bin = (x) => (x === null ? null : 4 + Math.sign(x) * BOUNDS.filter((b) => Math.abs(x) >= b).length);
      const labels = ["≤−0.7", "≤−0.2", "≤−.05", "≤−.01", "0", "≥.01", "≥.05", "≥0.2", "≥0.7"];
      return { bin, bins: labels.map((label, i) => [i, label]) };
    }
    const width = Math.max(1, Math.ceil(top / 8));
    const used = Math.max(1, Math.ceil(top / width));
    const place = (i) => Math.round((i * 8) / used); // few classes still reach the dark end
    const bin = (x) => (x ? place(Math.min(used, Math.ceil(x / width))) : 0);
    const label = (i) => (width === 1 ? String(i) : `${(i - 1) * width + 1}–${Math.min(top, i * width)}`);
    return { bin, bins: [[0, "0"], ...Array.from({ length: used }, (_, i) => [place(i + 1), label(i + 1)])] };
  };

  moeRL.TokenView = class {
    /**
     * host: an element. source: {steps(run), index(run, step), response(run, step, seq, update)}, promises.
     * scale(): {sequence: [9 colours], diverging: [9 colours]}. changed(state): told of every choice.
     */
    constructor(host, source, scale, changed = () => {}) {
      Object.assign(this, { host, source, scale, changed });
      this.state = { run: null, step: null, seq: null, update: null, token: null, colour: "changed" };
      this.ticket = 0;
      const { make } = moeRL;
      this.pick = {};
      const control = (name, label) => {
        this.pick[name] = make("select", { onchange: (event) => this.choose({ [name]: event.target.value }) });
        return make("label", {}, label, this.pick[name]);
      };
      const step = (name, by, text, label) =>
        make("button", { class: "tv-step", type: "button", "aria-label": label, onclick: () => this.move(name, by) }, text);
      const paired = (name, label, what) =>
        make("div", { class: "tv-pair" }, control(name, label),
          make("label", {}, "\u00a0", make("span", { class: "tv-pair" },
            step(name, -1, "‹", `previous ${what}`), step(name, 1, "›", `next ${what}`))));
      this.controls = make("div", { class: "tv-controls" },
        paired("step", "stored step", "step"), paired("update", "after update", "update"),
        paired("seq", "response", "response"), control("colour", "colour by"));
      this.legend = make("div", { class: "tv-legend" });
      this.text = make("div", { class: "tv-text", role: "group", "aria-label": "tokens of the response" });
      this.text.addEventListener("keydown", (event) => this.key(event));
      this.values = make("p", { class: "tv-values" });
      this.detail = make("div", { class: "tv-detail", "aria-live": "polite" });
      this.message = make("p", { class: "tv-message", role: "status" });
      this.body = make("div", { class: "tv-body" }, make("div", {}, this.legend, this.text, this.values), this.detail);
      host.replaceChildren(this.controls, this.message, this.body);
    }

    /** Change some choices; what no longer exists falls back to what is nearest. */
    async choose(choice) {
      const before = this.state.run;
      Object.assign(this.state, choice);
      if (choice.run !== undefined && choice.run !== before) this.index = null;
      if (["run", "step", "seq"].some((name) => name in choice) && !("token" in choice)) this.state.token = null;
      const ticket = ++this.ticket;
      try {
        await this.load(ticket);
      } catch (error) {
        if (ticket === this.ticket) this.say(error.message);
      }
    }

    async load(ticket) {
      const state = this.state;
      if (!state.run) return;
      const steps = await this.source.steps(state.run);
      if (ticket !== this.ticket) return;
      if (!steps.length) return this.say("No tokens are stored for this run yet (probe.tokens_every in the study file says how often).");
      const wanted = state.step === null || state.step === "" ? steps.at(-1) : Number(state.step);
      state.step = steps.reduce((best, s) => (Math.abs(s - wanted) < Math.abs(best - wanted) ? s : best), steps[0]);
      if (!this.index || this.index.run !== state.run || this.index.step !== state.step) {
        this.say("reading … (the first time takes some seconds)");
        const index = await this.source.index(state.run, state.step);
        if (ticket !== this.ticket) return;
        this.index = { ...index, run: state.run };
      }
      const { responses } = this.index;
      const known = responses.map((r) => r.seq);
      state.seq = state.seq !== null && known.includes(Number(state.seq)) ? Number(state.seq) : known[0];
      const { updates, tokens: length } = responses.find((r) => r.seq === state.seq); // those after which it was stored
      state.update = updates.includes(Number(state.update)) && state.update !== null ? Number(state.update) : updates.at(-1);
      if (!COLOURINGS[state.colour]) state.colour = "changed";
      const wanting = length <= ROWS_TOKENS && updates.length <= ROWS_UPDATES ? updates : [state.update];
      const read = await Promise.all(wanting.map((u) => this.source.response(state.run, state.step, state.seq, u)));
      if (ticket !== this.ticket) return;
      this.rows = read;
      this.pick.step.closest(".tv-pair").hidden = steps.length < 2 && !this.source.live;
      this.fill("step", steps, (s) => `step ${s}`);
      this.fill("update", updates, (u) => `update ${u} of ${this.index.updates.at(-1)}`);
      this.fill("seq", known, (seq, i) => `${seq} · reward ${moeRL.number(responses[i].reward)} · ${responses[i].changed} changed at the end`);
      this.fill("colour", Object.keys(COLOURINGS), (c) => COLOURINGS[c].name(this.index));
      this.say("");
      this.draw();
      this.changed({ ...state });
    }

    fill(name, values, label) {
      moeRL.fill(this.pick[name], values.map((value, i) => [value, label(value, i)]), this.state[name]);
    }

    move(name, by) {
      const options = [...this.pick[name].options].map((o) => o.value);
      const at = options.indexOf(String(this.state[name])) + by;
      if (at >= 0 && at < options.length) this.choose({ [name]: options[at] });
    }

    say(text) {
      this.message.textContent = text;
      this.message.hidden = !text;
      this.controls.hidden = Boolean(text) && !this.index;
      this.body.hidden = Boolean(text) && !text.startsWith("reading …");
    }

    draw() {
      const { make } = moeRL;
      const { index, state } = this;
      const response = this.rows.find((r) => r.update === state.update);
      this.response = response;
      const colouring = COLOURINGS[state.colour];
      const colours = this.scale()[colouring.kind];
      const { bin, bins } = binner(colouring.kind, index.top);
      const title = state.colour === "changed"
        ? `${colouring.name(index)} per token against the old policy${index.slots ? `, of ${index.slots}` : ""}`
        : `${colouring.name(index)}, nats`;
      const none = this.rows.some((row) => row.text.some((_, t) => colouring.value(row, t) === null));
      this.legend.replaceChildren(make("b", {}, title),
        ...bins.map(([i, label]) => make("span", {}, make("i", { style: { background: colours[i] } }), label)),
        ...(none ? [make("span", {}, make("i", { class: "tv-none" }), "no finite value")] : []));
      const several = this.rows.length > 1;
      this.text.replaceChildren(...this.rows.map((row) => make("div", { class: `tv-row ${several && row === response ? "tv-current" : ""}`, "data-update": row.update },
        several ? make("span", { class: "tv-update" }, `update ${row.update}`) : null,
        make("div", {}, make("span", { class: "tv-prompt" }, row.prompt), ...this.tokens(row, (t) => colours[bin(colouring.value(row, t))] ?? null)))));
      const { whole } = response;
      this.values.textContent =
        `Response ${response.seq}, reward ${moeRL.number(response.reward)}, ${whole.tokens} tokens; the prompt is grey. ` +
        `${whole.touched} tokens changed${index.unit === "experts" ? `, ${whole.changed} of ${index.slots * whole.tokens} experts` : ""}. ` +
        `Sequence log-ratio (mean per token, live routing): ${signed(whole.log_ratio)} nats.` +
        (response.left_out ? ` ${response.left_out} more tokens are not shown.` : "");
      this.press();
    }

    /** The buttons of one row, with line breaks where the text has them. */
    tokens(row, colourOf) {
      const { make, number } = moeRL;
      const of = this.index.slots ? ` of ${this.index.slots}` : "";
      return row.text.flatMap((text, t) => {
        const colour = colourOf(t), changed = `${row.changed[t]}${of} ${this.index.unit} changed`;
        const button = make("button", {
          type: "button", class: colour ? "tv-token" : "tv-token tv-none", tabindex: -1, "data-token": row.position[t],
          "aria-label": `token ${row.position[t]} ${visible(text)}, ${changed}`,
          title: `${changed}; log-ratio ${number(minus(row.logp_natural[t], row.old_logp[t]))}`,
          style: colour ? { "--fill": colour, "--ink": moeRL.inkOn(colour) } : {}, onclick: () => this.open(row.update, t),
        }, visible(text));
        return text.includes("\n") ? [button, make("br")] : [button];
      });
    }

    open(update, t) {
      const other = update !== this.state.update;
      Object.assign(this.state, { update, token: this.response.position[t] });
      if (other) { // the buttons are made anew: keep the place
        this.pick.update.value = update;
        this.draw();
        this.text.querySelector(".tv-token[tabindex='0']")?.focus({ preventScroll: true });
      } else this.press();
      this.changed({ ...this.state });
    }

    /** Mark the chosen token, or offer the one that changed most, and tell of it. */
    press() {
      const { response, state } = this;
      const found = state.token === null || state.token === "" ? -1 : response.position.indexOf(Number(state.token));
      const t = found >= 0 ? found : response.changed.indexOf(Math.max(...response.changed));
      this.text.querySelectorAll(".tv-row").forEach((row) => row.querySelectorAll(".tv-token").forEach((button, i) => {
        const chosen = Number(row.dataset.update) === response.update && i === t;
        button.setAttribute("aria-pressed", String(chosen));
        button.tabIndex = chosen ? 0 : -1;
      }));
      this.drawDetail(t);
    }

    key(event) {
      const tokens = [...this.text.querySelectorAll(".tv-token")], row = this.response.text.length;
      const at = tokens.indexOf(document.activeElement);
      const line = this.rows.length > 1 ? row : 1;
      const to = { ArrowRight: at + 1, ArrowDown: at + line, ArrowLeft: at - 1, ArrowUp: at - line, Home: 0, End: tokens.length - 1 }[event.key];
      if (to === undefined || at < 0 || !tokens[to]) return;
      event.preventDefault();
      tokens[at].tabIndex = -1;
      tokens[to].tabIndex = 0;
      tokens[to].focus();
    }

    drawDetail(t) {
      const { make, number } = moeRL;
      const { response, index } = this;
      const [old, live, replay] = ["old_logp", "logp_natural", "logp_replayed"].map((name) => response[name][t]);
      const row = (name, logp) => make("tr", {}, make("td", {}, name), cell(number(logp, 4)),
        cell(name === "old" ? "" : signed(minus(logp, old))), cell(name === "old" ? "" : number(logp === null || old === null ? null : Math.exp(logp - old))));
      const cell = (text) => make("td", { class: "tv-n" }, text);
      const head = (...names) => make("thead", {}, make("tr", {}, ...names.map((n, i) => make("th", { class: i ? "tv-n" : null, scope: "col" }, n))));
      const scores = make("table", {}, head("policy", "log p", "log-ratio", "ratio"), make("tbody", {},
        row("old", old), row("new, live routing", live), row("new, old routes replayed", replay),
        make("tr", {}, make("td", {}, "part of routing"), cell(""), cell(signed(minus(live, replay))), cell(""))));
      const parts = [
        make("h4", {}, `Token ${response.position[t]} `, make("code", {}, visible(response.text[t])), ` after update ${response.update}`), scores,
      ];
      if (response.old_experts) parts.push(this.experts(t));
      else parts.push(make("p", { class: "tv-message" }, "The routes of this step were not kept, so experts cannot be listed."));
      this.detail.replaceChildren(...parts);
    }

    experts(t) {
      const { make, number } = moeRL;
      const { response, index } = this;
      const old = response.old_experts[t], changes = response.new_experts[t], shares = Boolean(response.old_gates);
      const percent = (share) => (share === null ? "" : `${number(100 * share, 2)} %`);
      const chip = (id, kind, word) => make("span", { class: `tv-expert ${kind}`, title: word }, id < 0 ? "live" : String(id));
      const order = old.map((_, l) => l);
      if (old.length > 16) order.sort((a, b) => (b in changes) - (a in changes) || a - b); // many sites: changed ones first
      const rows = order.map((l) => {
        const now = response.new_sets?.[t][l] || changes[l] || old[l];
        const gate = (which, k) => shares ? make("span", { class: "tv-gate" }, percent(response[`${which}_gates`][t][l][k])) : null;
        const gone = old[l].flatMap((id, k) => [chip(id, now.includes(id) ? "" : "tv-gone", now.includes(id) ? "kept" : "gone"), gate("old", k)]);
        const came = now.flatMap((id, k) => [chip(id, old[l].includes(id) ? "" : "tv-came", old[l].includes(id) ? "kept" : "new"), gate("new", k)]);
        const count = now.filter((id) => !old[l].includes(id)).length;
        const margins = shares ? [make("td", { class: "tv-n" }, `${number(response.old_margins[t][l], 2)} → ${number(response.new_margins[t][l], 2)}`)] : [];
        return make("tr", {}, make("td", { title: index.sites[l] }, index.labels[l]), make("td", {}, ...gone.filter(Boolean)),
          make("td", {}, ...came.filter(Boolean)), ...margins, make("td", { class: "tv-n" }, count ? `${count} of ${old[l].length}` : "–"));
      });
      const names = ["site", "old experts", "new experts", ...(shares ? ["margin, logits"] : []), "changed"];
      const head = make("tr", {}, ...names.map((name, i) => make("th", { scope: "col", class: i > 2 ? "tv-n" : null }, name)));
      return make("div", { class: "tv-scroll", tabindex: 0, role: "region", "aria-label": "experts by site" },
        make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows)),
        make("p", { class: "tv-message" }, `Struck: no longer chosen; bold: newly chosen. Sites: ${index.common || index.sites[0]}, shallow to deep. ` +
          (shares ? "Beside an expert: its share of the softmax over all experts; margin: between the last chosen and the first not chosen, old and new. " : "") +
          "These experts process this token and shape what comes after it; its own probability was made at the tokens before it."));
    }
  };

  /** What cannot be seen made visible: line ends, tabs, lone spaces, nothing. */
  const visible = (text) => (text === "" ? "∅" : text.replace(/\n/g, "↵").replace(/\t/g, "⇥").replace(/^ +$/, (s) => "␣".repeat(s.length)));

  /** The view inside the report: data from the page itself. */
  moeRL.inlineTokenView = () => {
    const dark = matchMedia("(prefers-color-scheme: dark)");
    const data = JSON.parse(document.getElementById("token-view-data").textContent);
    const source = {
      steps: async () => [data.index.step],
      index: async () => data.index,
      response: async (_, __, seq, update) => data.responses[`${seq}/${update}`],
    };
    const view = new moeRL.TokenView(document.getElementById("token-view"), source, () => data.scales[dark.matches ? "dark" : "light"]);
    const first = data.index.responses[0];
    view.choose({ run: data.run, seq: first ? first.seq : null });
  };
})();
