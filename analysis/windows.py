"""Mean rewards of arms, and paired differences of two arms, in successive windows of a long study's RL steps.

    python analysis/windows.py runs/longer_training [--steps 31] [--csv docs/results/longer_training/windows.csv]

One row per rounding, arm or declared comparison, and window of steps. `reward` is the mean of the window's steps,
`held_out` that of the policy after its last step, where it was evaluated; both with Student's 95 % interval over seeds.
`declined` counts the runs whose reward in this window is lower than in the run's best window of this length so far by
more than the smallest difference of interest; the best window may begin at any step. The rounding `all` averages each
seed's values over the roundings that have the seed. Only finished runs count, and no statistical test is made.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import pandas as pd

from moe_rl.files import write_atomic
from moe_rl.processes import ends_with_its_reader
from moe_rl.study import StudyData, load
from moe_rl.study.comparing import declared, interest
from moe_rl.study.roundings import NATIVE
from moe_rl.study.statistics import student_interval

ALL = "all"
PLACE = ["arm", "seed", "last"]


def windows_of(data: StudyData, steps: int, least: float) -> pd.DataFrame:
    """Return one row per finished run and window: arm, seed, last, reward, held_out, declined.

    `last` counts the steps up to the window's end; `least` is the smallest difference of interest.
    Raises ValueError if no finished run has `steps` steps.
    """
    done = {(run.arm, run.seed) for run in data.runs if run.finished}
    rows = []
    for (arm, seed), part in data.rollouts.groupby(["arm", "seed"], sort=False, observed=True):
        if (arm, seed) not in done:
            continue
        means = part.set_index("step")["reward"].sort_index().rolling(steps).mean()
        fall = means.cummax() - means
        for last in range(steps, len(means) + 1, steps):
            at = last - 1  # steps count from 0, evaluations are numbered by the steps made before them
            rows.append((arm, seed, last, means.iloc[at], bool(fall.iloc[at] > least)))
    if not rows:
        raise ValueError(f"{data.folder}: no finished run of {steps} steps; give fewer --steps, or finish the study")
    found = pd.DataFrame(rows, columns=[*PLACE, "reward", "declined"])
    evals = data.evals.reindex(columns=["arm", "seed", "step", "reward"])  # without evaluations it has no columns
    evals = evals.set_axis([*PLACE, "held_out"], axis=1).drop_duplicates(PLACE, keep="last")
    return found.merge(evals.astype({"arm": found["arm"].dtype}), on=PLACE, how="left")


def rows_of(found: pd.DataFrame, pairs: list[tuple[str, str]], steps: int) -> Iterator[dict[str, object]]:
    """Yield the rows of one rounding's table. found: a table in the form of `windows_of`, each seed of an arm once."""
    by_window = found.set_index(["last", "arm", "seed"])
    arms = [(arm, "") for arm in found["arm"].unique()]
    for arm, other in [*arms, *pairs]:
        for last in sorted(found["last"].unique()):
            table = by_window.loc[last]
            if not {arm, other} - {""} <= set(table.index.get_level_values("arm")):
                continue
            values = table.loc[arm]
            if other:
                values = (values[["reward", "held_out"]].astype(float) - table.loc[other]).dropna(how="all")
            of = f"{arm} − {other}" if other else arm
            row: dict[str, object] = {"of": of, "steps": f"{last - steps + 1} to {last}", "n": len(values)}
            for name in ("reward", "held_out"):
                row |= student_interval(values[name].astype(float).tolist()).columns(name, f"{name}_")
            yield row | {"declined": "" if other else int(values["declined"].sum())}


def windows_table(data: StudyData, steps: int) -> pd.DataFrame:
    """Return the windows of a study and of its roundings in one table. Raises ValueError as `windows_of` does."""
    pairs = declared(data) or []
    found = {name: windows_of(one, steps, interest(data)) for name, one in {NATIVE: data, **data.roundings}.items()}
    if len(found) > 1:
        together = pd.concat(found.values()).groupby(PLACE, sort=False, as_index=False, observed=True)
        found[ALL] = together.agg({"reward": "mean", "held_out": "mean", "declined": "sum"})
    return pd.DataFrame({"rounding": name, **row} for name, one in found.items() for row in rows_of(one, pairs, steps))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the study's folder, e.g. runs/longer_training")
    parser.add_argument("--steps", type=int, default=31, help="RL steps of a window (default: %(default)s)")
    parser.add_argument("--csv", type=Path, help="also write the table here")
    given = parser.parse_args()
    if given.steps < 1:
        parser.error(f"--steps {given.steps}: a window has at least one step")
    try:
        table = windows_table(load(given.folder), given.steps)
    except ValueError as error:  # no such folder, damaged files
        parser.exit(1, f"{error}\n")
    if given.csv:
        write_atomic(given.csv, table.to_csv(index=False, float_format="%.6g"))
    print(table.round(3).to_string(index=False))


if __name__ == "__main__":
    with ends_with_its_reader():
        main()
