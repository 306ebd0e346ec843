"""KL, entropy and response length.

python analysis/dynamics.py runs/replay_vs_gspo
"""

from _script import run

from moe_rl.study.figures import dynamics

if __name__ == "__main__":
    run(dynamics)
