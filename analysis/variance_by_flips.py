"""Variance of the log-ratio against flips.

python analysis/variance_by_flips.py runs/replay_vs_gspo
"""

from _script import run

from moe_rl.study.figures import variance_by_flips

if __name__ == "__main__":
    run(variance_by_flips)
