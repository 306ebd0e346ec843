// Curves: one thin line per seed, a thick mean where an arm has several, one cursor for all charts.
"use strict";
(() => {
  const { make, svg, number } = moeRL;
  const MARGIN = { left: 48, right: 12, top: 10, bottom: 24 };
  const HEIGHT = 190;
  const MOST_POINTS = 250; // of one line; longer ones are averaged over neighbouring points, and the note says so
  const sum = (values) => values.includes(null) ? null : values.reduce((a, b) => a + b, 0);
  const mean = (values) => values.length && !values.includes(null) ? sum(values) / values.length : null;

  /** Values by step, appended in order; a step that comes again after others (a resumed run) drops all from there on. A value
   *  may be null (not finite, or not to be had), which makes its step a gap, or false: not recorded, and left out. */
  moeRL.Points = class {
    constructor(mode) {
      this.mode = mode; // "last" row of a step counts, or the "mean" or the "share" (sum over sum) of its updates' rows
      this.xs = []; this.top = []; this.bottom = [];
    }
    add(x, top, bottom = 1, update = null) {
      if (x === null || top === false || bottom === false) return;
      if (this.xs.at(-1) !== x) {
        while (this.xs.length && this.xs.at(-1) >= x) { this.xs.pop(); this.top.pop(); this.bottom.pop(); }
        this.xs.push(x);
        this.rows = new Map();
      }
      this.rows.set(this.mode === "last" ? null : update, [top, bottom]); // an update that comes again counts once
      const i = this.xs.length - 1, rows = [...this.rows.values()];
      this.top[i] = sum(rows.map((row) => row[0]));
      this.bottom[i] = sum(rows.map((row) => row[1]));
    }
    y(i) { return this.bottom[i] && this.top[i] !== null ? this.top[i] / this.bottom[i] : null; }
    /** The value at a step; undefined where there is none, null where it is a gap. */
    at(x) {
      let low = 0, high = this.xs.length - 1;
      while (low <= high) {
        const mid = (low + high) >> 1;
        if (this.xs[mid] === x) return this.y(mid);
        if (this.xs[mid] < x) low = mid + 1; else high = mid - 1;
      }
    }
  };

  /** Mean over runs at the steps that all of them have reached; a gap where one has a gap. */
  moeRL.meanOf = (all) => {
    const means = new moeRL.Points("last");
    const end = Math.min(...all.map((p) => p.xs.at(-1) ?? -1));
    for (const x of all[0].xs) {
      if (x > end) break;
      const ys = all.map((p) => p.at(x));
      if (!ys.includes(undefined)) means.add(x, mean(ys));
    }
    return means;
  };

  /** Long curves as means of `size` neighbouring points, fewer before a gap; short ones as they are. pairs: [[x, y], ...]. */
  moeRL.thin = (pairs, size) => {
    if (size <= 1) return pairs;
    const out = [];
    let near = [];
    const close = () => {
      if (near.length) out.push([(near[0][0] + near.at(-1)[0]) / 2, mean(near.map(([, y]) => y))]);
      near = [];
    };
    for (const [x, y] of pairs) {
      if (y === null) { close(); if (!out.length || out.at(-1)[1] !== null) out.push([x, null]); }
      else if (near.push([x, y]) === size) close();
    }
    close();
    return out;
  };

  const niceStep = (span, count) => {
    const raw = span / Math.max(1, count), power = 10 ** Math.floor(Math.log10(raw));
    return power * [1, 2, 2.5, 5, 10].find((m) => m * power >= raw * 0.999);
  };
  const ticksOf = (low, high, count) => {
    const step = niceStep(high - low || 1, count), out = [];
    for (let v = Math.ceil(low / step - 1e-9) * step; v <= high + step * 1e-9; v += step) out.push(Number(v.toPrecision(12)));
    return out;
  };
  const power = (exponent) => "10" + moeRL.superscript(exponent);

  /** Linear or logarithmic map of values to pixels; a log axis keeps a place for zero at its foot. */
  const axis = (ys, spec, top, bottom) => {
    const positive = ys.filter((y) => y > 0);
    if (spec.log && positive.length) {
      const zero = ys.some((y) => y <= 0), foot = zero ? bottom - 16 : bottom;
      let [low, high] = minmax(positive).map(Math.log10);
      if (high - low < 0.6) { const middle = (low + high) / 2; low = middle - 0.3; high = middle + 0.3; }
      const pad = 0.05 * (high - low);
      low -= pad; high += pad;
      const place = (y) => (y <= 0 ? bottom : foot - ((Math.log10(y) - low) / (high - low)) * (foot - top));
      const ticks = [];
      const every = Math.max(1, Math.ceil((high - low) / 4));
      for (let e = Math.ceil(low); e <= high; e++) if (e % every === 0) ticks.push([10 ** e, spec.percent ? null : power(e)]);
      if (ticks.length < 2) { // less than two decades: plain numbers between them
        ticks.length = 0;
        for (let e = Math.floor(low); e <= high; e++) for (const m of [1, 2, 5]) {
          const v = m * 10 ** e;
          if (Math.log10(v) >= low && Math.log10(v) <= high) ticks.push([v, null]);
        }
      }
      if (zero) ticks.push([0, "0"]);
      return { place, ticks, digits: 2 };
    }
    let [low, high] = ys.length ? minmax(ys) : [0, 1];
    if (low > 0 && low < 0.6 * high) low = 0;
    const least = 0.05 * Math.max(Math.abs(low), Math.abs(high)) || 1; // no drama about a fraction of a percent
    if (high - low < least) { const middle = (low + high) / 2; low = low === 0 ? 0 : middle - least / 2; high = low + least; }
    else { high += 0.05 * (high - low); if (low !== 0) low -= 0.05 * (high - low); }
    const place = (y) => bottom - ((y - low) / (high - low)) * (bottom - top);
    const ticks = ticksOf(low, high, 4), digits = ticks.length > 1 ? Math.ceil(Math.log10(Math.max(...ticks.map(Math.abs)) / (ticks[1] - ticks[0])) + 1) : 2;
    return { place, ticks: ticks.map((v) => [v, null]), digits: Math.max(2, digits) };
  };
  const minmax = (values) => {
    let low = Infinity, high = -Infinity;
    for (const v of values) { if (v < low) low = v; if (v > high) high = v; }
    return [low, high];
  };

  moeRL.LineChart = class {
    /** spec: {key, title, note, log, percent}; page: {cursor(step or null, from a pointer or key), choose(step)}. */
    constructor(host, spec, page) {
      Object.assign(this, { spec, page, groups: [], step: null, reading: false, begin: 0, end: 1, dragged: null });
      this.title = make("h3", { id: `title-${spec.key}` }, spec.title);
      const head = make("div", { class: "chart-head" }, this.title, moeRL.chartTools(this, spec.remove));
      this.note = make("p", { class: "chart-note" }, spec.note);
      this.plot = svg("svg", { class: "plot", tabindex: 0, role: "img", "aria-labelledby": `title-${spec.key}` });
      this.readout = make("div", { class: "readout", hidden: true });
      this.figure = make("figure", { class: "chart", id: `chart-${spec.key}` }, head, this.note,
        make("div", { class: "plot-box" }, this.plot, this.readout));
      host.append(this.figure);
      this.plot.addEventListener("pointermove", (event) => this.point(event));
      this.plot.addEventListener("pointerleave", () => page.cursor(null));
      this.plot.addEventListener("pointerdown", (event) => {
        this.dragged = { from: this.stepAt(event), x: event.clientX };
        this.plot.setPointerCapture(event.pointerId); // a drag may end beyond the chart
      });
      this.plot.addEventListener("pointerup", (event) => this.release(event));
      this.plot.addEventListener("dblclick", () => page.zoom(null));
      this.plot.addEventListener("keydown", (event) => this.key(event));
      this.plot.addEventListener("blur", () => page.cursor(null));
    }

    /** groups: [{label, colour, dash, runs: [{name, points}]}]; range: [first, last step shown]; levels: [{name, value}],
     *  lines across the chart that no group has, as a noise floor; why: what stands there if there is nothing to draw;
     *  smoothing: over how many points lines are averaged. */
    draw(groups, [begin, end], levels = [], why = "no data yet", smoothing = 1) {
      this.levels = levels;
      this.why = why;
      this.groups = groups.map((g) => ({ ...g, runs: g.runs.filter((r) => r.points.xs.length) })).filter((g) => g.runs.length);
      for (const group of this.groups) group.mean = moeRL.meanOf(group.runs.map((r) => r.points));
      const width = Math.max(220, this.plot.clientWidth || 320);
      const [left, right, top, bottom] = [MARGIN.left, width - MARGIN.right, MARGIN.top, HEIGHT - MARGIN.bottom];
      Object.assign(this, { left, right, begin, end: Math.max(begin + 1, end) });
      this.plot.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
      this.plot.setAttribute("height", HEIGHT);
      const longest = Math.max(0, ...this.groups.flatMap((g) => g.runs.map((r) => r.points.xs.length)));
      const size = Math.ceil(longest / MOST_POINTS);
      const shown = (points) => moeRL.thin(moeRL.smooth(points.xs.map((x, i) => [x, points.y(i)]), smoothing), size).filter(([x]) => x >= begin && x <= this.end);
      this.averaged = smoothing > 1 || size > 1;
      const lines = this.groups.flatMap((group) => {
        const several = group.runs.length > 1;
        group.drawn = shown(group.mean);
        const own = group.runs.map((r) => ({ group, kind: several ? "thin" : "thick", shown: shown(r.points) }));
        return several ? [...own, { group, kind: "thick", shown: group.drawn }] : own;
      });
      const ys = lines.flatMap((line) => line.shown.map(([, y]) => y)), scaled = ys.filter((y) => y !== null);
      this.note.textContent = this.spec.note + (smoothing > 1 ? `; each the mean of the last ${smoothing} points` : "") + (size > 1 ? `; means of ${size} points` : "")
        + (ys.length > scaled.length ? "; gaps: not finite, or not to be had" : "") + (levels.length ? "; dashed: noise floor" : "");
      if (scaled.length) scaled.push(...levels.map((level) => level.value));
      const { place, ticks, digits } = axis(scaled, this.spec, top, bottom);
      this.place = place;
      const parts = [];
      for (const [value, label] of ticks) {
        const y = place(value);
        parts.push(svg("line", { class: "grid", x1: left, x2: right, y1: y, y2: y }),
          svg("text", { class: "tick", x: left - 6, y: y + 3.5, "text-anchor": "end" }, label ?? this.show(value, digits)));
      }
      for (const x of ticksOf(this.begin, this.end, Math.max(2, Math.floor(width / 80))).filter(Number.isInteger)) {
        parts.push(svg("text", { class: "tick", x: this.x(x), y: HEIGHT - 8, "text-anchor": "middle" }, String(x)));
      }
      if (scaled.length) parts.push(...this.drawLevels(), ...this.drawMarks());
      for (const kind of ["thin", "thick"]) parts.push(...lines.filter((line) => line.kind === kind).map((line) => this.line(line, longest <= 16)));
      if (!scaled.length) parts.push(svg("text", { class: "tick why", x: (left + right) / 2, y: HEIGHT / 2, "text-anchor": "middle" }, why));
      this.cross = svg("g", { class: "cross" });
      this.plot.replaceChildren(...parts, this.cross);
      this.plot.setAttribute("aria-label", this.describe());
      this.mark(this.step, this.reading);
    }

    x(step) { return this.left + ((step - this.begin) / (this.end - this.begin)) * (this.right - this.left); }

    show(value, digits = 3) {
      if (value === null) return "–";
      return this.spec.percent ? `${number(100 * value, digits)} %` : number(value, digits);
    }

    line({ group, kind, shown }, dots) {
      let path = "", pen = "M";
      for (const [x, y] of shown) {
        if (y === null) { pen = "M"; continue; }
        path += `${pen}${this.x(x).toFixed(1)},${this.place(y).toFixed(1)}`;
        pen = "L";
      }
      const g = svg("g", { class: `line ${kind}` });
      if (path) g.append(svg("path", { d: path, stroke: group.colour, "stroke-dasharray": kind === "thick" ? group.dash.map((d) => d * 2).join(" ") : null }));
      shown.forEach(([x, y], i) => {
        const alone = (shown[i - 1]?.[1] ?? null) === null && (shown[i + 1]?.[1] ?? null) === null; // no line would show it
        if (y !== null && (alone || (dots && kind === "thick"))) g.append(svg("circle", { cx: this.x(x), cy: this.place(y), r: kind === "thick" ? 2.4 : 1.2, fill: group.colour }));
      });
      return g;
    }

    /** Steps at which an alarm on this value crossed, as triangles at the top; `marks` is set by the page. */
    drawMarks() {
      return (this.marks || []).filter(({ step }) => step >= this.begin && step <= this.end).map(({ step, title }) => {
        const x = this.x(step);
        return svg("path", { class: "alarm", d: `M${x - 3.5},${MARGIN.top - 7}h7l-3.5,6z` }, svg("title", {}, title));
      });
    }

    drawLevels() {
      const parts = [], names = [];
      for (const { name, value } of [...this.levels].sort((a, b) => b.value - a.value)) { // from the top
        const y = this.place(value);
        parts.push(svg("line", { class: `level ${name}`, x1: this.left, x2: this.right, y1: y, y2: y }, svg("title", {}, `equal weights, ${name}: ${this.show(value)}`)));
        if (names.length && y - names.at(-1).y < 13) names.at(-1).text += `, ${name}`; // no room between the two
        else names.push({ y, text: name });
      }
      return [...parts, ...names.map(({ y, text }) => svg("text", { class: "tick level-name", x: this.right, y: y - 4, "text-anchor": "end" }, text))];
    }

    describe() {
      const last = this.groups.map((g) => `${g.label} ${this.show(g.mean.xs.length ? g.mean.y(g.mean.xs.length - 1) : null)}`);
      const floor = this.levels.length ? ` Noise floor: ${this.levels.map((l) => `${l.name} ${this.show(l.value)}`).join(", ")}.` : "";
      return `${this.spec.title}. Latest: ${last.join(", ") || this.why}.${floor} Arrow keys move through the steps.`;
    }

    stepAt(event) {
      const box = this.plot.getBoundingClientRect();
      const share = (event.clientX - box.left - this.left) / (this.right - this.left);
      return Math.round(Math.max(this.begin, Math.min(this.end, this.begin + share * (this.end - this.begin))));
    }

    point(event) { this.page.cursor(this.stepAt(event), this); }

    /** The pointer goes up: after a drag the steps between are shown, after a click the step is chosen. */
    release(event) {
      const from = this.dragged, to = this.stepAt(event);
      this.dragged = null;
      if (from && Math.abs(event.clientX - from.x) > 8 && to !== from.from) this.page.zoom([Math.min(from.from, to), Math.max(from.from, to)]);
      else if (from) this.page.choose(to);
    }

    key(event) {
      const now = this.step ?? this.begin, page = Math.max(1, Math.round((this.end - this.begin) / 10));
      const to = { ArrowRight: now + 1, ArrowLeft: now - 1, PageUp: now + page, PageDown: now - page, Home: this.begin, End: this.end }[event.key];
      if (to !== undefined) { event.preventDefault(); this.page.cursor(Math.max(this.begin, Math.min(this.end, to)), this); }
      else if (event.key === "Enter" && this.step !== null) this.page.choose(this.step);
      else if (event.key === "Escape") this.page.cursor(null);
    }

    /** The value of a group's line nearest to a step, if lines are averaged; null beyond its ends. */
    drawnAt({ drawn }, step) {
      const far = ([x]) => Math.abs(x - step), near = drawn.reduce((best, pair) => (far(pair) < far(best) ? pair : best), drawn[0]);
      return near && step >= drawn[0][0] - 0.5 && step <= drawn.at(-1)[0] + 0.5 ? near : [step, null];
    }

    /** Draw the cursor at a step; `reading`: this chart shows the values. */
    mark(step, reading) {
      Object.assign(this, { step, reading });
      this.readout.hidden = step === null || !reading;
      if (!this.cross) return;
      if (step === null || step < this.begin || step > this.end) return void this.cross.replaceChildren();
      const x = this.x(step);
      const parts = [svg("line", { x1: x, x2: x, y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom })];
      const rows = [];
      for (const group of this.groups) {
        const values = group.runs.map((r) => r.points.at(step)).filter((y) => y !== undefined);
        const [at, y] = this.averaged ? this.drawnAt(group, step) : [step, mean(values)]; // the dot lies on the line
        if (y !== null) parts.push(svg("circle", { cx: this.x(at), cy: this.place(y), r: 3, fill: group.colour }));
        rows.push(make("tr", {}, make("td", {}, moeRL.swatch(group)), make("td", {}, group.label), make("td", {}, this.show(y)),
          make("td", {}, values.length > 1 ? `n = ${values.length}` : "")));
      }
      this.cross.replaceChildren(...parts);
      if (reading) {
        this.readout.replaceChildren(make("b", {}, `step ${step}${this.averaged ? ", averaged like the lines" : ""}`), make("table", {}, make("tbody", {}, ...rows)));
        const share = x / (this.right + MARGIN.right);
        this.readout.classList.toggle("to-left", share > 0.5);
        this.readout.style.setProperty("--x", `${100 * share}%`);
        this.readout.setAttribute("role", "status");
      }
    }
  };

  /** A short piece of a group's line. */
  moeRL.swatch = (group) => svg("svg", { class: "swatch", width: 26, height: 10, "aria-hidden": "true" },
    svg("line", { x1: 1, x2: 25, y1: 5, y2: 5, stroke: group.colour, "stroke-width": 2.4, "stroke-dasharray": group.dash.map((d) => d * 2).join(" ") }));
})();
