"""Dose-response: final reward and ratio variance against the measured change rate of the update forward.

python analysis/dose_response.py runs/selection_noise
"""

from _script import run

from moe_rl.study.figures import dose_response

if __name__ == "__main__":
    run(dose_response)
