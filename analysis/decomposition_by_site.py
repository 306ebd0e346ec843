"""What each routing site has of the effect of replay.

python analysis/decomposition_by_site.py runs/my_study
"""

from _script import run

from moe_rl.study.figures import decomposition_by_site

if __name__ == "__main__":
    run(decomposition_by_site)
