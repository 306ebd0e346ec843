"""Gradient norm.

python analysis/gradient_norm.py runs/replay_vs_gspo
"""

from _script import run

from moe_rl.study.figures import gradient_norm

if __name__ == "__main__":
    run(gradient_norm)
