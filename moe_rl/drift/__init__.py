"""`moe-rl drift OLD NEW [...] --prompts FILE`: what changed in routing between checkpoints, whatever trained them;
`moe-rl floor MODEL --prompts FILE`: what arithmetic alone changes; `moe-rl check-routes` and `moe-rl compare-routes`:
captured routes against a model, and against others.

- `prompt_files` the text, read and checked by line
- `prompts`      tokenised and streamed
- `samples`      responses of OLD as the text
- `checkpoints`  which are meant; checked and loaded
- `adapters`     those that are LoRA adapters, and the model that each is put on
- `passes`       the forwards, with both models or one at a time
- `sums`         what is counted
- `gates`        routers of one on the body of the other
- `run`          all of a pair, and what is written
- `series`       the same of n checkpoints, one model in memory at a time
- `floor_run`    `moe-rl floor`, on `moe_rl.measure.arithmetic`
- `check`        `moe-rl check-routes`; `compare` (on `compare_rows`) is `moe-rl compare-routes`
- `commands`     all of these as the command line calls them
- `plot`         inline views for notebooks
"""
