"""KL (k3) and F(2) against the step, with collapse markers.

python analysis/divergence.py runs/replay_vs_gspo
"""

from _script import run

from moe_rl.study.figures import divergence

if __name__ == "__main__":
    run(divergence)
