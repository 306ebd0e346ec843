"""A pretended GPU: tensors on the CPU that claim to be on cuda:0, and raise where torch raises for such tensors.

Inside `pretended_cuda()` accelerate's device is cuda:0. Tensors that are moved to cuda:0, made there, or computed from
such tensors (gradients, too) are `OnCuda`. An operation raises if torch refuses it because its tensors are on two
devices.

The pretended GPU cannot show what a kernel does or whether it exists, when the host waits, or memory. It is more
lenient than torch in a few places: the result of `*_like` or `new_*` of a tensor on cuda:0 stays there whatever
`device` says; so does a tensor made without a device inside a call of torch that was given tensors on cuda:0 (a
backward with a checkpointed forward is one); any operation but those that `check` names takes CPU tensors without
dimensions.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


class OnCuda(Tensor):
    """A tensor that claims to be on cuda:0; for torch's own code it is on the CPU."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    device, is_cuda, is_cpu = property(lambda self: CUDA), property(lambda self: True), property(lambda self: False)

    def get_device(self) -> int:
        return 0

    def numpy(self, *args: Any, **options: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    __array__ = numpy


def put(tensor: Tensor, device: torch.device) -> Tensor:
    """Make a tensor claim to be on `device` from now on, in place, and return it."""
    parameter = isinstance(tensor, nn.Parameter)
    tensor.__class__ = OnCuda if device.type == "cuda" else nn.Parameter if parameter else Tensor
    if parameter:
        tensor._is_param = True  # torch recognises parameters of another class by it
    return tensor


class Move(torch.autograd.Function):
    """Differentiable copy of a tensor to another device; the gradient is copied back."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, device: torch.device) -> Tensor:
        ctx.source = tensor.device
        return put(tensor.clone(), device)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return put(grad.clone(), ctx.source), None


def tensors(*of: Any) -> Iterator[Tensor]:
    """Yield the tensors among arguments or results, nested lists, tuples and dicts included."""
    for part in of:
        if isinstance(part, Tensor):
            yield part
        elif isinstance(part, list | tuple | dict):
            yield from tensors(*(part.values() if isinstance(part, dict) else part))


def on_cuda(*of: Any) -> bool:
    """Return whether a tensor among arguments or results, nested ones included, is `OnCuda`."""
    for part in of:  # runs at every call, so without the generator `tensors`
        if type(part) is OnCuda:
            return True
        if isinstance(part, list | tuple | dict) and on_cuda(*(part.values() if isinstance(part, dict) else part)):
            return True
    return False


def as_cpu(device: Any) -> Any:
    """Return the CPU if `device` names a CUDA device, else `device` itself."""
    return CPU if isinstance(device, str | torch.device) and torch.device(device).type == "cuda" else device


def check(name: str, args: Any, kwargs: dict[str, Any]) -> None:
    """Raise RuntimeError as torch does if an operation on cuda:0 has CPU tensors or a generator that it refuses."""
    generator = kwargs.get("generator")
    if generator is not None and generator.device.type == "cpu":
        raise RuntimeError(f"{name}: Expected a 'cuda' device type for generator but found 'cpu'")
    if name == "copy_":
        return
    if name.strip("_").startswith("index_put") or name == "index":
        args = (args[0], None, *args[2:]) if on_cuda(args[0]) else args  # indices may be on the CPU
    others = [tensor for tensor in tensors(args, kwargs) if not isinstance(tensor, OnCuda)]
    strict = name == "stack" or name.startswith("_fused")  # a fused optimizer's kernel reads step counts
    if any(strict or tensor.ndim for tensor in others):
        raise RuntimeError(f"{name}: Expected all tensors to be on the same device, but found cuda:0 and cpu")


class Kernels(TorchDispatchMode):
    """Mode that checks the tensors of every operation, those of a backward included, and puts its results on cuda:0."""

    inside = False
    """Whether a call of torch that was given tensors on cuda:0 is under way: tensors that it makes are on cuda:0."""

    def __init__(self, float64: bool):
        super().__init__()
        self.float64 = float64

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, given = kwargs or {}, list(tensors(args, kwargs))
        name, asked = func.overloadpacket.__name__, as_cpu(kwargs.get("device")) is not kwargs.get("device")
        if there := on_cuda(*given):
            check(name, args, kwargs)
        if name == "histc" and not given[0].is_floating_point():  # the CPU has no kernel for integers
            out = func(given[0].float(), *args[1:], **kwargs).to(given[0].dtype)
        else:
            out = func(*args, **{**kwargs, "device": CPU} if asked else kwargs)
        if there or asked or (self.inside and not given):
            for new in tensors(out):
                if new.dtype == torch.float64 and not self.float64:
                    raise TypeError(f"{name}: this device has no float64")
                if not any(new is old for old in given):
                    put(new, CUDA)
        return out


class Calls(TorchFunctionMode):
    """Mode that handles devices in calls of torch's functions: moves, `device` arguments, and what is made inside."""

    def __init__(self, kernels: Kernels):
        super().__init__()
        self.kernels = kernels

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name in ("to", "cpu", "cuda"):
            said = [x for x in (*args[1:], *kwargs.values()) if isinstance(x, str | torch.device | Tensor)]
            target = torch.device(name) if name != "to" else said[0] if said else args[0].device
            target = target.device if isinstance(target, Tensor) else torch.device(target)
            here = [as_cpu(x) for x in args[1:]], {key: as_cpu(x) for key, x in kwargs.items()}
            out = func(args[0], *here[0], **here[1]) if name == "to" else args[0]
            return out if target.type == args[0].device.type else Move.apply(out, target)
        if name == "__set__" and func.__self__ is Tensor.data:
            put(args[0], args[1].device)
        there, asked = on_cuda(args, kwargs), as_cpu(kwargs.get("device")) is not kwargs.get("device")
        before, self.kernels.inside = self.kernels.inside, there
        try:
            out = func(*args, **{**kwargs, "device": CPU} if asked else kwargs)
        finally:
            self.kernels.inside = before
        if asked or (there and func is torch.as_tensor):
            put(out, CUDA)
        return out


@contextmanager
def pretended_cuda(float64: bool = True) -> Iterator[None]:
    """Context manager: inside, there is one GPU as far as devices go; `torch.cuda.is_available()` is unchanged.

    float64: whether the GPU has this dtype; False for one like Apple's (mps), which does not.
    """
    answers: dict[str, Any] = {
        "_lazy_init": None,
        "device_count": 1,
        "get_device_name": "pretended",
        "get_device_capability": (9, 0),
        "mem_get_info": (2**34, 2**35),
        "max_memory_allocated": 0,
        "set_rng_state": None,
    }
    kernels = Kernels(float64)
    with ExitStack() as stack:
        stack.enter_context(patch.object(Accelerator, "device", property(lambda self: CUDA)))
        stack.enter_context(patch.object(torch.cuda, "get_rng_state", lambda device=None: torch.get_rng_state()))
        for name, answer in answers.items():
            stack.enter_context(patch.object(torch.cuda, name, lambda *args, answer=answer: answer))
        stack.enter_context(kernels)
        stack.enter_context(Calls(kernels))
        yield
