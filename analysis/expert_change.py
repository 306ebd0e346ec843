"""Expert change by update index: per slot, per site, per token.

python analysis/expert_change.py runs/replay_vs_gspo
"""

from _script import run

from moe_rl.study.figures import expert_change

if __name__ == "__main__":
    run(expert_change)
