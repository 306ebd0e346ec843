"""Tables of the alarms of a study's runs, for the report and its figure: crossings by arm, and collapsed runs."""

from statistics import median
from typing import Any

from moe_rl.run_rows import ROWS
from moe_rl.study.alarms import RunAlarms, alarms_of
from moe_rl.study.arms import full_label, per_study
from moe_rl.study.data import FIELDS, StudyData


@per_study
def study_alarms(data: StudyData) -> dict[tuple[str, int], RunAlarms]:
    """Return (arm, seed) -> the alarms of that run.

    The study's own thresholds stand in place of those of `ALARMS`; alarms that the study adds come after them.
    """
    alarms = alarms_of(data.config.get("alarms"))
    found = {(run.arm, run.seed): RunAlarms(alarms, run.responses == "policy") for run in data.runs}
    wanted: dict[str, set[str]] = {"rollout": {"reward"}}
    for alarm in alarms:
        wanted.setdefault(alarm.kind, {"skipped"}).update(name for name in (alarm.metric, alarm.over) if name)
    for kind, names in wanted.items():
        frame = getattr(data, FIELDS[kind])
        if frame.empty:
            continue
        columns = dict.fromkeys(("arm", "seed", "step", *ROWS[kind], *sorted(names)))
        for (arm, seed), own in frame[[name for name in columns if name in frame]].groupby(["arm", "seed"], sort=False):
            # A column that is empty in a run is left out: its values may be null, or were not recorded.
            lacking = [name for name in names - {"reward"} if name in own and own[name].isna().all()]
            for row in own.drop(columns=lacking).to_dict("records"):
                values = {name: None if value != value else value for name, value in row.items()}
                found[str(arm), int(seed)].take({**values, "kind": kind, "step": int(row["step"])})
    return found


def alarm_rows(data: StudyData) -> list[dict[str, Any]]:
    """Return one row per alarm: title, rule, source and, in `arms`, how many runs of each arm crossed its threshold.

    By arm: `crossed` runs `of` those with the signal, and the median `first` step of those that crossed. An alarm whose
    signal no run has is left out, unless the study adds it; of such an alarm the rule says in how many runs its metric
    was null at some steps.
    """
    runs = study_alarms(data)
    rows = []
    for alarm in alarms_of(data.config.get("alarms")):
        arms = []
        for arm in data.arms.index:
            own = [seen for (name, _), seen in runs.items() if name == arm and seen.seen[alarm.name]]
            first = [steps[0][0] for seen in own if (steps := seen.crossed[alarm.name])]
            middle = median(first) if first else None
            arms.append({"arm": str(arm), "crossed": len(first), "of": len(own), "first": middle})
        if (heard := any(row["of"] for row in arms)) or alarm.declared:
            null = sum(alarm.declared and alarm.name in seen.nulls for seen in runs.values())
            lack = "" if heard else ": no run recorded a finite value"
            rule = alarm.rule + (f": null at some steps of {null} runs" if null else lack)
            rows.append({"title": alarm.title, "rule": rule, "source": alarm.source, "arms": arms})
    return rows


def collapses(data: StudyData) -> list[dict[str, Any]]:
    """Return one dict per run that collapsed: run (ARM/seedN), label, step of the collapse, and `first`.

    `first` lists the alarms crossed by then as (title, step), earliest first.
    """
    return [
        {
            "run": f"{arm}/seed{seed}",
            "label": f"{full_label(data, arm)}, seed {seed}",
            "step": alarms.collapse,
            "first": [(alarm.title, step) for alarm, step in alarms.before_collapse()],
        }
        for (arm, seed), alarms in study_alarms(data).items()
        if alarms.collapse is not None
    ]
