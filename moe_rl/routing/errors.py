"""The errors of `moe_rl.routing`. All are `ValueError`s: what was given cannot be right."""


class RoutingError(ValueError):
    """Routes, masks or files that do not fit.

    The message names the site, what was expected, what came, and the likely cause.
    """


class UnsupportedModelError(RoutingError):
    """A model whose routing cannot be recorded or replayed exactly; the message names the class and why."""


class UnsupportedExpertsError(UnsupportedModelError):
    """Experts, tensors or a device that an experts implementation does not cover; the message names which."""
