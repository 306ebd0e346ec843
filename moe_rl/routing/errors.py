"""The two errors of `moe_rl.routing`. Both are `ValueError`s: what was given cannot be right."""


class RoutingError(ValueError):
    """Routes, masks or files that do not fit.

    The message names the site, what was expected, what came, and the likely cause.
    """


class UnsupportedModelError(RoutingError):
    """A model whose routing cannot be recorded or replayed exactly; the message names the class and why."""
