"""Expert change by token position in the response.

python analysis/change_by_position.py runs/replay_vs_gspo
"""

from _script import run

from moe_rl.study.figures import change_by_position

if __name__ == "__main__":
    run(change_by_position)
