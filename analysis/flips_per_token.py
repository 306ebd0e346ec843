"""Flips per token and slots per site, against independence.

python analysis/flips_per_token.py runs/replay_vs_gspo
"""

from _script import run

from moe_rl.study.figures import flips_per_token

if __name__ == "__main__":
    run(flips_per_token)
