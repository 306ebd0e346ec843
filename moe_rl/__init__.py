"""moe_rl: an instrument and a laboratory for routing stability in RL of Mixture-of-Experts language models.

The subpackages ("rooms"). Each one uses those above it, never those below it:

- `moe_rl.routing`     capture of the experts that routers chose, and replay of these routes
- `moe_rl.objectives`  log-probabilities and rewards -> advantages, ratios, loss (pure functions)
- `moe_rl.measure`     tensors -> numbers: log-probabilities, ratio and change metrics, decomposition, noise floor
- `moe_rl.rollout`     prompts -> completions, their log-probabilities and routes
- `moe_rl.policy`      load a hub or local model; make the tiny one and its cold start
- `moe_rl.integrations`  the same instrument inside TRL, ms-swift and verl
- `moe_rl.training`    one loop for all methods: collect, score, update, probe
- `moe_rl.study`       many runs -> statistics, figures, a report
- `moe_rl.drift`       two or n checkpoints -> tables, figures, a page

The first three subpackages are the instrument and need only torch, transformers, numpy, safetensors and jaxtyping; the
others are the laboratory, which `pip install '.[lab]'` in the checkout installs.

Axes everywhere: B sequence, G group, T token, L routing site, K slot, E expert, V vocabulary.
Tensors `[B,T]` are aligned with the tokens: entry t belongs to token t, given the tokens before t.
"""

__version__ = "0.2.0"
