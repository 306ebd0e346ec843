"""The decomposition as a probe in training: after each update of a step, on the probe's subset."""

from typing import TYPE_CHECKING

import torch

from moe_rl.training.batch import Batch
from moe_rl.training.decompose import Text, decompose_update, score_live
from moe_rl.training.swap import weights_of

if TYPE_CHECKING:
    from moe_rl.training.trainer import Trainer


class DecompositionProbe:
    """Old: the weights that the step began with, a copy of which waits on the CPU while this lives. Under rollout lag
    these are newer than the policy that sampled the batch.

    Costs per update: one forward live, two under replay, two for every routing site, all on the probe's subset.
    """

    def __init__(self, trainer: "Trainer", batch: Batch):
        self.trainer = trainer
        rows = torch.linspace(0, len(batch) - 1, trainer.config.probe.sequences).round().long()
        part = batch.rows(rows)
        self.text = Text(part.input_ids, part.attention_mask, part.completion_mask, trainer.config.rollout.temperature)
        self.weights = weights_of(trainer.model)
        self.old = score_live(trainer.model, self.text)

    def __call__(self, update: int) -> None:
        """Append one row of kind "decomposition": see `Shares.rows` and `SiteShares.rows` (prefixed `site_`)."""
        found = decompose_update(self.trainer.model, self.weights, self.text, self.old, per_site=True)
        sites = found.site_shares()
        assert sites is not None
        self.trainer.log.append(
            "decomposition",
            self.trainer.step,
            update=update,
            **found.shares().rows(),
            replay_effect_var=sites.whole,
            site_names=sites.sites,
            **{f"site_{name}": values for name, values in sites.rows().items()},
        )
