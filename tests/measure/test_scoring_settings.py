"""Scoring in train mode and at other temperatures, and how rows that share prompts are filled."""

import torch
from test_decompose import build

from moe_rl.measure.scoring import TokenBatch, decoded_logps, score_live, score_replayed, text_logps
from moe_rl.measure.shared_prompts import _parts


def test_decoding_at_another_temperature(text):
    model, batch = build(), TokenBatch(*text, temperature=0.5)
    torch.testing.assert_close(decoded_logps(model, batch, 5), text_logps(model, batch), rtol=0, atol=1e-5)


def test_dropout_is_off(text):
    model, batch = build(), TokenBatch(*text)
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.5
    still = score_live(model, batch)
    model.train()
    found = score_live(model, batch)
    assert torch.equal(found.logps, still.logps) and found.routes.equal(still.routes)
    assert torch.equal(score_replayed(model, batch, still.routes, still.routes), still.logps)


def test_parts_are_as_large_as_allowed_and_not_larger():
    # the emptiest of two parts: 3 2 2 | 3 2, of which the first is too large
    assert _parts([3, 3, 2, 2, 2], 6) == [[0, 1], [2, 3, 4]]
    assert _parts([3, 3], 6) == [[0, 1]] and _parts([3, 4], 6) == [[1], [0]]
