"""Mean final reward of an arm, or mean difference of two arms, over roundings and studies, from the committed tables.

    python analysis/pooled.py methods_stale:gspo_partial:grpo_partial partial_rollouts_anchor:gspo_partial:grpo_partial
    python analysis/pooled.py --roundings int4_sort:old_int4:grpo_fp32
    python analysis/pooled.py --roundings --of held_out_less_sampled int4_sort:old_int4
    python analysis/pooled.py wide_policy:grpo_lower_rate:grpo --less wide_policy_dense:grpo_lower_rate:grpo

Prints the mean with Student's 95 % interval over seeds; the differences of two arms are paired. Five decimals, because
pages round to two: 0.10465 is 0.10 there, and 0.105 might be either. This is no test, whether a study declared the
comparison or not. A seed counts once: its values in a study and in the study's repetitions
(--roundings, STUDY_intel) are averaged first, as many as there are; the tables `roundings` pool only the seeds that
every rounding has. Several studies count as independent: studies that share seeds are refused. --less subtracts the
values of another study with the same seeds.
"""

import argparse
from pathlib import Path

import pandas as pd

from moe_rl.processes import ends_with_its_reader
from moe_rl.study.published import KINDS, less_same_seeds, over_seeds, published_values

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", metavar="STUDY:ARM[:OTHER]", help="several: studies of different seeds")
    parser.add_argument("--roundings", action="store_true", help="the repetitions under other kernels, too")
    parser.add_argument("--of", choices=KINDS, default="final", help="of which reward (default: %(default)s)")
    parser.add_argument("--less", metavar="STUDY:ARM[:OTHER]", help="taken away, seed by seed and rounding by rounding")
    parser.add_argument("--without-failed", action="store_true", help="leave out failed runs, and pairs with one")
    options = parser.parse_args()
    if options.less and len(options.names) > 1:
        parser.error("--less is taken from one STUDY:ARM[:OTHER]")
    folders = [name.split(":")[0] for name in options.names]
    if twice := sorted({name for name in folders if folders.count(name) > 1}):
        parser.error(f"{' and '.join(twice)}: named twice; of each seed the mean over other arms would be taken")
    how = options.of, options.roundings, options.without_failed
    try:
        found = pd.concat([published_values(RESULTS, name, *how) for name in options.names])
        if options.less:
            found = less_same_seeds(found, published_values(RESULTS, options.less, *how))
        interval = over_seeds(found)
    except ValueError as error:
        parser.error(str(error))
    said = interval.text(".5f") + ("" if interval.known else " (no interval)")
    print(f"{len(found)} values, {(found > 0).sum()} above 0, of {interval.n} seeds: {said}")


if __name__ == "__main__":
    with ends_with_its_reader():
        main()
