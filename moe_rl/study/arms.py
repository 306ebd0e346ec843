"""Arms of a study: the settings in which they differ, their labels, and the measured doses of noise."""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import numpy as np
import pandas as pd

from moe_rl.settings import FREE, differences, flatten
from moe_rl.study.data import StudyData, pooled_rate
from moe_rl.study.words import two

Result = TypeVar("Result")

METHOD_FIELDS = ("method", "objective", "replay", "noise", "trainer", "run", "seed", "arm", "label", "note")
"""Parts of a configuration in which arms of one condition may differ and still be the same experiment.

Some of these parts exist only in other trainers' runs; `run` is where a run writes and what it says.
"""


def per_study(compute: Callable[[StudyData], Result]) -> Callable[[StudyData], Result]:
    """Decorator: compute the result once for each StudyData and keep it; tables are handed out as copies."""

    @wraps(compute)
    def once(data: StudyData) -> Result:
        kept: dict[str, Result] = vars(data).setdefault("_computed", {})
        if compute.__qualname__ not in kept:
            kept[compute.__qualname__] = compute(data)
        result = kept[compute.__qualname__]
        return cast(Result, result.copy()) if isinstance(result, pd.DataFrame) else result

    return once


def arm_settings(data: StudyData) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Return the settings in which arms differ, and the settings that all arms share.

    The first is a table, rows dotted setting, columns arm, without settings that change no number (`FREE`). The second
    maps a dotted setting to its value. Settings are those of the first run of an arm, without `seed`.
    """
    by_arm = {str(arm): flatten(data.runs_of(str(arm))[0].config) for arm in data.arms.index}
    names = list(dict.fromkeys(name for settings in by_arm.values() for name in settings if name != "seed"))
    table = pd.DataFrame({arm: [settings.get(name) for name in names] for arm, settings in by_arm.items()}, index=names)
    differ = [len({str(value) for value in row}) > 1 for row in table.to_numpy()]
    shared = {name: table.loc[name].iloc[0] for name, d in zip(names, differ, strict=True) if not d}
    return table.loc[np.array(differ, dtype=bool) & ~table.index.isin(FREE)], shared


def clip_ranges_differ(data: StudyData) -> bool:
    """Return whether the arms clip at different bounds."""
    return any(name.endswith((".clip_low", ".clip_high")) for name in arm_settings(data)[0].index)


def full_label(data: StudyData, arm: str) -> str:
    """Return the label of an arm, with the scale of its noise if it has noise that the label does not name."""
    noise = float(data.arms["noise"][arm])
    label = str(data.arms["label"][arm])
    return f"{label}, noise σ = {noise:g}" if noise and "noise" not in label.lower() else label


def replay_stands_for_noise(data: StudyData, noise: float) -> str | None:
    """Return the natural replay arm that must equal the replay arm under this noise; None if there is none.

    Replay of all rows forces the choice of experts, so noise on the choice changes nothing. The two runs are equal by
    construction only if nothing else differs: every setting outside the method must be that of the noise arms.
    """
    arms = data.arms
    if noise == 0:
        return None
    noisy = [str(arm) for arm in arms.index[arms["noise"] == noise]]
    for arm in map(str, arms.index[(arms["noise"] == 0) & (arms["replay"].str.lower() != "none")]):
        if replays_all(data, arm) and all(same_but_for_method(data, arm, other) for other in noisy):
            return arm
    return None


def replays_all(data: StudyData, arm: str) -> bool:
    """Return whether a replay arm forces every row.

    With `keep` or `keep_sites` some rows route live, and noise reaches those rows.
    """
    settings = flatten(data.runs_of(arm)[0].config)
    return settings.get("method.keep", 1) == 1 and settings.get("method.keep_sites") is None


def replay_identity(data: StudyData) -> pd.DataFrame:
    """Return how far replay arms that were run under noise depart from the natural replay run, which they must repeat.

    Columns: arm, seeds compared, steps compared, difference (largest absolute difference of reward).
    """
    rows = []
    for arm, about in data.arms.iterrows() if "reward" in data.rollouts else ():
        natural = replay_stands_for_noise(data, float(about["noise"])) if about["noise"] else None
        if natural is None or about["method"] != data.arms["method"][natural] or not replays_all(data, str(arm)):
            continue
        pair = [data.rollouts.loc[data.rollouts["arm"] == a, ["seed", "step", "reward"]] for a in (arm, natural)]
        both = pair[0].merge(pair[1], on=["seed", "step"]).dropna()
        if both.empty:  # no common step yet
            continue
        gap = float((both["reward_x"] - both["reward_y"]).abs().max())
        seeds = both["seed"].nunique()
        rows.append({"arm": arm, "seeds": seeds, "steps": len(both), "difference": gap})
    return pd.DataFrame(rows, columns=["arm", "seeds", "steps", "difference"])


def same_but_for_method(data: StudyData, arm: str, other: str) -> bool:
    """Return whether two arms have all settings outside the method in common, apart from `FREE` ones."""
    one, two = (data.runs_of(name)[0].config for name in (arm, other))
    return all(name in FREE or name.split(".")[0] in METHOD_FIELDS for name in differences(one, two))


@per_study
def doses(data: StudyData) -> dict[float, tuple[float, float]]:
    """Return selection noise -> (lowest, highest) share of slots that it re-routed, over the arms that route live.

    Shares are of response slots that the update forward routed otherwise than the old policy (weights and noise
    together), pooled over a whole run; slots of the response tokens' own positions. Empty if the slots were not
    recorded.
    """
    if data.updates.empty or not {"slots_changed", "slots"} <= set(data.updates):
        return {}
    live = data.arms[(data.arms["replay"].str.lower() == "none") & (data.arms["noise"] > 0)]
    rates = slots_rerouted(data, ["arm"]).reindex(live.index).dropna()
    grouped = rates.groupby(live["noise"].reindex(rates.index))
    return {float(str(noise)): (float(part.min()), float(part.max())) for noise, part in grouped}


def slots_rerouted(data: StudyData, by: list[str]) -> pd.Series:
    """Return the share of response slots that update forwards routed otherwise than the old policy, grouped by `by`.

    Shares are pooled over updates; NaN if no slot was compared.
    """
    return pooled_rate(data.updates, "slots_changed", "slots", by).rename("slots_rerouted")


def condition_label(data: StudyData, noise: float) -> str:
    """Return a condition in words: natural, or the measured dose, which is the share of slots that the noise re-routed.

    Examples: `natural`, `39 % of slots re-routed (noise σ = 0.02)`; without a measurement `noise σ = 0.02`.
    """
    if noise == 0:
        return "natural"
    label, dose = f"noise σ = {noise:g}", dose_label(data, noise)
    return f"{dose} ({label})" if dose else label


def dose_label(data: StudyData, noise: float) -> str:
    """Return the measured dose of a noise in words, `39 % of slots re-routed`; empty if it was not measured."""
    shares = [100 * share for share in doses(data).get(noise, ())]
    ends = dict.fromkeys(f"{share:.0f}" if share >= 10 else two(share) for share in shares)
    return f"{'–'.join(ends)} % of slots re-routed" if ends else ""
