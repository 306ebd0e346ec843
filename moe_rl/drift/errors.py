"""The error that the commands of `moe_rl.drift` raise for bad input."""


class DriftError(ValueError):
    """Error for checkpoints, text, files or options that are wrong or do not go together; it says what to do."""
