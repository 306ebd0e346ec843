// The page: asks for what is new every two seconds, keeps the curves, draws what changed.
"use strict";
(() => {
  const { make } = moeRL;
  const POLL = 2000, QUIET_SECONDS = 60;
  const LIMIT = { study: 30e3, other: 120e3 }; // ms for an answer: a server that hangs, or a tunnel that is half dead, gives none
  const $ = (id) => document.getElementById(id);
  const dark = matchMedia("(prefers-color-scheme: dark)");

  const CHARTS = [ // mode: how the rows of a step add up (moeRL.Points), else the last counts
    { key: "reward", from: ["rollout", "reward"], title: "Reward", note: "of all responses that are sampled for training" },
    { key: "heldout", from: ["eval", "reward"], title: "Held-out reward", note: "on prompts that are never trained on" },
    { key: "changed", from: ["probe", "slots_changed and slots"], title: "Experts changed", note: "% of slots, last update of a step, live", percent: true, floor: true },
    { key: "clipped", mode: "share", from: ["update", "clipped_tokens and tokens"], title: "Clipped tokens", note: "% of a step’s tokens, log axis", percent: true, log: true },
    { key: "vartoken", from: ["probe", "var_token_natural"], title: "Variance of token log-ratios", note: "nats², after a step’s last update, routed live, log axis", log: true },
    { key: "varsequence", from: ["probe", "var_sequence_natural"], title: "Variance of sequence log-ratios", note: "of means per token, nats², last update, routed live, log axis", log: true },
    { key: "grad", mode: "mean", from: ["update", "grad_norm"], title: "Gradient norm", note: "before clipping, mean of a step’s updates, log axis", log: true },
    { key: "length", from: ["rollout", "response_length"], title: "Response length", note: "tokens, mean over a step’s responses" },
    { key: "entropy", from: ["probe", "entropy"], title: "Entropy", note: "nats per token, after a step’s last update" },
  ];

  const runs = new Map(); // name -> {since, points, step, seconds, tokenSteps, damaged, ...state of the last answer}
  let study = null, rules = "", version = 0, drawn = "", lost = false, problem = "", timer = 0, polling = false, pressed = false;
  const view = { study: null, run: null, step: null, condition: 0, hidden: new Set(), metrics: [], smoothing: 1, range: null };
  let catalogue = {};
  let tokenChoice = {};

  const unread = () => ({ points: fresh(), floor: new Map(), kinds: new Map(), step: null, seconds: [], damaged: 0 });
  const modeOf = ({ kind, over }) => kind !== "update" ? "last" : over ? "share" : "mean";
  const fresh = () => Object.fromEntries([...CHARTS.map(({ key, mode }) => [key, mode ?? "last"]), ...view.metrics.map((key) => [key, modeOf(catalogue[key] ?? {})])]
    .map(([key, mode]) => [key, new moeRL.Points(mode)]));

  async function get(path, query = {}) {
    const asked = view.study ? { ...query, study: view.study } : query;
    const answer = await fetch(`api/${path}?${new URLSearchParams(asked)}`, { signal: AbortSignal.timeout(LIMIT[path] ?? LIMIT.other) });
    const content = await answer.json();
    if (!answer.ok) throw Object.assign(new Error(content.error), { answered: true });
    return content;
  }

  // Reading what is new

  async function poll() {
    if (polling) return;
    polling = true;
    clearTimeout(timer);
    try {
      study = await get("study");
      view.study ??= study.studies[0] ?? null; // of several the first, for good: their order changes as they are written to
      const there = new Set(study.runs.map(({ run }) => run));
      for (const name of [...runs.keys()]) if (!there.has(name)) runs.delete(name); // its folder is gone
      for (const state of study.runs) {
        if (!runs.has(state.run)) runs.set(state.run, { since: "", tokenSteps: [], bytes: -1, ...unread() });
      }
      const set = JSON.stringify([study.alarms, study.alarms_problem]);
      if (set !== rules) { // what was told by other thresholds is told again, also of runs that write no more
        for (const run of runs.values()) Object.assign(run, { bytes: -1, alarms: undefined });
        rules = set;
        drawn = "";
      }
      const due = study.runs.filter(({ run, bytes, state }) => bytes !== runs.get(run).bytes || state !== runs.get(run).state); // tokens may come last
      due.sort((a, b) => (b.run === view.run) - (a.run === view.run)); // the chosen run first
      let shown = Date.now();
      let failed = null;
      await Promise.all([0, 1, 2].map(async () => {
        while (due.length) {
          await read(due.shift()).catch((error) => { failed ??= error; }); // the other runs are read all the same
          if (Date.now() - shown > 1000) { draw(); shown = Date.now(); } // long files: show what has come so far
        }
      }));
      if (failed) throw failed;
      lost = false;
      problem = "";
    } catch (error) {
      lost = !error.answered;
      problem = error.message;
      $("status").textContent = lost ? "no answer: has moe-rl watch ended? Trying again …" : error.message;
      $("status").classList.add("lost");
    }
    polling = false;
    if (study && !lost && !pressed) draw();
    document.documentElement.dataset.ready = study && !lost ? "yes" : "no";
    if (!document.hidden) timer = setTimeout(poll, POLL);
  }

  async function read(state) {
    const run = runs.get(state.run);
    for (let more = true; more;) {
      const wanted = view.metrics.join(","), since = run.since;
      const answer = await get("run", { run: state.run, since, ...(wanted ? { metrics: wanted } : {}) });
      if (wanted !== view.metrics.join(",") || since !== run.since) return; // another choice was made meanwhile: the run is read again
      if (answer.reset) Object.assign(run, unread());
      take(run, answer.rows);
      for (const [key, values] of Object.entries(answer.chosen)) {
        for (const [step, value, over, update] of values) run.points[key]?.add(step, value, catalogue[key]?.over ? over : 1, update);
      }
      run.since = answer.since;
      run.damaged += answer.damaged;
      run.tokenSteps = answer.token_steps;
      if (answer.alarms) run.alarms = answer.alarms;
      more = answer.more;
    }
    run.bytes = state.bytes;
    run.state = state.state;
    version++;
  }

  function take(run, rows) {
    const p = run.points;
    for (const [kind, of] of Object.entries(rows)) run.kinds.set(kind, (run.kinds.get(kind) || 0) + of.length);
    for (const [step, reward, length] of rows.rollout || []) { p.reward.add(step, reward); p.length.add(step, length); run.step = Math.max(run.step ?? 0, step); }
    for (const [step, reward] of rows.eval || []) p.heldout.add(step, reward);
    for (const [step, update, clipped, tokens, norm] of rows.update || []) { p.clipped.add(step, clipped, tokens, update); p.grad.add(step, norm, 1, update); }
    for (const [step, , changed, slots, token, sequence, entropy] of rows.probe || []) {
      p.changed.add(step, changed, slots);
      p.vartoken.add(step, token);
      p.varsequence.add(step, sequence);
      p.entropy.add(step, entropy);
    }
    for (const [, floor, changed, slots] of rows.floor || []) {
      if (floor !== null && slots && Number.isFinite(changed)) run.floor.set(floor, Math.max(run.floor.get(floor) ?? 0, changed / slots)); // of the own variants, the largest
    }
    for (const [step, seconds] of rows.step || []) {
      run.step = step + 1; // steps done
      if (Number.isFinite(seconds)) run.seconds = [...run.seconds.slice(-8), seconds];
    }
  }

  // Drawing

  const page = { cursor, choose: chooseStep, zoom };
  const charts = CHARTS.map((spec) => new moeRL.LineChart($("charts"), spec, page));
  function cursor(step, of = null) { for (const chart of charts) chart.mark(step, chart === of); }

  const theme = () => (dark.matches ? "dark" : "light");
  const looks = () => study.arms.map((arm) => ({ ...arm, colour: arm.colour[theme()] }));
  const armOf = (name) => looks().find((arm) => arm.arm === name) || { title: name, label: name, colour: "currentColor", dash: [] };

  function draw() {
    document.title = `${study.name} – moe-rl watch`;
    $("name").textContent = study.name;
    $("question").textContent = study.question;
    if (!view.run || !runs.has(view.run)) view.run = (study.runs.find((r) => r.bytes) || study.runs[0])?.run ?? null;
    drawStatus();
    drawTable();
    const key = JSON.stringify([version, theme(), view.condition, [...view.hidden], study.arms, study.settings.length, study.runs.length, innerWidth]);
    if (key !== drawn) {
      drawn = key;
      drawLegend();
      drawCharts();
      moeRL.drawAlarms($("alarms"), study.alarms, shownRuns(), study.alarms_problem);
      drawRunPicker();
      drawOne();
    } else if (experts.key === null) drawExperts(); // it failed
  }

  function drawStatus() {
    const count = (state) => study.runs.filter((r) => shownState(r) === state).length;
    const parts = [`${count("done")} of ${study.runs.length} runs done`];
    for (const state of ["running", "starting", "stalled", "stopped", "failed", "waiting"]) if (count(state)) parts.push(`${count(state)} ${state}`);
    if (!study.runs.length) parts.splice(0, 1, "no run has begun yet; this page goes on by itself");
    $("status").textContent = [...parts, problem].filter(Boolean).join(" · ");
    $("status").classList.toggle("lost", problem !== "");
  }

  /** A run without a row for much longer than its steps take is called stalled. */
  function shownState(state) {
    const seconds = [...(runs.get(state.run)?.seconds || [])].sort((a, b) => a - b);
    const usual = seconds.length ? seconds[seconds.length >> 1] : 20;
    return state.state === "running" && state.age > Math.max(QUIET_SECONDS, 5 * usual) ? "stalled" : state.state;
  }

  const drawTable = () => moeRL.drawRuns($("run-rows"), $("problems"), { study, runs, chosen: view.run, armOf, shownState, choose: chooseRun });

  function drawLegend() {
    if (view.condition >= study.conditions.length) view.condition = 0;
    $("conditions").hidden = study.conditions.length < 2;
    renew($("conditions"), study.conditions.map((title, i) => make("button", {
      type: "button", "aria-pressed": String(i === view.condition), onclick: () => { view.condition = i; remember(); draw(); } }, title)));
    renew($("legend"), looks().filter((arm) => arm.condition === view.condition).map((arm) => make("button", {
      type: "button", "data-arm": arm.arm, "aria-pressed": String(!view.hidden.has(arm.arm)), title: "show or hide",
      onclick: () => { view.hidden.delete(arm.arm) || view.hidden.add(arm.arm); remember(); draw(); } }, moeRL.swatch(arm), arm.label)));
  }

  /** Put buttons in place of those of a host if they look otherwise; the focus stays at its place among them. */
  function renew(host, buttons) {
    if (host.innerHTML === buttons.map((button) => button.outerHTML).join("")) return;
    const at = [...host.children].indexOf(document.activeElement);
    host.replaceChildren(...buttons);
    if (at >= 0) buttons[at]?.focus({ preventScroll: true });
  }

  const shownArms = () => looks().filter((arm) => arm.condition === view.condition && !view.hidden.has(arm.arm));
  const shownRuns = () => {
    const arms = new Map(shownArms().map((arm) => [arm.arm, arm]));
    return study.runs.filter((r) => arms.has(r.arm)).map((r) => ({ name: r.run, title: `${arms.get(r.arm).title}, seed ${r.seed}`, alarms: runs.get(r.run).alarms }));
  };

  // Metrics that the reader adds, the range of steps, smoothing

  const OF_UPDATES = { update: ", over a step’s updates", probe: ", after a step’s last update", decomposition: ", after a step’s last update" };
  const specOf = (key) => {
    const { kind, name, unit, definition, over } = catalogue[key];
    return { key, from: [kind, name], title: `${name}, ${kind} rows`, percent: Boolean(over), remove: () => chooseMetrics(view.metrics.filter((k) => k !== key)),
      note: `${definition} (${over ? `% of ${over}` : unit})${OF_UPDATES[kind] ?? ""}` };
  };

  /** Exactly these metrics of the catalogue have charts of their own; runs are read again for their values. */
  function chooseMetrics(keys) {
    view.metrics = keys.filter((key) => catalogue[key]);
    for (const chart of charts.splice(CHARTS.length)) chart.figure.remove();
    charts.push(...view.metrics.map((key) => new moeRL.LineChart($("charts"), specOf(key), page)));
    for (const run of runs.values()) Object.assign(run, unread(), { since: "", bytes: -1 });
    remember();
    poll();
  }

  async function readCatalogue() {
    catalogue = (await get("catalogue")).metrics;
    const groups = new Map();
    for (const [key, { kind, name, definition }] of Object.entries(catalogue)) {
      if (!groups.has(kind)) groups.set(kind, make("optgroup", { label: `${kind} rows` }));
      groups.get(kind).append(make("option", { value: key, title: definition }, name));
    }
    $("add-metric").append(...groups.values());
    if (view.metrics.length) chooseMetrics(view.metrics);
  }

  $("add-metric").onchange = ({ target }) => { const key = target.value; target.value = ""; if (key && !view.metrics.includes(key)) chooseMetrics([...view.metrics, key]); };
  $("smoothing").onchange = ({ target }) => { view.smoothing = Number(target.value); remember(); redraw(); };
  function zoom(range) { view.range = range; remember(); redraw(); }
  const typed = () => {
    const [from, to] = ["from", "to"].map((id) => Number.parseInt($(id).value, 10));
    zoom(Number.isNaN(from) && Number.isNaN(to) ? null : [Math.max(0, from || 0), Number.isNaN(to) ? null : Math.max(to, (from || 0) + 1)]);
  };
  $("from").onchange = $("to").onchange = () => setTimeout(typed); // once the focus has moved on
  $("all-steps").onclick = () => zoom(null);
  function redraw() { drawn = ""; if (study) draw(); }
  function lastStep() {
    let end = 1;
    for (const run of runs.values()) for (const { xs } of Object.values(run.points)) end = Math.max(end, xs.at(-1) ?? 0);
    return end;
  }

  function drawOptions() {
    $("smoothing").value = String(view.smoothing);
    ["from", "to"].forEach((id, i) => { if (document.activeElement !== $(id)) $(id).value = view.range?.[i] ?? ""; }); // not what is being typed
    $("from").placeholder = "0";
    $("to").placeholder = String(lastStep());
    $("all-steps").hidden = !view.range;
    $("study-choice").hidden = study.studies.length < 2;
    moeRL.fill($("study"), study.studies.map((name) => [name, name]), view.study ?? study.studies[0] ?? "");
  }
  $("study").onchange = ({ target }) => { location.hash = `study=${encodeURIComponent(target.value)}`; location.reload(); };

  /** Settings in which the shown arms differ, one row each. */
  function drawSettings() {
    const shown = shownArms();
    const rows = study.settings.filter(({ values }) => new Set(shown.map((arm) => values[arm.arm])).size > 1);
    $("settings").hidden = shown.length < 2;
    const cell = (value) => make("td", {}, value === null || value === undefined ? "–" : value);
    $("settings").querySelector("table").replaceChildren(
      make("thead", {}, make("tr", {}, make("th", { scope: "col" }, "setting"), ...shown.map((arm) => make("th", { scope: "col" }, moeRL.swatch(arm), " ", arm.title)))),
      make("tbody", {}, ...rows.map(({ name, values }) => make("tr", { "data-setting": name }, make("th", { scope: "row" }, name), ...shown.map((arm) => cell(values[arm.arm]))))));
  }

  function drawCharts() {
    const shown = shownArms(), listed = shownRuns(), range = [view.range?.[0] ?? 0, view.range?.[1] ?? lastStep()]; // no last step: it goes on with the run
    drawOptions();
    drawSettings();
    const floor = floorOf(study.runs.filter((r) => shown.some((arm) => arm.arm === r.arm)).map((r) => runs.get(r.run).floor));
    for (const chart of charts) {
      chart.marks = moeRL.alarmMarks(study.alarms, [chart.spec.from[0], chart.spec.from[1]], listed);
      chart.draw(shown.map((arm) => ({
        ...arm, runs: study.runs.filter((r) => r.arm === arm.arm).map((r) => ({ name: r.run, points: runs.get(r.run).points[chart.spec.key] ?? new moeRL.Points("last") })),
      })), range, chart.spec.floor ? floor : [], whyEmpty(chart.spec, study.runs.filter((r) => shown.some((arm) => arm.arm === r.arm))), view.smoothing);
    }
  }

  /** Why runs have nothing to draw for a chart that is made from values of a kind of row. */
  function whyEmpty({ key, from: [kind, names] }, states) {
    const begun = states.filter((r) => runs.get(r.run).kinds.size);
    if (!begun.length) return "no row yet";
    if (begun.some((r) => runs.get(r.run).points[key]?.xs.length)) return `no step shown has finite ${names}`;
    if (begun.some((r) => runs.get(r.run).kinds.has(kind))) return `${kind} rows have no ${names}`;
    return `no ${kind} rows ${begun.some((r) => shownState(r) === "running") ? "yet" : "were written"}`;
  }

  /** The noise floor of the runs shown: the mean over those that measured it. */
  function floorOf(measured) {
    return ["own", "bf16"].flatMap((name) => {
      const values = measured.filter((of) => of.has(name)).map((of) => of.get(name));
      return values.length ? [{ name, value: values.reduce((a, b) => a + b, 0) / values.length }] : [];
    });
  }

  function drawRunPicker() {
    moeRL.fill($("run"), study.runs.map((r) => [r.run, `${armOf(r.arm).title}, seed ${r.seed}`]), view.run);
  }

  // One run: heat maps and tokens

  const heat = new moeRL.Heat($("heat"), (run, since) => get("sites", { run, since }), () => study.scales[theme()].sequence, chooseStep);
  const tokens = new moeRL.TokenView($("tokens"), {
    live: true,
    steps: async (run) => runs.get(run)?.tokenSteps || [],
    index: (run, step) => get("tokens", { run, step }),
    response: (run, step, seq, update) => get("response", { run, step, seq, update }),
  }, () => study.scales[theme()], (state) => { tokenChoice = state; remember(); });

  const experts = new moeRL.ExpertMap($("experts"), (run) => get("experts", { run }), () => study.scales[theme()]);

  let shownTokens = "";
  function drawOne() {
    if (!view.run) return;
    drawExperts();
    heat.show(view.run, view.step).catch((error) => { heat.message.hidden = false; heat.message.textContent = error.message; });
    const key = JSON.stringify([view.run, runs.get(view.run).tokenSteps, theme()]);
    if (key === shownTokens) return;
    shownTokens = key;
    tokens.choose({ run: view.run, ...("seq" in tokenChoice ? { token: tokens.state.token } : {}) });
  }

  function drawExperts() {
    experts.show(view.run, [runs.get(view.run).tokenSteps, theme()]).catch((error) => { experts.note.textContent = error.message; });
  }

  /** A step whose tokens were not kept says so, and which were; the token view stays where it is. */
  function sayKept(step, stored) {
    const missing = step !== null && stored.length > 0 && !stored.includes(step);
    $("not-kept").hidden = !missing;
    if (missing) $("not-kept").textContent = `Tokens of step ${step} were not kept (probe.tokens_every); below are those of step ${tokens.state.step}. Kept: ${stored.join(", ")}.`;
  }

  function chooseRun(name) { view.run = name; $("not-kept").hidden = true; drawn = ""; remember(); draw(); }
  function chooseStep(step) {
    view.step = step;
    remember();
    heat.show(view.run, step);
    const stored = runs.get(view.run)?.tokenSteps || [];
    sayKept(step, stored);
    if (stored.includes(step) && step !== tokens.state.step) tokens.choose({ step });
  }
  $("run").onchange = (event) => chooseRun(event.target.value);

  // Permalinks: #run=grpo/seed0&step=20&tokens=20&update=4&response=8&token=7&colour=natural&hide=gspo&condition=1

  let written = "";
  function remember() {
    const parts = { study: view.study, run: view.run, step: view.step, metrics: view.metrics.join(",") || null,
      smooth: view.smoothing > 1 ? view.smoothing : null, steps: view.range ? view.range.join("-") : null, condition: view.condition || null, hide: [...view.hidden].map(encodeURIComponent).join(",") || null };
    const { step, update, seq, token, colour } = tokenChoice;
    Object.assign(parts, { tokens: step, update, response: seq, token, colour: colour === "changed" ? null : colour });
    const query = new URLSearchParams(Object.entries(parts).filter(([, v]) => v !== null && v !== undefined && v !== ""));
    written = "#" + query.toString().replaceAll("%2F", "/").replaceAll("%2C", ",");
    history.replaceState(null, "", written);
  }

  function recall() {
    const given = new URLSearchParams(location.hash.slice(1));
    const whole = (name) => (/^\d+$/.test(given.get(name) ?? "") ? Number(given.get(name)) : null);
    if (given.get("run")) view.run = given.get("run");
    view.study = given.get("study") ?? view.study;
    const [, from, to] = /^(\d+)-(\d*)$/.exec(given.get("steps") ?? "") ?? [];
    view.range = from && !(to && Number(from) >= Number(to)) ? [Number(from), to ? Number(to) : null] : null;
    view.smoothing = [3, 5, 11].find((n) => n === whole("smooth")) ?? 1;
    const metrics = (given.get("metrics") || "").split(",").filter(Boolean);
    const others = metrics.join() !== view.metrics.join();
    view.metrics = metrics;
    if (others && Object.keys(catalogue).length) chooseMetrics(metrics);
    view.step = whole("step");
    view.condition = whole("condition") ?? 0;
    view.hidden = new Set((given.get("hide") || "").split(",").filter(Boolean).map(decoded));
    tokenChoice = { step: whole("tokens") ?? whole("step"), update: whole("update"), seq: whole("response"), token: whole("token"), colour: given.get("colour") || "changed" };
    Object.assign(tokens.state, tokenChoice);
    shownTokens = drawn = "";
  }

  function decoded(text) {
    try { return decodeURIComponent(text); } catch { return text; } // a link made by hand
  }

  addEventListener("hashchange", () => {
    if (location.hash === written || !location.hash.includes("=")) return; // written by the page, or a place on it
    if ((new URLSearchParams(location.hash.slice(1)).get("study") ?? view.study) !== view.study) return location.reload(); // what is kept is of one study
    recall();
    if (study) draw();
  });
  addEventListener("pointerdown", () => { pressed = true; }, true); // a button that is drawn anew meanwhile is not clicked
  for (const end of ["pointerup", "pointercancel"]) addEventListener(end, () => { pressed = false; }, true);
  addEventListener("visibilitychange", () => { if (!document.hidden) poll(); });
  dark.addEventListener("change", () => study && draw());
  let settling = 0;
  addEventListener("resize", () => { clearTimeout(settling); settling = setTimeout(() => study && draw(), 150); });
  if (location.hash.length > 1) recall();
  poll();
  readCatalogue().catch((error) => { $("add-metric").title = error.message; });
})();
