"""Token probability, old against new.

python analysis/probability_scatter.py runs/replay_vs_gspo
"""

from _script import run

from moe_rl.study.figures import probability_scatter

if __name__ == "__main__":
    run(probability_scatter)
