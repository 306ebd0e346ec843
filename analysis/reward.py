"""Reward against RL step, natural and under selection noise.

python analysis/reward.py runs/replay_vs_gspo
"""

from _script import run

from moe_rl.study.figures import reward

if __name__ == "__main__":
    run(reward)
