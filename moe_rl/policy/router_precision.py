"""fp32 routers in a model of lower precision: weights, logits and gates.

In bf16 a router's logits have 8 significant bits, so experts of nearly equal score tie or change places by rounding
alone. With fp32 gates, an expert's output is weighted in fp32 and cast back, as transformers' experts implementations
do.
"""

from typing import Any

import torch
from torch import Tensor, nn

from moe_rl.measure.weights import KEPT_FP32
from moe_rl.routing import find_sites


def keep_routers_fp32(model: nn.Module) -> nn.Module:
    """Cast the routers' weights to fp32 in place (already rounded if the model came in bf16), and their inputs as well.

    A router's results (logits, gates) are then fp32, too. A routing site without parameters (hash routing) is left.
    Copies that moe_rl casts (a rollout engine's, the noise floor's) keep their routers in fp32.
    Not for DBRX, Doge, Inkling, JetMoE and Llama 4, whose blocks multiply gates with hidden states without a cast:
    their first forward then fails by an error of dtypes (a training run says so before it begins).

    Raises:
        UnsupportedModelError: no router is found.
    """
    for site in find_sites(model):
        for module in site.modules:
            if not any(True for _ in module.parameters()):
                continue
            for tensor in (*module.parameters(), *module.buffers()):
                if tensor.is_floating_point():
                    tensor.data = tensor.data.float()
            setattr(module, KEPT_FP32, True)  # so that a copy of the model that is cast keeps them in fp32, too
            module.register_forward_pre_hook(_inputs_in_fp32, with_kwargs=True)
    return model


def _inputs_in_fp32(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Forward pre-hook: cast bf16 and fp16 tensors among a router's inputs to fp32."""

    def cast(value: Any) -> Any:
        low = isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
        return value.float() if low else value

    return tuple(map(cast, args)), {name: cast(value) for name, value in kwargs.items()}
