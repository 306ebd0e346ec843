"""Fixtures: models that compute in float64 throughout, for comparisons near its precision; a padded text."""

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


@pytest.fixture(scope="module")
def text():
    """Token ids `[5,12]` with padding on either side, their attention mask and completion mask."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 23, (5, 12), generator=generator)
    attention = torch.ones(5, 12, dtype=torch.bool)
    attention[1, :4] = attention[2, 9:] = False  # padding on either side
    completion = attention.clone()
    completion[:, :5] = False
    return ids, attention, completion
