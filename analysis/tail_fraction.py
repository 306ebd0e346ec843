"""Tail of the ratio, F(τ).

python analysis/tail_fraction.py runs/replay_vs_gspo
"""

from _script import run

from moe_rl.study.figures import tail_fraction

if __name__ == "__main__":
    run(tail_fraction)
