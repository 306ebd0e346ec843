"""The design effect: how much averaging over tokens removes of the routing part of the log-ratio, by tokens
averaged."""

import numpy as np
import pandas as pd

from moe_rl.study.data import StudyData
from moe_rl.study.figures.curves import curves, highest, seed_tables
from moe_rl.study.figures.register import PROBE, Drawing, figure
from moe_rl.study.figures.style import PALE, NothingToDraw

FEWEST_BLOCKS = 30
"""Fewest blocks of one length, in one probe, from which a variance is taken."""
NEEDED = ["logp_natural", "logp_replayed", "pos"]
KEYS = ["arm", "seed", "step", "update"]


@figure(
    title="Design effect of averaging routing noise.",
    caption=(
        "Routing part of a token's log-ratio: live minus replayed log-probability, same new weights. Responses "
        "are cut into blocks of so many consecutive tokens; the design effect (Kish) is the variance of the blocks' "
        "means times the length, over the variance of the tokens: 1 where tokens are independent, so that a mean "
        "removes all that averaging can (of n blocks 1 - 1/n: variances have divisor n); the length itself (dotted) "
        "where a block moves as one. Median over the stored "
        "probes of a seed; mean over seeds."
    ),
    needs={"tokens": [*NEEDED, "update"]},
    rank=125,
    notes=(PROBE,),
)
def design_effect(data: StudyData) -> Drawing:
    table = design_effects(data.tokens)
    if table.empty:
        raise NothingToDraw("design_effect: live and replayed log-probabilities do not differ, or responses are short")
    medians = table.groupby(["arm", "seed", "length"], observed=True)["design_effect"].median().reset_index()
    tables = seed_tables(medians, "length", "design_effect")
    top = np.nanmax([2.0, 1.1 * float(medians["design_effect"].max()), 1.1 * highest(tables)])
    drawn = curves(data, tables, "design effect", "tokens averaged", thin=False, ylim=(0, top), above=0.2)
    lengths = np.array(sorted(table["length"].unique()))
    for ax in drawn.axes:
        ax.set_xticks(lengths[-4:])  # lengths double, so that the labels of shorter ones would overlap
        ax.plot(lengths, lengths, color=PALE, lw=0.9, ls=(0, (1, 2)), zorder=1, label="a block moves as one")
        ax.axhline(1, color=PALE, lw=0.9, zorder=1)
    drawn.legend()
    return Drawing(drawn.figure, drawn.frame, interval="band", tables={"probes": table})


def design_effects(tokens: pd.DataFrame) -> pd.DataFrame:
    """Return the design effect by arm, seed, step, update and `length` m = 1, 2, 4, ...

    `design_effect`: m Var(means of blocks of m) / Var(tokens) of the routing part (divisor n), over the tokens that lie
    in whole blocks; `tokens_flipped`: the same of whether a token's routes changed at any site, if flips were
    recorded."""
    rows = tokens[[*KEYS, *NEEDED, "seq", *(["flips"] if "flips" in tokens else [])]]
    rows = rows.dropna(subset=[name for name in rows if name != "flips"])
    if "flips" in rows:  # probes of other trainers may have no flips
        some = rows["flips"].notna().groupby([rows[key] for key in KEYS], observed=True).transform("any")
        rows = rows[rows["flips"].notna() | ~some]
    values = {"design_effect": (rows["logp_natural"] - rows["logp_replayed"]).to_numpy(dtype=float)}
    if "flips" in rows:
        values["tokens_flipped"] = (rows["flips"] > 0).astype(float).where(rows["flips"].notna()).to_numpy(dtype=float)
    probe = rows.groupby(KEYS, observed=True, sort=False).ngroup().to_numpy()
    place = rows["pos"].to_numpy(dtype=np.int64)
    response = rows.groupby([*KEYS, "seq"], observed=True, sort=False).ngroup().to_numpy()
    keys = rows[KEYS].groupby(probe).first()
    found, length = [], 1
    while len(rows) and length <= place.max() + 1:
        block = response * (place.max() // length + 1) + place // length
        _, block = np.unique(block, return_inverse=True)
        sizes = np.bincount(block)
        whole = sizes[block] == length
        first = np.unique(block[whole], return_index=True)[1]
        of_block = probe[whole][first]  # the probe of each whole block
        number = np.bincount(of_block, minlength=len(keys))
        part = keys.assign(length=length)
        for name, value in values.items():
            means = np.bincount(block[whole], value[whole], len(sizes))[sizes == length] / length
            with np.errstate(invalid="ignore", divide="ignore"):
                spread = _variance(means, of_block, len(keys)) / _variance(value[whole], probe[whole], len(keys))
            part[name] = length * spread
        found.append(part[(number >= FEWEST_BLOCKS) & np.isfinite(part["design_effect"])])
        length *= 2
    return pd.concat(found, ignore_index=True) if found else rows[KEYS].assign(length=0, design_effect=0.0).iloc[:0]


def _variance(values: np.ndarray, group: np.ndarray, groups: int) -> np.ndarray:
    """Return the variance within each group, about the group's own mean; NaN for a group without values."""
    return pd.Series(values).groupby(group).var(ddof=0).reindex(range(groups)).to_numpy()
