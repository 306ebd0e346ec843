"""Exceptions of `moe_rl.routing`. All are `ValueError`s: the given input cannot be right."""


class RoutingError(ValueError):
    """Error: routes, masks or files do not fit.

    The message names the site, what was expected, what came, and the likely cause.
    """


class UnsupportedModelError(RoutingError):
    """Error: the routing of a model cannot be recorded or replayed exactly; the message names the class and why."""


class UnsupportedExpertsError(UnsupportedModelError):
    """Error: an experts implementation does not cover these experts, tensors or device; the message names which."""
