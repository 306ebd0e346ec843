"""What routers chose, and making them choose it again. Needs torch and transformers only."""

from moe_rl.routing.errors import RoutingError, UnsupportedModelError
from moe_rl.routing.routes import RoutedExperts
from moe_rl.routing.sites import Site, find_sites, routing_sites
from moe_rl.routing.tap import Attachment, Recording, Replay, attach, noisy_routes, record_routes, replay_routes

__all__ = [
    "Attachment",
    "Recording",
    "Replay",
    "RoutedExperts",
    "RoutingError",
    "Site",
    "UnsupportedModelError",
    "attach",
    "find_sites",
    "noisy_routes",
    "record_routes",
    "replay_routes",
    "routing_sites",
]
