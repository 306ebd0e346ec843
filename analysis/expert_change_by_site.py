"""Expert change by routing site and update index (heat map).

python analysis/expert_change_by_site.py runs/replay_vs_gspo
"""

from _script import run

from moe_rl.study.figures import expert_change_by_site

if __name__ == "__main__":
    run(expert_change_by_site)
