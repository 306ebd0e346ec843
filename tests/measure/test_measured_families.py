"""Every family: what is measured of padded batches is what transformers' own forwards over single sequences give."""

import sys
from pathlib import Path

import pytest
import torch
from sweeps import FAMILIES, mostly_swept
from transformers import AutoModelForCausalLM

from moe_rl.measure import token_logps
from moe_rl.measure.decompose import decompose
from moe_rl.measure.noise_floor import rounded_copy
from moe_rl.routing import record_router_logits

sys.path.append(str(Path(__file__).parents[1] / "routing"))
from routing_helpers import disturbed, moe
from tiny_families import families, supported

LENGTHS = torch.tensor([5, 9, 12, 7])


@pytest.mark.parametrize("family", mostly_swept(supported(), FAMILIES))
def test_a_log_ratio_is_that_of_two_plain_forwards(family):
    old = moe(family).eval()
    new = disturbed(old, 0.02).eval()
    ids = torch.randint(3, 64, (4, 12), generator=torch.Generator().manual_seed(0))
    position = torch.arange(12)
    tokens = position < LENGTHS[:, None]
    measured = tokens & (position > 0)
    found = decompose(old, new, ids, tokens, measured)
    expected = [plain(new, row[:n]) - plain(old, row[:n]) for row, n in zip(ids, LENGTHS, strict=True)]
    torch.testing.assert_close(found.log_ratio[measured], torch.cat(expected).double(), rtol=0, atol=5e-6)
    assert found.log_ratio[measured].abs().max() > 1e-4


@torch.no_grad()
def plain(model, ids):
    """Log-probabilities of all tokens of a text but the first, nats."""
    logps = model(ids[None]).logits[0, :-1].float().log_softmax(-1)
    return logps.gather(1, ids[1:, None])[:, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", mostly_swept(families(), FAMILIES))
def test_a_rounded_copy_has_the_dtypes_of_a_loaded_model(family, dtype, tmp_path):
    """Routers and selection biases of several families stay in fp32, and some buffers do not."""
    model = moe(family)
    model.save_pretrained(tmp_path)
    loaded, copied = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype), rounded_copy(model, dtype)
    for kind in ("named_parameters", "named_buffers"):
        expected = {name: tensor.dtype for name, tensor in getattr(loaded, kind)()}
        assert {name: tensor.dtype for name, tensor in getattr(copied, kind)()} == expected
    assert {tensor.data_ptr() for tensor in copied.parameters()}.isdisjoint(p.data_ptr() for p in model.parameters())


@torch.no_grad()
def test_router_logits_are_in_the_order_of_the_sites():
    """JetMoE holds its MLP before the attention that runs first, and returns router logits in the order of running."""
    model, ids = moe("JetMoeForCausalLM"), torch.randint(3, 64, (2, 5), generator=torch.Generator().manual_seed(0))
    for asked in ("aux_loss", "router_logits"):  # whichever is asked first
        with record_router_logits(model) as reading:
            found = token_logps(model, ids, torch.ones_like(ids), torch.ones_like(ids), **{asked: True}).router_logits
        torch.testing.assert_close(torch.stack(found, 1).view(reading.logits.shape), reading.logits)
