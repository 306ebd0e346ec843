"""Quantiles of the token log-ratio.

python analysis/log_ratio_bands.py runs/replay_vs_gspo
"""

from _script import run

from moe_rl.study.figures import log_ratio_bands

if __name__ == "__main__":
    run(log_ratio_bands)
