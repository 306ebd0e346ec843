// Tokens by site and expert, the old policy against the policy after the last update, summed over the stored steps.
"use strict";
(() => {
  const { make, svg, number } = moeRL;
  const LEFT = 64, ROW = 18, TOP = 4, FOOT = 18;

  moeRL.ExpertMap = class {
    /** fetchCounts(run): the API's answer. scale(): {sequence, diverging}, nine colours each. */
    constructor(host, fetchCounts, scale) {
      Object.assign(this, { fetchCounts, scale, run: null, data: null });
      this.pick = make("select", { "aria-label": "what the map of experts shows", onchange: () => this.draw() },
        make("option", { value: "change" }, "new minus old"), make("option", { value: "old" }, "old policy"),
        make("option", { value: "new" }, "after the last update"), make("option", { value: "moved" }, "slots that left"));
      this.note = make("p", { class: "quiet" });
      this.plot = svg("svg", { class: "heat", role: "img" });
      host.replaceChildren(make("label", { class: "quiet" }, "show ", this.pick), this.note, this.plot);
    }

    async show(run, steps) {
      const key = JSON.stringify([run, steps]);
      if (key !== this.key) {
        if (run !== this.run) { this.data = null; this.note.textContent = ""; } // of another run nothing stays
        Object.assign(this, { key, run });
        this.draw();
        try {
          const data = await this.fetchCounts(run);
          if (key !== this.key) return; // another run was chosen meanwhile
          this.data = data;
        } catch (error) {
          if (key !== this.key) return;
          Object.assign(this, { key: null, data: null }); // the next call asks again
          this.draw();
          throw error;
        }
      }
      this.draw();
    }

    draw() {
      const data = this.data, none = !data || !data.steps.length;
      this.plot.toggleAttribute("hidden", none);
      this.pick.parentElement.hidden = none;
      if (!data) return;
      if (none) { this.note.textContent = "No routes are stored for this run (probe.tokens_every sets the steps)."; return; }
      const what = this.pick.value, scale = this.scale();
      const value = (l, e) => what === "change" ? data.new[l][e] - data.old[l][e] : data[what][l][e];
      const total = (l) => data.old[l].reduce((a, b) => a + b, 0) || 1;
      const experts = data.old[0].length, width = Math.max(220, this.plot.clientWidth || 480), cell = (width - LEFT) / experts;
      const shares = data.sites.flatMap((_, l) => data.old[l].map((_, e) => Math.abs(value(l, e)) / total(l)));
      const top = Math.max(...shares) || 1;
      const colour = (share) => what === "change" ? scale.diverging[4 + Math.round((4 * share) / top)] : scale.sequence[Math.round((8 * share) / top)];
      const parts = data.sites.flatMap((site, l) => [
        svg("text", { class: "tick", x: LEFT - 6, y: TOP + ROW * l + 13, "text-anchor": "end" }, data.labels[l]),
        ...data.old[l].map((_, e) => svg("rect", { x: LEFT + cell * e, y: TOP + ROW * l, width: Math.max(1, cell - 1), height: ROW - 1,
          fill: colour(value(l, e) / total(l)) }, svg("title", {}, `${site}, expert ${e}: old ${data.old[l][e]}, new ${data.new[l][e]} tokens; ${data.moved[l][e]} left it`))),
      ]);
      const height = TOP + ROW * data.sites.length + FOOT, every = Math.max(1, Math.ceil(experts / Math.max(1, Math.floor((width - LEFT) / 26))));
      for (let e = 0; e < experts; e += every) parts.push(svg("text", { class: "tick", x: LEFT + cell * (e + 0.5), y: height - 5, "text-anchor": "middle" }, String(e)));
      this.plot.setAttribute("viewBox", `0 0 ${width} ${height}`);
      this.plot.setAttribute("height", height);
      this.plot.setAttribute("aria-label", `tokens by site and expert, ${this.pick.selectedOptions[0].textContent}`);
      this.plot.replaceChildren(...parts);
      const moved = data.moved.flat().reduce((a, b) => a + b, 0), all = data.old.flat().reduce((a, b) => a + b, 0);
      this.note.textContent = `Response tokens of ${data.steps.length} stored ${data.steps.length === 1 ? "step" : "steps"} (${data.steps.join(", ")}), `
        + `old policy against the policy after the step’s last update: ${number(100 * moved / Math.max(1, all), 2)} % of the slots left their expert. Columns are experts; the strongest colour is ${number(100 * top, 2)} % of a site’s slots`
        + (what === "change" ? ", purple where an expert gained, orange where it lost." : ".");
    }
  };
})();
