"""What a cell shows of recordings and counts, what it says of slips, and a kernel that is interrupted."""

from typing import Any

import jaxtyping
import pytest
import torch
from routing_helpers import disturbed, hooked, moe, routes_of, tokens
from torch import nn
from torch.utils.hooks import RemovableHandle

from moe_rl.routing import (
    RoutingError,
    UnsupportedModelError,
    attach,
    change_counts,
    record_margins,
    record_routes,
    replay_routes,
)


def test_what_a_cell_shows_is_one_line() -> None:
    model, inputs = moe(), tokens()
    with torch.no_grad(), record_routes(model) as recording, record_margins(model) as margins:
        model(inputs)
    assert repr(recording) == "Recording(calls of Qwen3MoeModel: 1; sites: 3; what they chose: .routes)"
    assert repr(margins) == "Margins(calls: 1; sites: 3)"
    for shadow, name in ((False, "Replay"), (True, "ShadowReplay")):
        with torch.no_grad(), replay_routes(model, recording.routes, shadow=shadow) as replay:
            before = repr(replay)
            model(inputs)
        assert before.startswith(f"{name}(routes of 2 sequences x 7 tokens at 3 sites; ") and "so far: 0;" in before
        assert "so far: 42;" in repr(replay)
    with attach(model) as attached:
        assert repr(attached) == "Attachment(Qwen3MoeModel, 3 sites, attached)"
    assert repr(attached).endswith("detached)")


def test_counts_show_all_three_kinds_of_change_with_what_they_are_shares_of() -> None:
    model, inputs = moe(), tokens()
    old, new = routes_of(model, inputs), routes_of(disturbed(model), inputs)
    counts = change_counts(old, new)
    assert repr(counts) == (
        f"ChangeCounts({counts.slots_changed} of 84 slots, {counts.sites_changed} of 42 sites, {counts.tokens_changed} "
        "of 14 tokens changed; pair 'policies'; shares: .rates(), .to_frame())"
    )
    table = counts.to_frame()
    assert table.site.tolist() == list(old.sites)
    assert (table.slots_changed.sum(), table.slots.sum()) == (counts.slots_changed, counts.slots_total)
    assert (table.tokens_changed.sum(), table.tokens.sum()) == (counts.sites_changed, counts.sites_total)
    assert table.slot_change.mean() == pytest.approx(counts.rates()["slot_change"])
    assert table.site_change.mean() == pytest.approx(counts.rates()["site_change"])
    nameless = change_counts(old.ids, new.ids, torch.zeros(2, 7)).to_frame()
    assert nameless.site.tolist() == [0, 1, 2] and nameless.tokens.sum() == 0 and nameless.slot_change.isna().all()
    part = old.ids.clone()
    part[0, 0, 0] = -1
    assert "changed; 1 incomplete tokens; pair" in repr(change_counts(old.with_ids(part), new))


def test_slips_are_answered_with_what_to_write(monkeypatch: Any) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as outside of tests, where no types are checked
    model, inputs = moe(), tokens()
    with torch.no_grad(), record_routes(model) as recording:
        model(inputs)
    with pytest.raises(RoutingError, match=r"got Recording \(of a recording: recording\.routes;"):
        change_counts(recording, recording)  # type: ignore[arg-type]
    given: Any
    for given, got in (({"input_ids": inputs}, "dict"), (inputs.tolist(), "list"), (inputs[0], r"a tensor \[7\]")):
        said = rf"got {got} \(what a tokenizer returns is passed as model\(\*\*batch"
        with pytest.raises(RoutingError, match=said), record_routes(model):
            model(given)
    swapped: Any = recording.routes, model
    with pytest.raises(UnsupportedModelError, match=r"got RoutedExperts$"), replay_routes(*swapped):
        pass
    assert not hooked(model)


def test_an_interrupt_while_a_context_opens_or_closes_leaves_a_model_that_records(monkeypatch: Any) -> None:
    model, inputs = moe(), tokens()
    before = routes_of(model, inputs)

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    experts = model.model.layers[2].mlp.experts  # of the last site: hooks of the others are on by then
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(experts, "register_forward_pre_hook", interrupted)
        routes_of(model, inputs)
    assert not hooked(model)
    assert routes_of(model, inputs).equal(before)

    remove, left = RemovableHandle.remove, iter(range(3))

    def remove_some(handle: RemovableHandle) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt
        remove(handle)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(RemovableHandle, "remove", remove_some)
        routes_of(model, inputs)
    assert hooked(model)
    assert routes_of(model, inputs).equal(before)
    assert not hooked(model)


def test_a_module_around_a_router_is_answered_with_what_to_change_instead() -> None:
    class Adapted(nn.Module):
        def __init__(self, router: nn.Module) -> None:
            super().__init__()
            self.router = router

        def forward(self, hidden: torch.Tensor) -> Any:
            return self.router(hidden)

    model = moe()
    block: Any = model.model.layers[0].mlp
    block.gate = Adapted(block.gate)
    with pytest.raises(UnsupportedModelError, match=r"mlp\.gate.*Keep it; change its weight or its forward"):
        record_routes(model).__enter__()
