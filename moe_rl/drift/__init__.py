"""Routing changes between checkpoints of any trainer, the noise floor of one model, and checks of captured routes.

The commands: `moe-rl drift OLD NEW [...] --prompts FILE` measures what changed in routing between checkpoints;
`moe-rl floor MODEL --prompts FILE` measures what arithmetic alone changes; `moe-rl check-routes` compares captured
routes with a model's, and `moe-rl compare-routes` compares two captures with each other.

- `prompt_files` reads the files of prompts and checks them line by line
- `prompts`      tokenises the examples and streams them in batches
- `samples`      samples responses of OLD, which are then the text
- `checkpoints`  finds, checks and loads checkpoints
- `adapters`     recognises LoRA adapters, and puts them on their model
- `passes`       runs the forwards, with both models in memory or one at a time
- `sums`         counts changes and sums log-ratios
- `gates`        puts the routers of one checkpoint on the body of another
- `run`          compares two checkpoints from beginning to end, and writes the output
- `series`       compares n checkpoints, with one model in memory at a time
- `floor_run`    runs `moe-rl floor`, on `moe_rl.measure.arithmetic`
- `check`        runs `moe-rl check-routes`; `compare` (on `compare_rows`) runs `moe-rl compare-routes`
- `commands`     holds the entry points that the command line calls
- `plot`         draws inline views for notebooks
"""
