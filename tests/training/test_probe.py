"""The probe in training: the noise floor and the decomposition, logged as defined, and without a trace in the run."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch
from micro import MICRO, rows

from moe_rl.measure import token_logps
from moe_rl.measure.noise_floor import floor_metrics
from moe_rl.training import EvalConfig, MethodConfig, ProbeConfig, begin, probe, probe_options, run, validate
from moe_rl.training.config import DistributedConfig
from moe_rl.training.loop import collect_batch, start_probe
from moe_rl.training.route_tables import read_route_table, write_route_table

sys.path.append(str(Path(__file__).parents[1] / "routing"))
from routing_helpers import moe, tokens


def test_the_floor_by_site_and_position_is_a_recount_of_the_routes(tmp_path, monkeypatch):
    seen = []

    def watched(mask, old, new):
        seen.append((mask, old.routes.ids, new.routes.ids))
        return floor_metrics(mask, old, new)

    monkeypatch.setattr(probe_options, "floor_metrics", watched)
    run(begin(replace(MICRO, probe=ProbeConfig(sequences=8, tokens_every=0)), tmp_path))
    floor = rows(tmp_path, "floor")
    assert [row["variant"] for row in floor] == ["repeat", "batch", "experts", "bf16"]
    for row, (mask, old, new) in zip(floor, seen, strict=True):
        by_site, by_position, flips = [0, 0], {}, []
        for b, inside in enumerate(mask.tolist()):
            columns = [t for t, counted in enumerate(inside) if counted]
            for position, t in enumerate(columns):
                lost = [len(set(old[b, t, site].tolist()) - set(new[b, t, site].tolist())) for site in (0, 1)]
                by_site = [total + n for total, n in zip(by_site, lost, strict=True)]
                flips.append(sum(n > 0 for n in lost))
                by_position.setdefault(position, []).append(flips[-1])
        assert row["site_slots_changed"] == by_site and row["site_slots"] == [2 * len(flips)] * 2
        assert row["flips_histogram"] == [flips.count(n) for n in (0, 1, 2)]
        assert row["position_sites_changed"] == [sum(by_position[p]) for p in sorted(by_position)]
        assert row["position_sites"] == [2 * len(by_position[p]) for p in sorted(by_position)]
    assert sum(floor[-1]["site_slots_changed"]) > 0, "rounding to bfloat16 changes some choice"


def test_the_floor_is_measured_once_and_changes_nothing(tmp_path):
    for name, floor in (("with", True), ("without", False)):
        run(begin(replace(MICRO, probe=ProbeConfig(sequences=8, tokens_every=0, floor=floor)), tmp_path / name))
    found = {row["variant"]: row for row in rows(tmp_path / "with", "floor")}
    assert list(found) == ["repeat", "batch", "experts", "bf16"]
    assert found["repeat"]["gap_max"] == found["repeat"]["slots_changed"] == 0, "one forward twice is the same twice"
    assert found["batch"]["gap_max"] < 1e-5 and found["experts"]["gap_max"] < 1e-5, "fp32 on a CPU"
    assert 1e-5 < found["bf16"]["gap_max"] < 1
    assert all(row["slots"] == 2 * row["sites"] == 4 * row["tokens"] > 0 for row in found.values())  # K = 2, L = 2
    assert rows(tmp_path / "without") == [r for r in rows(tmp_path / "with") if r["kind"] != "floor"]


def test_a_floor_that_a_kernel_cannot_run_is_left_out_and_ends_no_run(tmp_path):
    """Experts of 12 inner units have rows of 24 bytes in bf16, and grouped_mm wants multiples of 16."""
    tiny = replace(MICRO.model.tiny, moe_intermediate_size=12)
    model = replace(MICRO.model, tiny=tiny, experts_implementation="grouped_mm")
    config = replace(MICRO, model=model, probe=ProbeConfig(sequences=4, tokens_every=0))
    with pytest.warns(UserWarning, match="noise floor: bf16 is left out.*multiple of 16 bytes"):
        run(begin(config, tmp_path))
    assert [row["variant"] for row in rows(tmp_path, "floor")] == ["repeat", "batch", "experts"]
    assert [row["step"] for row in rows(tmp_path, "step")] == list(range(MICRO.optim.steps))


def test_the_decomposition_is_logged_and_disturbs_nothing(paid_by_parity, tmp_path):
    config = replace(
        MICRO,
        optim=replace(MICRO.optim, steps=3, learning_rate=2e-2, warmup_updates=1),
        eval=EvalConfig(every=0, prompts=2),
        probe=ProbeConfig(sequences=4, tokens_every=0),
    )
    for every in (0, 2):
        run(begin(replace(config, probe=replace(config.probe, decompose_every=every)), tmp_path / str(every)))
    plain, split = rows(tmp_path / "0"), rows(tmp_path / "2")
    assert plain == [r for r in split if r["kind"] != "decomposition"], "the probe must not move the run"
    found = rows(tmp_path / "2", "decomposition")
    assert [(r["step"], r["update"]) for r in found] == [(0, 1), (0, 2), (2, 1), (2, 2)]
    probes = {(r["step"], r["update"]): r for r in rows(tmp_path / "2", "probe")}
    for row in found:  # the same subset as the other probe: its variances are corners of this 2x2
        probed = probes[row["step"], row["update"]]
        assert row["token_variance"] == pytest.approx(probed["var_token_natural"], rel=1e-3)
        assert row["token_var_weight"] == pytest.approx(probed["var_token_replayed"], rel=1e-3)
        assert row["sequence_variance"] == pytest.approx(probed["var_sequence_natural"], rel=1e-3)
        assert row["tokens"] == probed["tokens"] and len(row["site_token_var_alone"]) == 2 == len(row["site_names"])
    assert any(row["token_var_routing"] > 0 for row in found)
    with pytest.raises(ValueError, match=r"probe\.sequences"):
        validate(replace(config, probe=ProbeConfig(every=0, sequences=999, decompose_every=1)))
    alone = replace(config.probe, every=0, decompose_every=2)
    run(begin(replace(config, optim=replace(config.optim, steps=1), probe=alone), tmp_path / "alone"))
    assert {row["kind"] for row in rows(tmp_path / "alone")} == {"rollout", "update", "decomposition", "eval"}


def test_gates_stand_in_the_order_of_the_experts_in_route_tables(tmp_path):
    state = begin(replace(MICRO, probe=ProbeConfig(sequences=4, floor=False)), tmp_path)
    seen = start_probe(state, collect_batch(state))
    list(seen.rows(1))
    list(seen.rows(2))
    (found, later), mask = seen.observations, seen.part.completion_mask
    assert later.routers["old_gates"] is found.routers["old_gates"], "kept once"
    write_route_table(tmp_path / "routes.parquet", seen.part.routes)
    ids = read_route_table(tmp_path / "routes.parquet").ids[mask].long()
    scores = torch.stack([site.softmax(-1) for site in seen.old_logits], 1)
    assert torch.equal(found.routers["old_gates"], scores.gather(-1, ids))
    assert (found.routers["old_gates"].diff(dim=-1) > 0).any(), "else any order would do"


def test_padding_has_no_route_in_the_tables_and_the_page_finds_what_the_probe_counted(
    paid_by_parity, tmp_path, monkeypatch
):
    """docs/run_folder.md, "In pandas alone"."""
    optim = replace(MICRO.optim, steps=1, learning_rate=0.05)
    run(begin(replace(MICRO, optim=optim, probe=ProbeConfig(sequences=8, tokens_every=1)), tmp_path))
    tokens = pd.read_parquet(tmp_path / "tokens" / "step_000000.parquet").query("update == 1")
    about = pq.read_schema(tmp_path / "tokens" / "step_000000.parquet").metadata
    lengths = np.array(json.loads(about[b"first"])) + tokens.groupby("seq", sort=False).size().to_numpy()
    frame = pd.read_parquet(tmp_path / "routes" / "step_000000_update_0.parquet")
    routed = frame.filter(like="gate").notna().all(axis=1).groupby(frame["sequence"])
    last = routed.apply(lambda given: int(np.flatnonzero(given)[-1]) + 1)
    assert last.tolist() == lengths.tolist(), "no route after the response"
    assert ((frame["token"] < 0) == frame.filter(like="gate").isna().all(axis=1)).all(), "no token at padding"
    assert lengths.min() < frame["position"].max() + 1, "some responses are padded"
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "run_folder.md").read_text()
    names: dict = {}
    exec(re.findall(r"```python\n(.*?)```", page, re.DOTALL)[-1].replace("step_000010", "step_000000"), names)
    (probed,) = rows(tmp_path, "probe", step=0, update=1)
    counted = dict(zip(probed["site_names"], probed["site_slots_changed"], strict=True))
    slots = dict(zip(probed["site_names"], probed["site_slots"], strict=True))
    assert sum(counted.values()) > 0
    assert names["slot_change"].to_dict() == pytest.approx({s: n / slots[s] for s, n in counted.items()})


def test_comparing_gradients_changes_nothing_else_and_finds_no_bias_where_no_weight_moves(state_of, tmp_path):
    plain = replace(MICRO, probe=ProbeConfig(sequences=4, tokens_every=0, floor=False))
    compared = replace(plain, probe=replace(plain.probe, gradients=True))
    still = replace(compared, optim=replace(compared.optim, learning_rate=1e-12))
    ends = {}
    for name, config in (("plain", plain), ("compared", compared), ("still", still)):
        state = state_of(config, tmp_path / name)
        run(state)
        ends[name] = state.policy.state_dict()
    assert all(torch.equal(value, ends["compared"][name]) for name, value in ends["plain"].items())
    with_gradients = rows(tmp_path / "compared", "probe")
    assert [
        {k: v for k, v in row.items() if "gradient" not in k and not k.startswith("layer_")} for row in with_gradients
    ] == rows(tmp_path / "plain", "probe")
    assert any(row["gradient_cosine"] < 0.999 for row in with_gradients)
    layers = ["other", "0", "1"]
    for row in rows(tmp_path / "still", "probe"):
        if row["gradient_cosine"] is not None:  # no group earned anything: no gradient
            assert row["gradient_cosine"] == pytest.approx(1.0, abs=1e-6) and row["layer_names"] == layers
            assert row["router_gradient_norm_ratio"] == pytest.approx(1.0, abs=1e-5)
            assert row["layer_gradient_cosine"] == pytest.approx([1.0] * 3, abs=1e-6)
    assert any(row["gradient_cosine"] is not None for row in rows(tmp_path / "still", "probe"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"probe": ProbeConfig(every=0, gradients=True)}, "probe.gradients does not go with this probe.every"),
        ({"probe": ProbeConfig(sequences=1, gradients=True)}, "probe.gradients does not go with this probe.sequences"),
        (
            {"probe": ProbeConfig(sequences=2, gradients=True), "method": MethodConfig(objective="dpo")},
            "probe.gradients does not go with this method.objective",
        ),
        (
            {"probe": ProbeConfig(sequences=2, gradients=True), "distributed": DistributedConfig("ddp")},
            "probe.gradients does not go with this distributed.strategy",
        ),
    ],
)
def test_gradients_are_refused_where_they_would_mean_nothing(changes, message):
    with pytest.raises(ValueError, match=message):
        validate(replace(MICRO, **changes))


@torch.no_grad()
def test_routers_that_return_their_softmax_are_measured_in_logits():
    """Gemma 4's `router_logits` are probabilities: taken for logits, every share would be near 1/E and every margin of
    another unit."""
    model, ids = moe("Gemma4ForCausalLM"), tokens()
    mask = torch.ones_like(ids).bool()
    out = token_logps(model, ids, mask, mask, router_logits=True)
    assert all(torch.allclose(p.sum(-1), torch.tensor(1.0)) for p in out.router_logits)
    own = object.__new__(probe.Probe)
    own.part, own.ranks = SimpleNamespace(completion_mask=mask), SimpleNamespace(gather=lambda rows, _: rows)
    for found, given in zip(own._response_logits(out), out.router_logits, strict=True):
        torch.testing.assert_close(found.softmax(-1), given.flatten(0, -2))


def test_no_response_is_probed_twice():
    for responses, sequences in ((8, 3), (8, 8), (256, 32), (4164, 4163), (16384, 16382)):
        probed = probe.probed_rows(responses, sequences)
        assert len(probed.unique()) == sequences and probed[0] == 0 and probed[-1] == responses - 1
