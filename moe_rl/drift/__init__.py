"""`moe-rl drift OLD NEW --prompts FILE`: what changed in routing between any two checkpoints, whatever trained them.

- `prompts`      the text, streamed
- `checkpoints`  the pair, checked and loaded
- `passes`       the forwards, with both models or one at a time
- `tally`        what is counted
- `run`          all of it, and what is written
"""
