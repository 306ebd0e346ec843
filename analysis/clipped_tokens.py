"""Clipped tokens, log axis.

python analysis/clipped_tokens.py runs/replay_vs_gspo
"""

from _script import run

from moe_rl.study.figures import clipped_tokens

if __name__ == "__main__":
    run(clipped_tokens)
