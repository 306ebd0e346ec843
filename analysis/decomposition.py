"""Decomposition of the log-ratio: weights, routes, interaction; by token and by sequence.

python analysis/decomposition.py runs/my_study
"""

from _script import run

from moe_rl.study.figures import decomposition

if __name__ == "__main__":
    run(decomposition)
