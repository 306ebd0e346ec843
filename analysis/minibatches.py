"""Final and peak score against the number of minibatches per batch, by replay kind.

python analysis/minibatches.py runs/minibatches
"""

from _script import run

from moe_rl.study.figures import minibatches

if __name__ == "__main__":
    run(minibatches)
