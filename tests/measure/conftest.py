"""Models that compute in float64 throughout, for comparisons near its precision."""

import pytest
import torch
from torch.overrides import TorchFunctionMode


class Float64Throughout(TorchFunctionMode):
    """Models cast to fp32 inside (norms, softmax). Two calls of one model may then differ by 1e-9: the last bit of a
    product depends on the memory's alignment, and a cast makes it 29 bits larger. Here such casts do nothing."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        args = tuple(torch.float64 if a is torch.float32 else a for a in args)
        kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()}
        return function(*args, **kwargs)


@pytest.fixture
def float64_throughout():
    with Float64Throughout():
        yield
