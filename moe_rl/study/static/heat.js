// Where routing changed: site by update at one step, and site by step over the run.
"use strict";
(() => {
  const { make, svg, number } = moeRL;
  const LEFT = 64, COLUMNS = 120;

  moeRL.Heat = class {
    /** fetchRows(run, since): the API's answer. scale(): nine colours. choose(step): the reader chose a step. */
    constructor(host, fetchRows, scale, choose) {
      Object.assign(this, { fetchRows, scale, choose, run: null, step: null, known: {} });
      this.over = svg("svg", { class: "heat", tabindex: 0, role: "img" });
      this.now = svg("svg", { class: "heat", role: "img" });
      this.slider = make("input", { type: "range", min: 0, max: 0, step: 1, "aria-label": "step of the heat map" });
      this.slider.oninput = () => choose(Number(this.slider.value));
      this.label = make("output", {});
      this.nowTitle = make("h3", {});
      this.legend = make("div", { class: "heat-legend" });
      this.message = make("p", { class: "quiet" });
      this.readout = make("p", { class: "quiet heat-readout", role: "status" });
      this.figures = make("div", { class: "heats" },
        make("figure", {}, make("h3", {}, "over the run, after each step’s last update"), this.over,
          make("label", { class: "scrub" }, "step", this.slider, this.label)),
        make("figure", {}, this.nowTitle, this.now));
      host.replaceChildren(this.message, this.figures, make("div", { class: "heat-foot" }, this.legend, this.readout));
      this.over.addEventListener("click", (event) => { const s = this.stepAt(event); if (s !== null) choose(s); });
      this.over.addEventListener("pointermove", (event) => this.read(event));
      this.over.addEventListener("pointerleave", () => { this.readout.textContent = ""; });
      this.over.addEventListener("keydown", (event) => {
        const steps = this.data()?.steps || [], at = steps.indexOf(this.step);
        const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: steps.length - 1 }[event.key];
        if (to === undefined) return;
        event.preventDefault();
        if (steps[to] !== undefined) choose(steps[to]);
      });
    }

    data() { return this.known[this.run]; }

    /** Read what is new of a run and draw; step null follows the latest. */
    async show(run, step) {
      if (run !== this.run) this.readout.textContent = "";
      Object.assign(this, { run, wanted: step });
      const data = (this.known[run] ||= { since: "", rows: new Map(), steps: [], floor: new Map(), sites: [], labels: [], common: "", top: 0 });
      if (!data.busy) {
        data.busy = true;
        try {
          for (let more = true; more;) {
            const answer = await this.fetchRows(run, data.since);
            if (answer.reset) Object.assign(data, { rows: new Map(), steps: [], floor: new Map(), top: 0 });
            for (const [s, update, rates] of answer.rows) {
              if (!data.rows.has(s)) { data.rows.set(s, new Map()); data.steps.push(s); }
              data.rows.get(s).set(update, rates);
              for (const rate of rates) if (rate > data.top) data.top = rate;
            }
            for (const [name, rates] of answer.floor) { // of the own variants, the largest
              const known = data.floor.get(name) || [];
              data.floor.set(name, rates.map((rate, l) => (rate === null ? known[l] ?? null : Math.max(rate, known[l] ?? 0))));
              for (const rate of rates) if (rate > data.top) data.top = rate;
            }
            if (answer.sites.length) Object.assign(data, { sites: answer.sites, labels: answer.labels, common: answer.common });
            data.since = answer.since;
            more = answer.more;
          }
          data.steps.sort((a, b) => a - b);
        } finally { data.busy = false; }
      }
      if (run === this.run) this.draw();
    }

    draw() {
      const data = this.data();
      const empty = !data || !data.steps.length;
      this.message.textContent = empty ? "No probe rows by site of this run yet (probe.every in a study file; site_slots_changed and site_slots of RunWriter)." : "";
      this.message.hidden = !empty;
      this.figures.hidden = this.legend.hidden = empty;
      if (empty) return;
      const { steps } = data;
      this.step = this.wanted === null ? steps.at(-1) : steps.reduce((best, s) => (Math.abs(s - this.wanted) < Math.abs(best - this.wanted) ? s : best), steps[0]);
      moeRL.set(this.slider, { min: steps[0], max: steps.at(-1) });
      this.slider.value = this.step;
      this.label.textContent = String(this.step);
      const colours = this.scale();
      this.colour = (rate) => (rate === null ? "none" : mix(colours, data.top ? rate / data.top : 0));
      this.drawOver(data);
      this.drawNow(data);
      const stops = colours.map((c, i) => `${c} ${(100 * i) / 8}%`).join(", ");
      this.legend.replaceChildren("experts changed, % of slots", make("span", {}, "0"),
        make("i", { style: { background: `linear-gradient(to right, ${stops})` } }), make("span", {}, percent(data.top)),
        make("span", {}, data.floor.size ? "dashed: noise floor, equal weights" : "noise floor by site: not recorded"),
        make("span", {}, `sites: ${data.common || data.sites[0]}, shallow to deep`));
    }

    frame(plot, data, height) {
      const width = Math.max(240, plot.clientWidth || 320);
      plot.setAttribute("viewBox", `0 0 ${width} ${height}`);
      plot.setAttribute("height", height);
      const cell = this.cell(data), every = Math.ceil(13 / cell), parts = [];
      data.labels.forEach((label, l) => {
        if (l % every === 0) parts.push(svg("text", { class: "tick", x: LEFT - 7, y: Math.max(9, cell * (l + 0.5) + 3.5), "text-anchor": "end" }, `site ${label}`.slice(0, 9)));
      });
      return { width, parts };
    }

    cell(data) { return Math.max(5, Math.min(38, 190 / data.labels.length)); }

    /** Rates after a step's last update. */
    last(data, step) { const of = data.rows.get(step); return of.get(Math.max(...of.keys())); }

    drawOver(data) {
      const cell = this.cell(data), below = cell * data.labels.length, height = below + 22;
      const { width, parts } = this.frame(this.over, data, height);
      const { steps } = data, size = Math.max(1, Math.ceil(steps.length / COLUMNS)), count = Math.ceil(steps.length / size);
      const w = (width - LEFT - 2) / count;
      this.columns = Array.from({ length: count }, (_, c) => steps.slice(c * size, (c + 1) * size));
      this.columns.forEach((part, c) => {
        const all = part.map((s) => this.last(data, s));
        data.labels.forEach((_, l) => {
          const values = all.map((rates) => rates[l]).filter((r) => r !== null && r !== undefined);
          const rate = values.length ? values.reduce((a, b) => a + b, 0) / values.length : null;
          parts.push(svg("rect", { x: LEFT + c * w, y: l * cell, width: w + (w > 6 ? -1 : 0.4), height: cell - (cell > 8 ? 1 : 0), fill: this.colour(rate) }));
        });
        const every = Math.max(1, Math.ceil(count / Math.max(2, (width - LEFT) / 44)));
        if (c % every === 0) parts.push(svg("text", { class: "tick", x: LEFT + (c + 0.5) * w, y: below + 15, "text-anchor": "middle" }, String(part[0])));
      });
      const at = this.columns.findIndex((part) => part.includes(this.step));
      parts.push(svg("rect", { class: "chosen", x: LEFT + at * w - 1, y: 0.75, width: w + 1, height: below - 1.5 }));
      Object.assign(this, { w });
      this.over.replaceChildren(...parts);
      this.over.setAttribute("aria-label", `Experts changed by routing site and step, ${steps.length} steps; chosen: step ${this.step}. Arrow keys choose a step.`);
    }

    drawNow(data) {
      const of = data.rows.get(this.step), updates = [...of.keys()].sort((a, b) => a - b);
      const cell = this.cell(data), below = cell * data.labels.length, height = below + 22;
      const { width, parts } = this.frame(this.now, data, height);
      const floor = [...data.floor].sort(([a], [b]) => (a === "own" ? -1 : b === "own" ? 1 : 0)), gap = floor.length ? 18 : 0;
      const w = Math.min(90, (width - LEFT - 4 - gap) / (updates.length + floor.length));
      const column = (x, rates, name, tick) => {
        rates.forEach((rate, l) => {
          const fill = this.colour(rate), y = l * cell;
          const title = svg("title", {}, `${data.sites[l]}, ${name}: ${percent(rate)}`);
          parts.push(svg("rect", { x, y, width: w - 1, height: cell - (cell > 8 ? 1 : 0), fill }, title));
          if (cell >= 15 && w >= 34) parts.push(svg("text", { class: "cell", x: x + w / 2, y: y + cell / 2 + 4, "text-anchor": "middle", fill: rate === null ? "none" : moeRL.inkOn(hex(fill)) }, rate === null ? "" : number(100 * rate, 2)));
        });
        if (tick) parts.push(svg("text", { class: "tick", x: x + w / 2, y: below + 15, "text-anchor": "middle" }, tick));
      };
      updates.forEach((update, c) => column(LEFT + c * w, of.get(update), `update ${update}`, c % Math.ceil(24 / w) ? "" : w >= 56 ? `update ${update}` : String(update)));
      const apart = LEFT + updates.length * w + gap;
      floor.forEach(([name, rates], c) => column(apart + c * w, rates, `equal weights, ${name}`, w >= 24 || !c ? name : ""));
      if (floor.length) parts.push(svg("rect", { class: "floor", x: apart - 2, y: 0.75, width: floor.length * w + 3, height: below - 1.5 }));
      this.now.replaceChildren(...parts);
      this.nowTitle.textContent = `step ${this.step}, after each of its updates`;
      const means = updates.map((u) => { const r = of.get(u).filter((x) => x !== null); return `update ${u} ${percent(r.reduce((a, b) => a + b, 0) / r.length)}`; });
      this.now.setAttribute("aria-label", `Experts changed by routing site and update at step ${this.step}: ${means.join(", ")}`);
    }

    column(event) {
      const box = this.over.getBoundingClientRect(), x = event.clientX - box.left - LEFT;
      return x < 0 || !this.columns ? null : this.columns[Math.floor(x / this.w)] || null;
    }
    stepAt(event) { const part = this.column(event); return part ? part.at(-1) : null; }

    read(event) {
      const data = this.data(), part = this.column(event);
      const l = Math.floor((event.clientY - this.over.getBoundingClientRect().top) / this.cell(data));
      if (!part || !data.labels[l]) return;
      const rates = part.map((s) => this.last(data, s)[l]).filter((r) => r !== null);
      const mean = rates.reduce((a, b) => a + b, 0) / rates.length;
      const steps = part.length > 1 ? `steps ${part[0]}–${part.at(-1)}` : `step ${part[0]}`;
      this.readout.textContent = `${data.sites[l]}, ${steps}: ${percent(mean)}`;
    }
  };

  const percent = (rate) => (rate === null || Number.isNaN(rate) ? "–" : `${number(100 * rate, 2)} %`);
  const parse = (c) => [1, 3, 5].map((i) => parseInt(c.slice(i, i + 2), 16));
  const mix = (colours, share) => {
    const at = Math.min(8, Math.max(0, share * 8)), i = Math.min(7, Math.floor(at)), t = at - i;
    const [a, b] = [parse(colours[i]), parse(colours[i + 1])];
    return "#" + a.map((v, k) => Math.round(v + (b[k] - v) * t).toString(16).padStart(2, "0")).join("");
  };
  const hex = (fill) => (fill.startsWith("#") ? fill : "#ffffff");
})();
