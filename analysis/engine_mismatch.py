"""Variance of the log-ratio between rollout and training engine, token against sequence, live against R3.

python analysis/engine_mismatch.py runs/engine_mismatch
"""

from _script import run

from moe_rl.study.figures import engine_mismatch

if __name__ == "__main__":
    run(engine_mismatch)
