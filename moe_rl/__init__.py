"""moe_rl: an instrument and a laboratory for routing stability in RL of Mixture-of-Experts language models.

The rooms, in reading order (arrows point downwards only):

- `moe_rl.routing`     what routers chose, and making them choose it again
- `moe_rl.objectives`  log-probabilities and rewards -> advantages, ratios, loss (pure functions)
- `moe_rl.rollout`     prompts -> completions, their log-probabilities and routes
- `moe_rl.policy.models`      load a hub or local model; build and cold-start the tiny one
- `moe_rl.training`    one loop; log-probabilities; probes; checkpoints
- `moe_rl.study`       many runs -> numbers, figures, a report

Axes everywhere: B sequence, G group, T token, L routing site, K slot, E expert, V vocabulary.
Tensors `[B,T]` are aligned with the tokens: entry t speaks of token t given the tokens before it.
"""

__version__ = "0.1.0"
