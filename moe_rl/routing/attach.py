"""Idle hooks that stay on a model, so that `torch.compile` traces the model together with the hooks."""

from torch import nn

from moe_rl.routing.contexts import acquire


class Attachment:
    """Hooks that stay on a model until `.detach()`; also a context manager."""

    def __init__(self, model: nn.Module) -> None:
        self._tap, _ = acquire(model)
        self._tap.users += 1
        self._tap.hook()
        self._attached = True

    def detach(self) -> None:
        """Take the hooks off; if a context or another attachment still uses them, they stay until the last one ends."""
        if self._attached:
            self._attached = False
            self._tap.users -= 1
            if not self._tap.users:
                self._tap.unhook()

    def __repr__(self) -> str:
        model, state = type(self._tap.boundary).__name__, "attached" if self._attached else "detached"
        return f"Attachment({model}, {len(self._tap.sites)} sites, {state})"

    def __enter__(self) -> "Attachment":
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()


def attach(model: nn.Module) -> Attachment:
    """Put idle hooks on a model: needed before `torch.compile`, useful where contexts are opened very often.

    If another model of the same class (a reference policy) is compiled without hooks in the same process, torch would
    run that model's code for both: attach that model too, or first set
    `torch._dynamo.config.skip_nnmodule_hook_guards = False`.

    Raises UnsupportedModelError if the model fails the self-check, RoutingError if it is compiled already.
    """
    return Attachment(model)
