"""The error of `moe-rl drift`."""


class DriftError(ValueError):
    """Checkpoints, text or options that do not go together; the message says which, and what to do."""
