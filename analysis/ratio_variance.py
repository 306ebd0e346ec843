"""Variance of log-ratios: token against sequence, natural against replayed.

python analysis/ratio_variance.py runs/replay_vs_gspo
"""

from _script import run

from moe_rl.study.figures import ratio_variance

if __name__ == "__main__":
    run(ratio_variance)
