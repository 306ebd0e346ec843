"""Shadow routing: what routers would have chosen while a replay forced other experts, and how much better that is."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from moe_rl.routing.calls import Call, Collected, stacked, tokens_of, wrapped
from moe_rl.routing.counts import ChangeCounts, change_counts
from moe_rl.routing.packing import packed_dtype
from moe_rl.routing.replay import Replay
from moe_rl.routing.routes import RoutedExperts
from moe_rl.routing.traced import no_type_check


@no_type_check
class ShadowReplay(Replay):
    """A replay whose routers also rank live: `.shadow` is what they would have chosen, `.regret` how much better."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._dtype = packed_dtype(max(probe.num_experts for probe in self._routers.probes))  # of all sites
        self._seen = Collected(torch.iinfo(self._dtype).max, -1, 0)

    def begin(self, call: Call) -> None:
        super().begin(call)
        for index, site in enumerate(self._tap.sites):
            if not site.fixed:
                call.job(index).shadow = True

    def end(self, call: Call) -> None:
        super().end(call)
        live = [c if job is None else job.live for job, c in zip(call.jobs, call.chosen, strict=True)]
        packed = stacked(self._routers, call, live, self._dtype)
        device, k = packed.device, packed.shape[-1]
        none = torch.zeros(call.rows, k, device=device)
        with torch.no_grad():
            best, used = (
                torch.cat([none if x is None else x.to(device) for x in scores], dim=1).float().view(packed.shape)
                for scores in zip(*((None, None) if j is None else (j.best, j.scores) for j in call.jobs), strict=True)
            )
            regret = (best - used).sum(-1).clamp_(min=0)
        self._seen.end(call, packed, tokens_of(call, packed), regret)

    @property
    def shadow(self) -> RoutedExperts:
        """What the routers would have chosen, `[B,T,L,K]`, at the hidden states of the replay. Behind the first site
        this is not what they choose without a replay; for that, compare with a recording outside of the context."""
        packed, tokens, _ = self._seen.together()
        return wrapped(self._routers, packed, tokens)

    def shadow_change(self, routes: RoutedExperts, mask: Tensor | None = None) -> ChangeCounts:
        """Count the shadow change: `change_counts` of the replayed routes against `.shadow`, pair "shadow".

        It is what the replay holds back at each site, given that all earlier sites were replayed. Natural change
        compares with a recording without replay (pair "policies"): there a change at one site also moves the hidden
        states of the next, so that the two differ at every site but the first, and natural change is usually the
        larger.
        """
        return change_counts(routes, self.shadow, mask, pair="shadow")

    @property
    def regret(self) -> Float[Tensor, "B T L"]:
        """Sum of the live top-k scores minus the sum of the scores of the experts used; detached, at least 0.

        In units of what the router ranks: probabilities, sigmoids or logits, with a selection bias if the router has
        one. Group-limited routers may choose a lower sum for the sake of their groups; that counts as 0.
        """
        return self._seen.together()[2]
