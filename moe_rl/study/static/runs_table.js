// The table of runs: state, progress, latest values, and below it what went wrong.
"use strict";
(() => {
  const { make, number } = moeRL;
  const MARKS = { done: "✓", running: "▶", starting: "…", waiting: "·", stalled: "!", stopped: "■", failed: "✕" };
  const WORDS = { stalled: "no row for long", stopped: "stopped before its end", starting: "starting: no row yet", waiting: "not begun" };

  /** rows: the table's body; problems: a paragraph below it; page: what there is to show, and what a click does. */
  moeRL.drawRuns = (rows, problems, { study, runs, chosen, armOf, shownState, choose }) => {
    const lines = study.runs.flatMap((state, i) => {
      const run = runs.get(state.run), arm = armOf(state.arm), shown = shownState(state);
      const steps = state.steps ?? "?", sampled = run.points.reward.xs.at(-1) ?? -1;
      const done = Math.max(run.step ?? 0, state.state === "done" ? sampled + 1 : 0); // rows of step times may be missing
      const latest = (points) => (points.xs.length ? points.y(points.xs.length - 1) : null);
      const changed = latest(run.points.changed);
      const progress = make("span", { class: "progress", "aria-hidden": "true" }, make("i", { style: { width: `${state.steps ? Math.min(100, (100 * done) / state.steps) : 0}%` } }));
      const name = `${arm.title}, seed ${state.seed}`;
      const first = !i || study.runs[i - 1].arm !== state.arm;
      const head = make("tr", { class: "arm" }, make("th", { colspan: 5, scope: "rowgroup" }, moeRL.swatch(arm), arm.title));
      return [...(first ? [head] : []), make("tr", { class: state.run === chosen ? "chosen" : null },
        make("td", {}, make("button", { type: "button", "data-run": state.run, "aria-pressed": String(state.run === chosen), title: `show ${name} below`, onclick: () => choose(state.run) }, `seed ${state.seed}`)),
        make("td", {}, make("span", { class: `state ${shown}`, role: "img", "aria-label": WORDS[shown] || shown, title: WORDS[shown] || shown }, MARKS[shown]), ` ${done}/${steps}`, progress),
        make("td", { class: "n" }, number(latest(run.points.reward))),
        make("td", { class: "n" }, changed === null ? "–" : `${number(100 * changed, 2)} %`),
        make("td", { class: "n" }, shown === "failed" ? "failed" : ago(state.age)))];
    });
    const focus = document.activeElement?.dataset?.run;
    rows.replaceChildren(...lines);
    if (focus) [...rows.querySelectorAll("button")].find((b) => b.dataset.run === focus)?.focus({ preventScroll: true });
    const reasons = new Map();
    for (const { run, problem } of study.runs) if (problem) reasons.set(problem, [...(reasons.get(problem) || []), run]);
    const words = [...reasons].map(([reason, of]) => `${of.join(", ")} failed: ${reason}`);
    for (const state of study.runs) {
      const shown = shownState(state), since = state.written === null ? "it wrote no row" : `last row ${when(state.written)}`;
      if (shown === "stopped") words.push(`${state.run} stopped before its end, and nothing writes to it any more; ${since}.`);
      if (shown === "stalled") words.push(`${state.run}: no DONE and no row for long; ${since}.`);
    }
    for (const [name, run] of runs) if (run.damaged) words.push(`${name}: ${run.damaged} damaged lines of metrics.jsonl were left out`);
    problems.textContent = words.join(" ");
  };

  const ago = (seconds) => seconds === null ? "–" : seconds < 90 ? `${Math.round(seconds)} s ago` : seconds < 5400 ? `${Math.round(seconds / 60)} min ago`
    : seconds < 129600 ? `${Math.round(seconds / 3600)} h ago` : `${Math.round(seconds / 86400)} d ago`;

  const when = (seconds) => new Date(1000 * seconds).toLocaleString([], { dateStyle: "medium", timeStyle: "short" });
})();
