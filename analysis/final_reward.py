"""Final reward of every arm with its interval.

python analysis/final_reward.py runs/replay_vs_gspo
"""

from _script import run

from moe_rl.study.figures import final_reward

if __name__ == "__main__":
    run(final_reward)
