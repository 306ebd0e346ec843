"""Recording and replay of the experts that MoE routers choose, and measures of how these choices change. Needs
torch, transformers, numpy, safetensors and jaxtyping only."""

from moe_rl.routing.attach import Attachment, attach
from moe_rl.routing.calls import Recording
from moe_rl.routing.change import deviation_histogram, flips_per_token, jaccard, site_change, slot_change, token_change
from moe_rl.routing.contexts import record_routes, replay_routes
from moe_rl.routing.counts import ChangeCounts, change_counts
from moe_rl.routing.errors import RoutingError, UnsupportedModelError
from moe_rl.routing.replay import Replay
from moe_rl.routing.rerun import (
    biased_routes,
    noisy_routes,
    predicted_routes,
    record_margins,
    record_router_logits,
)
from moe_rl.routing.router_stats import (
    active_set_churn,
    boundary_margin,
    effective_sets,
    expert_load,
    load_cv,
    load_entropy,
    router_js,
    router_kl,
)
from moe_rl.routing.routes import RoutedExperts
from moe_rl.routing.sites import Site, canonical_site, find_sites, router_parameters, routing_sites

__all__ = [
    "Attachment",
    "ChangeCounts",
    "Recording",
    "Replay",
    "RoutedExperts",
    "RoutingError",
    "Site",
    "UnsupportedModelError",
    "active_set_churn",
    "attach",
    "biased_routes",
    "boundary_margin",
    "canonical_site",
    "change_counts",
    "deviation_histogram",
    "effective_sets",
    "expert_load",
    "find_sites",
    "flips_per_token",
    "jaccard",
    "load_cv",
    "load_entropy",
    "noisy_routes",
    "predicted_routes",
    "record_margins",
    "record_router_logits",
    "record_routes",
    "replay_routes",
    "router_js",
    "router_kl",
    "router_parameters",
    "routing_sites",
    "site_change",
    "slot_change",
    "token_change",
]
