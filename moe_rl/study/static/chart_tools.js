// What a chart's curves can be turned into: smoother ones, a CSV file, a PNG file.
"use strict";
(() => {
  const { make } = moeRL;

  /** Each y as the mean of itself and the up to `size` - 1 values before it; gaps stay gaps. pairs: [[x, y], ...]. */
  moeRL.smooth = (pairs, size) => size <= 1 ? pairs : pairs.map(([x, y], i) => {
    if (y === null) return [x, null];
    const near = pairs.slice(Math.max(0, i - size + 1), i + 1).map((pair) => pair[1]).filter((v) => v !== null);
    return [x, near.reduce((a, b) => a + b, 0) / near.length];
  });

  /** Hand a file to the reader; tests look at what is handed over. */
  moeRL.save = (name, blob) => {
    const link = make("a", { href: URL.createObjectURL(blob), download: name });
    document.body.append(link);
    link.click();
    link.remove();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  };

  const quoted = (value) => /[",\n]/.test(value) ? `"${String(value).replaceAll('"', '""')}"` : String(value);

  /** The values of a chart as they were recorded, unsmoothed, one row per run and step, in the shown range of steps. */
  moeRL.csvOf = (chart) => {
    const rows = [["arm", "run", "step", chart.spec.key]];
    for (const group of chart.groups) for (const run of group.runs) {
      run.points.xs.forEach((x, i) => {
        if (x >= chart.begin && x <= chart.end) rows.push([group.arm ?? group.label, run.name, x, run.points.y(i) ?? ""]);
      });
    }
    return rows.map((row) => row.map(quoted).join(",")).join("\n") + "\n";
  };

  const STYLES = ["fill", "stroke", "stroke-width", "stroke-dasharray", "opacity", "font-size", "font-family", "text-anchor", "paint-order"];

  /** A chart's picture as a PNG of twice its size, title included. */
  moeRL.pngOf = async (chart) => {
    const original = chart.plot, copy = original.cloneNode(true);
    const from = [...original.querySelectorAll("*")];
    [...copy.querySelectorAll("*")].forEach((element, i) => {
      const style = getComputedStyle(from[i]);
      for (const name of STYLES) if (style.getPropertyValue(name)) element.style.setProperty(name, style.getPropertyValue(name));
    });
    const [, , width, height] = original.getAttribute("viewBox").split(" ").map(Number);
    copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
    copy.setAttribute("width", width);
    copy.setAttribute("height", height);
    const picture = new Image();
    picture.src = "data:image/svg+xml;charset=utf-8," + encodeURIComponent(new XMLSerializer().serializeToString(copy));
    await picture.decode();
    const canvas = make("canvas", { width: 2 * width, height: 2 * (height + 24) }), pen = canvas.getContext("2d");
    const root = getComputedStyle(document.documentElement);
    pen.scale(2, 2);
    pen.fillStyle = root.backgroundColor;
    pen.fillRect(0, 0, width, height + 24);
    pen.fillStyle = root.color;
    pen.font = `600 13px ${root.fontFamily}`;
    pen.fillText(chart.spec.title, 6, 16);
    pen.drawImage(picture, 0, 24, width, height);
    return new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
  };

  /** The small buttons beside a chart's title. remove: for charts that the reader added. */
  moeRL.chartTools = (chart, remove) => make("span", { class: "tools" },
    make("button", { type: "button", "aria-label": `CSV of ${chart.spec.title}`, title: "the values as recorded", onclick: () =>
      moeRL.save(`${chart.spec.key}.csv`, new Blob([moeRL.csvOf(chart)], { type: "text/csv" })) }, "CSV"),
    make("button", { type: "button", "aria-label": `PNG of ${chart.spec.title}`, title: "the picture", onclick: async () =>
      moeRL.save(`${chart.spec.key}.png`, await moeRL.pngOf(chart)) }, "PNG"),
    remove ? make("button", { type: "button", "aria-label": `remove ${chart.spec.title}`, onclick: remove }, "×") : null);
})();
