"""Final reward of every arm with its seeds and interval, and below it the paired differences that the study
compares."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.ticker import MaxNLocator

from moe_rl.study.comparing import Pair, comparison_table, comparisons
from moe_rl.study.curves import FAILED, FINAL_STEPS
from moe_rl.study.data import StudyData
from moe_rl.study.figures.register import Drawing, figure
from moe_rl.study.figures.rows import DRAWN, EACH, Column, Dots, Rows, arm_rows, draw_dots, quiet_rows
from moe_rl.study.figures.style import GREY, INK, PAGE, NothingToDraw, arm_colour, inches
from moe_rl.study.outcomes import OUTCOMES, counts_shown, final_rewards, reward_names
from moe_rl.study.words import cut

MOST_PAIRS = 16
"""Most comparisons that are drawn; more are left to the table."""
LONGEST, TALL = 44, 1.45  # letters of a comparison's name in one line; height of a row that has two
INTERVAL, MEAN = 1.3, 0.55  # inches for a mean with and without its interval, right of the dots


@figure(
    title="Final reward.",
    caption=(
        f"Final reward: mean of the last {FINAL_STEPS} steps of a run, or the held-out reward where the responses are "
        "not the policy's or the study declares it. Large: mean over seeds; bar: its interval; small: seeds. f, b, c: "
        f"runs that failed ({FAILED}), ended below their start, collapsed."
    ),
    needs={},
    rank=0,
)
def final_reward(data: StudyData) -> Drawing:
    table = final_rewards(data)
    if table["final"].isna().all():
        raise NothingToDraw("final_reward: no rollout has been recorded yet")
    table = table[table["final"].notna()]
    by_arm: dict[str, dict[int, float]] = {row["arm"]: row["by_seed"] for row in table.to_dict("records")}
    finals = pd.DataFrame(by_arm).T
    runs = {(arm, seed) for arm, seeds in by_arm.items() for seed, final in seeds.items() if np.isfinite(final)}
    compared = [pair for pair in comparisons(data) if pair.result.n]
    pairs = compared if len(compared) <= MOST_PAIRS else []
    counts = sorted({pair.result.n for pair in pairs})
    means = table.set_index("arm")["final"]
    many = len(table) > 12

    def order(arms: Sequence[str]) -> Sequence[str]:
        return sorted(arms, key=lambda arm: -means[arm]) if many else arms

    below = 0.6 + EACH * _rows(pairs, [_name(data, pair) for pair in pairs]) if pairs else 0.0
    counts_of = {row["arm"]: " · ".join(counts_shown(row)) for row in table.to_dict("records")}
    room = max(0.5, 0.06 + 0.05 * max(map(len, counts_of.values())))  # inches
    before = INTERVAL if np.isfinite(table["low"]).any() else MEAN
    drawn = arm_rows(data, [Column("", [Dots(finals)])], order, beside=before + room, below=below)
    _numbers(drawn, table, counts_of, before, room)
    said = ["Arms are sorted by their mean; with few seeds that is no ranking."] if many else []
    if pairs:
        _differences(drawn, data, pairs, reward_names(table)[0])
        ends = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
        said += [
            f"Below: differences between arms, paired by seed over finished runs (pairs: {ends}), with mean and "
            "interval; between the dotted lines they are too small to be of interest. ▸: higher or lower by the "
            "rules of the comparison, that is resolved from 0 and not too small to be of interest."
        ]
    elif compared:
        said += [f"The {len(compared)} differences between arms are in its table, differences.csv."]
    frame = table.drop(columns=[name for name in table if str(name).endswith(("by_seed", "collapse_steps"))])
    tables = {"differences": comparison_table(data)} if compared else {}
    return Drawing(drawn.figure, frame, " ".join(said), interval="bar", tables=tables, runs=runs, counts=counts)


def _numbers(drawn: Rows, table: pd.DataFrame, counts: dict[str, str], before: float, room: float) -> None:
    """Write each arm's mean with its interval, and the counts of what went wrong, right of the dots; `before` and
    `room` are the inches for these two."""
    ax = drawn.axes[0]
    ax.set_xlabel(reward_names(table)[0], fontsize=7.5, labelpad=1)
    wide = ax.get_position().width * PAGE
    place: dict[str, Any] = {"transform": ax.get_yaxis_transform(), "va": "center", "ha": "right"}
    rows = table[table["arm"].isin(list(drawn.places))].to_dict("records")
    first, second = 1 + (before - 0.02) / wide, 1 + (before + room - 0.02) / wide
    ax.text(first, -0.8, "mean, interval" if before == INTERVAL else "mean", fontsize=6.5, color=GREY, **place)
    ax.text(second, -0.8, "f · b · c", fontsize=6.5, color=GREY, **place)
    for row in rows:
        words = f"{row['final']:.3f}"
        words += f" [{row['low']:.3f}, {row['high']:.3f}]" if np.isfinite(row["low"]) else ""
        ax.text(first, drawn.places[row["arm"]], words.replace("-", "−"), fontsize=7, **place)
        colour = INK if any(row[name] for name in OUTCOMES) else GREY
        ax.text(second, drawn.places[row["arm"]], counts[row["arm"]], fontsize=7, color=colour, **place)


def _differences(drawn: Rows, data: StudyData, pairs: list[Pair], measured: str) -> None:
    """Draw one row per comparison, by condition, in the colour of the arm that is compared."""
    pairs = sorted(pairs, key=lambda pair: pair.noise)
    total = drawn.figure.get_figheight()
    names = [_name(data, pair) for pair in pairs]
    high, rows = _height(names), _rows(pairs, names)
    left, foot = min(2.7, 0.15 + DRAWN * max(inches(name, 7) for name in names)), 0.46
    ax = drawn.figure.add_axes(
        (left / PAGE, foot / total, (PAGE - left - 0.08 - 1.42) / PAGE, EACH * rows / total), facecolor="none"
    )
    y, ticks, shown = 0.0, [], None
    wide = ax.get_position().width * PAGE
    place: dict[str, Any] = {"transform": ax.get_yaxis_transform(), "va": "center", "fontsize": 7}
    for pair, name in zip(pairs, names, strict=True):
        if _several(pairs) and pair.noise != shown:
            words = "natural" if pair.noise == 0 else f"noise σ = {pair.noise:g}"
            ax.text(-(left - 0.06) / wide, y, words, fontweight="bold", **place)
            shown, y = pair.noise, y + 1
        one = pair.result
        colour = arm_colour(data, pair.arm)
        draw_dots(ax, np.array([y]), np.array([one.differences]), [colour])
        mark = "▸ " if one.apart else ""
        ax.text(1 + 1.4 / wide, y, f"{mark}{one.difference.text('+.3f')}".replace("-", "−"), ha="right", **place)
        ticks.append((y, name))
        y += high
    ax.set_yticks([t[0] for t in ticks], [t[1] for t in ticks], fontsize=7 if high == 1 else 6.5)
    ax.set_ylim(rows - high / 2, -high / 2)
    ax.axvline(0, color=INK, lw=0.8, zorder=1)
    for end in (-pairs[0].result.interest, pairs[0].result.interest):
        ax.axvline(end, color=GREY, lw=0.8, ls=(0, (1, 2)), zorder=1)
    ax.xaxis.set_major_locator(MaxNLocator(4 if wide > 1.2 else 2))
    quiet_rows(ax)
    ax.set_xlabel(f"paired difference of {measured}", fontsize=7.5, labelpad=1)


def _name(data: StudyData, pair: Pair) -> str:
    """Return the name of a comparison, `A − B`, in two lines if it is long."""
    words = [str(data.arms["label"][arm]).replace("GRPO + Routing Replay", "Replay") for arm in (pair.arm, pair.other)]
    one, other = (word.replace("Routing Replay", "Replay") for word in words)
    if len(one) + len(other) + 3 <= LONGEST:
        return f"{one} − {other}"
    return f"{cut(one, LONGEST)}\n− {cut(other, LONGEST - 2)}"


def _height(names: Sequence[str]) -> float:
    """Return the height of a comparison's row, more if any name has two lines."""
    return TALL if any("\n" in name for name in names) else 1.0


def _several(pairs: Sequence[Pair]) -> bool:
    """Return whether the comparisons are of several conditions."""
    return len({pair.noise for pair in pairs}) > 1


def _rows(pairs: Sequence[Pair], names: Sequence[str]) -> float:
    """Return the height of all comparisons, in rows of one line, with a line for each condition if there are
    several."""
    return len(pairs) * _height(names) + (len({pair.noise for pair in pairs}) if _several(pairs) else 0)
