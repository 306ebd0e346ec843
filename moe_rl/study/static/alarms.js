// Alarms: which signals crossed their thresholds, in which runs and from which step on; after a collapse, in which order.
"use strict";
(() => {
  const { make } = moeRL;
  const list = (items) => items.length < 2 ? items.join("") : `${items.slice(0, -1).join(", ")} and ${items.at(-1)}`;

  /** host: an element; table: [{name, title, rule, source, declared}]; runs: [{name, title, alarms}], those shown, `alarms` as the
   *  server sums them up; problem: what is wrong with the study's own thresholds. */
  moeRL.drawAlarms = (host, table, runs, problem) => {
    const known = runs.filter((run) => run.alarms);
    const rows = table.flatMap((alarm) => {
      const heard = known.filter((run) => !run.alarms.lacks.includes(alarm.name));
      const nulls = alarm.declared ? known.filter((run) => run.alarms.nulls[alarm.name]) : []; // not finite: beyond every threshold
      if (!heard.length && !(alarm.declared && known.length)) return [];
      const crossed = heard.filter((run) => run.alarms.crossed[alarm.name]?.length);
      const first = crossed.map((run) => run.alarms.crossed[alarm.name][0][0]);
      const where = crossed.map((run) => `${run.title}: ${run.alarms.crossed[alarm.name].length} steps, first ${run.alarms.crossed[alarm.name][0][0]}`);
      where.push(...nulls.map((run) => `${run.title}: null at ${run.alarms.nulls[alarm.name]} steps`));
      const counts = [heard.length ? `${crossed.length} of ${heard.length}` : "", nulls.length ? `null in ${nulls.length}` : ""].filter(Boolean);
      return [make("tr", { "data-alarm": alarm.name, class: crossed.length || nulls.length ? "crossed" : null, title: `${alarm.rule}\nSource: ${alarm.source}${where.length ? "\n" + where.join("\n") : ""}` },
        make("th", { scope: "row" }, alarm.title),
        make("td", { class: "n" }, counts.join(", ") || "not recorded"),
        make("td", { class: "n" }, first.length ? String(Math.min(...first)) : "–"))];
    });
    const falls = known.filter((run) => run.alarms.collapse !== null).map((run) => {
      const titles = run.alarms.first.map(([name, step]) => `${table.find((alarm) => alarm.name === name)?.title ?? name} (step ${step})`);
      return make("li", {}, make("b", {}, run.title), ` collapsed at step ${run.alarms.collapse}; crossed first: ${titles.length ? list(titles) : "none"}.`);
    });
    host.replaceChildren(
      ...(problem ? [make("p", { class: "lost" }, `${problem}. The thresholds of the table hold.`)] : []),
      ...(rows.length ? [make("table", {}, make("thead", {}, make("tr", {}, make("th", { scope: "col" }, "signal"),
        make("th", { scope: "col", class: "n" }, "runs"), make("th", { scope: "col", class: "n" }, "first step"))), make("tbody", {}, ...rows))]
        : [make("p", { class: "quiet" }, "no monitored signal was recorded yet")]),
      ...(falls.length ? [make("ul", { class: "falls" }, ...falls)] : []));
  };

  /** Steps at which alarms on a value crossed in any of these runs: [{step, title}], for a chart of that value. */
  moeRL.alarmMarks = (table, [kind, metric], runs) => {
    const marks = new Map();
    for (const alarm of table.filter(({ of }) => of[0] === kind && of[1] === metric.split(" ")[0])) { // "a and b": drawn is a over b
      const crossed = new Map();
      for (const run of runs) for (const [step] of run.alarms?.crossed[alarm.name] || []) {
        crossed.set(step, [...(crossed.get(step) || [`${alarm.rule}, step ${step}`]), run.title]);
      }
      for (const [step, titles] of crossed) marks.set(step, [...(marks.get(step) || []), ...titles]); // of each alarm a block
    }
    return [...marks].map(([step, titles]) => ({ step, title: titles.join("\n") }));
  };
})();
