"""moe-rl drift, as a person calls it: any family, bad input named, one model at a time gives the same numbers."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pytest
import torch
from drift_models import TEXTS, build, moved, padded, save, stands_alone
from pretended_cuda import pretended_cuda
from transformers import AutoModelForCausalLM

from moe_rl.cli import main
from moe_rl.drift import figures, run
from moe_rl.drift.checkpoints import fits_twice
from moe_rl.drift.floor import Floor
from moe_rl.drift.page import summary
from moe_rl.drift.run import DriftOptions, run_drift
from moe_rl.drift.words import floor_text
from moe_rl.measure import noise_floor
from moe_rl.measure.decompose import decompose
from moe_rl.measure.noise_floor import rounded_copy
from moe_rl.measure.scoring import TokenBatch, score_live
from moe_rl.routing import change_counts, record_routes


def results_of(folder):
    return json.loads((folder / "drift.json").read_text())


@pytest.mark.parametrize("family", ["qwen3_moe", "olmoe", "granitemoe"])
def test_numbers_are_those_of_the_models_on_the_same_text(family, saved, prompts, tmp_path, tokenizer, undrawn, capsys):
    old, new = saved(family)
    output = tmp_path / "out"
    main(["drift", str(old), str(new), "--prompts", str(prompts), "--output", str(output), "--batch-size", "4"])
    results = results_of(output)
    models = [build(family, tokenizer).eval(), moved(build(family, tokenizer)).eval()]
    ids, attention = padded(TEXTS, tokenizer)
    completion = attention.clone()
    completion[:, 0] = False
    direct = decompose(*models, ids, attention, completion, per_site=True)
    shares, counts = direct.shares(), change_counts(direct.old_routes, direct.new_routes_taken, completion)
    assert results["architecture"] == family and results["measured_tokens"] == sum(map(len, TEXTS)) - len(TEXTS)
    assert results["change"]["slot"]["changed"] == counts.slots_changed > 0
    assert results["change"]["token"]["of"] == counts.tokens_total
    for name, value in shares.rows().items():
        assert results["decomposition"][name] == pytest.approx(value, rel=2e-3, abs=1e-9), name
    sites = pd.read_parquet(output / "sites.parquet")
    assert sites["slots_changed"].tolist() == counts.per_site_slots_changed.tolist()
    assert sites["token_var_alone"].tolist() == pytest.approx(direct.site_shares().rows()["token_var_alone"], rel=2e-3)
    tokens = pd.read_parquet(output / "tokens.parquet")
    page = (Path(__file__).parents[2] / "docs" / "drift.md").read_text()
    rows = "\n".join(line for line in page.splitlines() if re.match(r"\| `\w+\.(json|html|parquet)`", line))
    assert {path.name for path in output.iterdir() if path.is_file()} == set(re.findall(r"`(\w+\.\w+)`", rows))
    assert {*tokens.columns, "slot_change", "load_moved"} <= set(re.findall(r"`(\w+)`", rows)) & {*tokens, *sites}
    assert tokens["flips"].sum() == counts.sites_changed and (tokens["smallest_margin"] > 0).all()
    if family != "granitemoe":  # which ranks logits; the others rank probabilities, as the page says
        routers = models[0](ids, attention_mask=attention.long(), output_router_logits=True).router_logits
        best = torch.stack([logits.softmax(-1).topk(3).values for logits in routers]).view(len(routers), *ids.shape, 3)
        smallest = (best[..., 1] - best[..., 2]).amin(0)[completion].detach()
        np.testing.assert_allclose(tokens["smallest_margin"], smallest, atol=1e-5)
        assert "probabilities for Qwen3-MoE, OLMoE and Mixtral" in rows
    assert tokens["token"].tolist() == [token for text in TEXTS for token in tokenizer(text)["input_ids"][1:]]
    assert tokens["line"].tolist() == [n for n, text in enumerate(TEXTS, start=1) for _ in text[1:]]
    assert tokens["log_ratio"].var() == pytest.approx(shares.token.total, rel=1e-3)
    parts = tokens["weight"] + tokens["routing"] + tokens["interaction"]
    np.testing.assert_allclose(parts, tokens["log_ratio"], atol=1e-5)
    experts = pd.read_parquet(output / "experts.parquet")
    assert experts["old"].sum() == experts["new"].sum() == results["measured_tokens"] * 2 * 2
    said = capsys.readouterr().out
    assert "Expert change" in said and "GSPO" in said and str(output) in said


def test_the_floor_is_what_the_old_checkpoint_changes_against_itself(tokenizer, tmp_path, capsys, monkeypatch):
    """Recounted from the routes of the first six of nine texts: whole batches of three, until five were seen. And the
    page stands alone, with figures in every format."""
    old = build("qwen3_moe", tokenizer, intermediate_size=16, moe_size=16).eval()
    folders = [save(model, tokenizer, tmp_path / name) for name, model in (("a", old), ("b", moved(old)))]
    texts = [*TEXTS, *TEXTS[:3]]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    common = ["--prompts", str(tmp_path / "text.jsonl"), "--batch-size", "3", "--floor-sequences", "5"]
    for name, more in (("both", []), ("alone", ["--one-at-a-time"])):
        main(["drift", *map(str, folders), *common, "--output", str(tmp_path / name), *more])
        monkeypatch.setattr(run, "draw", lambda *_: [])
    said = capsys.readouterr().out
    results = results_of(tmp_path / "both")["floor"]
    assert (
        results == results_of(tmp_path / "alone")["floor"] and results["sequences"] == 6 and results["left_out"] == {}
    )
    assert list(results["variants"]) == ["repeat", "batch", "experts", "bf16"]
    repeat, batch, experts, bf16 = results["variants"].values()
    assert [repeat[level]["changed"] for level in ("slot", "site", "token")] == [0, 0, 0] and repeat["gap_max"] == 0
    assert max(batch["gap_max"], experts["gap_max"]) < 1e-5 < bf16["gap_max"], "fp32 on a CPU"

    rounded = rounded_copy(old)
    by_site, by_position, tokens, touched = [0, 0], {}, 0, 0
    for start in (0, 3):
        rows = texts[start : start + 3]
        ids, mask = padded(rows, tokenizer)
        taken = []
        for model in (old, rounded):
            with torch.no_grad(), record_routes(model) as recording:
                model(input_ids=ids, attention_mask=mask)
            taken.append(recording.routes.ids.tolist())
        for row, text in enumerate(rows):
            for t in range(1, len(text)):  # the first token follows nothing
                lost = [len(set(taken[0][row][t][s]) - set(taken[1][row][t][s])) for s in (0, 1)]
                by_site = [total + n for total, n in zip(by_site, lost, strict=True)]
                by_position[t - 1] = by_position.get(t - 1, 0) + sum(n > 0 for n in lost)
                tokens, touched = tokens + 1, touched + any(lost)
    assert (bf16["slot"]["changed"], bf16["slot"]["of"]) == (sum(by_site), 4 * tokens) and sum(by_site) > 0
    assert (bf16["token"]["changed"], bf16["site"]["changed"]) == (touched, sum(by_position.values()))
    sites = pd.read_parquet(tmp_path / "both" / "floor_sites.parquet")
    assert sites[sites["variant"] == "bf16"]["slots_changed"].tolist() == by_site
    positions = pd.read_parquet(tmp_path / "both" / "floor_positions.parquet")
    positions = positions[positions["variant"] == "bf16"].set_index("position")
    assert positions["sites_changed"].to_dict() == by_position and positions["tokens"].sum() == tokens

    percent = f"{100 * touched / tokens:.3g} % of tokens"
    page, drawn = (tmp_path / "both" / "report.html").read_text(), tmp_path / "both" / "figures"
    assert stands_alone(page, 8)
    for name in ("decomposition", "log_ratios", "change_by_site", "change_by_position", "flips"):
        assert {file.suffix for file in drawn.glob(f"{name}.*")} == {".pdf", ".svg", ".png", ".csv", ".md"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "alone", "b", "both", "text.jsonl"]
    assert f"Noise floor: {folders[0].name} against itself on 6 sequences" in said and percent in said
    assert page.count(percent) >= 4, "summary, and the captions of three figures"
    for figure in ("change_by_site", "change_by_position", "flips"):
        assert "Noise floor: a against itself" in (drawn / f"{figure}.md").read_text()
    table = pd.read_csv(drawn / "change_by_site.csv")
    assert table[table["variant"] == "bf16"]["slots_changed"].tolist() == by_site


def test_a_floor_is_left_out_when_asked_and_where_a_kernel_cannot_run(saved, prompts, tmp_path, undrawn):
    """Experts of 12 inner units have rows of 24 bytes in bf16, and grouped_mm wants multiples of 16."""
    options = DriftOptions(tuple(map(str, saved("qwen3_moe"))), prompts, tmp_path / "out", per_site=False)
    floor = results_of(run_drift(options))["floor"]
    assert (
        list(floor["variants"]) == ["repeat", "batch", "experts"]
        and "multiple of 16 bytes" in floor["left_out"]["bf16"]
    )
    assert "not measured: bf16 (the self-check could" in (tmp_path / "out" / "report.html").read_text()
    assert floor_text("old", floor, reasons=False).endswith("bf16.")
    results = results_of(run_drift(replace(options, floor_sequences=0)))
    assert results["floor"] == {"sequences": 0, "left_out": {}, "variants": {}}
    assert "<dt>Noise floor" not in (tmp_path / "out" / "report.html").read_text()
    names = ("sites", "floor_sites", "positions", "floor_positions")
    tables = {name: pd.read_parquet(tmp_path / "out" / f"{name}.parquet") for name in names}
    for figure in (
        figures.change_by_site(tables["sites"], tables["floor_sites"], "note"),
        figures.change_by_position(tables["positions"], tables["floor_positions"], "note"),
    ):
        assert "Dashed" not in figure.caption and not figure.figure.axes[0].lines[-1].get_label().startswith("equal")


@pytest.mark.parametrize(("length", "tokens", "bins"), [(4, 2, 1), (200, 2, 9), (3, 30, 3), (3, 29, 1)])
def test_bins_of_positions_hold_thirty_tokens_or_all_there_are(length, tokens, bins):
    positions = pd.DataFrame({"position": np.arange(length), "tokens": tokens})
    for name in ("slots", "sites", "tokens"):
        positions[f"{name}_changed"] = positions["position"] % 2
    positions["slots"] = positions["sites"] = 2
    drawn = figures.change_by_position(positions, pd.DataFrame(columns=["variant"]), "note")
    assert len(drawn.frame) == bins and drawn.frame["tokens"].sum() == tokens * length
    assert drawn.frame["tokens"].min() >= min(30, tokens * length) and drawn.frame["last"].iloc[-1] == length - 1
    assert (drawn.frame["first"].iloc[1:].to_numpy() == drawn.frame["last"].iloc[:-1].to_numpy() + 1).all()


def test_a_bf16_copy_that_does_not_fit_is_left_out(tokenizer, monkeypatch):
    monkeypatch.setattr(noise_floor, "free_bytes", lambda device: 1000)
    model = build("qwen3_moe", tokenizer, moe_size=16).eval()
    mask = torch.ones(1, 4, dtype=torch.bool)
    text = TokenBatch(torch.tensor([[3, 4, 5, 6]]), mask, mask & (torch.arange(4) > 0))
    floor = Floor(8)
    floor.add(model, text, score_live(model, text))
    assert list(floor.variants) == ["repeat", "experts"], "one sequence has no other batch shape"
    left_out = floor.results()["left_out"]
    assert re.search("a bf16 copy takes .* GiB, .* are free", left_out["bf16"])
    assert left_out["batch"] == "one sequence has no other batch shape"
    said = floor_text("old", floor.results())
    assert "own arithmetic (repeated, other experts implementation) changes" in said and "not measured: batch (" in said
    two = TokenBatch(*(part.repeat(2, 1) for part in (text.input_ids, mask, text.completion_mask)))
    floor.add(model, two, score_live(model, two))
    assert "batch" in floor.results()["variants"] and "batch" not in floor.results()["left_out"]
    other = build("jetmoe", tokenizer).eval()
    floor = Floor(1)
    floor.add(other, text, score_live(other, text))
    assert "has no experts implementation" in floor.results()["left_out"]["experts"]


def test_a_variant_that_fails_on_a_later_batch_is_not_reported(tokenizer, monkeypatch):
    """It was measured on fewer sequences than the others, under whose number it would stand."""
    model = build("qwen3_moe", tokenizer, moe_size=16).eval()
    mask = torch.ones(2, 4, dtype=torch.bool)
    text = TokenBatch(torch.tensor([[3, 4, 5, 6], [6, 5, 4, 3]]), mask, mask & (torch.arange(4) > 0))
    floor, before = Floor(4), score_live(model, text)
    floor.add(model, text, before)
    assert "bf16" in floor.results()["variants"]
    monkeypatch.setattr(noise_floor, "rounded_copy", Mock(side_effect=MemoryError("no memory")))
    floor._noise_floor.close()  # frees the copy of the first batch
    floor.add(model, text, before)
    found = floor.results()
    assert found["sequences"] == 4 and list(found["variants"]) == ["repeat", "batch", "experts"]
    assert found["left_out"] == {"bf16": "no memory"} and "bf16" not in set(floor.sites()["variant"])


def test_flips_are_set_beside_the_log_ratio_that_they_can_move(saved, prompts, tmp_path, undrawn):
    """Where no route changed at or before the predicting position, the routing part is exactly 0."""
    output = run_drift(DriftOptions(tuple(map(str, saved("qwen3_moe"))), prompts, tmp_path / "out", per_site=False))
    tokens = pd.read_parquet(output / "tokens.parquet")
    second = tokens[tokens["position"] > 0]  # flips of the position before are in the row before
    before = tokens["flips"].shift(1).loc[second.index]
    assert (second["flips_before"] == before).all() and before.sum() > 0
    first = tokens[tokens["position"] == 0]
    assert (first["routing"][first["flips_before"] == 0] == 0).all()
    assert (first["routing"][first["flips_before"] > 0] != 0).all() and (first["flips_before"] > 0).any()
    assert "token_var_alone" not in pd.read_parquet(output / "sites.parquet")


def test_a_checkpoint_against_itself_is_zero_everywhere_and_still_drawn(saved, prompts, tmp_path):
    old, _ = saved("qwen3_moe")
    output = run_drift(DriftOptions((str(old), str(old)), prompts, tmp_path / "out"))
    results, tokens = results_of(output), pd.read_parquet(output / "tokens.parquet")
    assert [row["changed"] for row in results["change"].values()] == [0, 0, 0]
    assert (tokens[["log_ratio", "weight", "routing", "interaction"]] == 0).all(axis=None)
    page = (output / "report.html").read_text()
    assert "say the same of this text" in page and page.count("<svg") == 5, "of nothing there is no decomposition"
    assert results["decomposition"]["token_share_routing"] is None, "a share of nothing is null, not NaN"


def test_experts_that_are_only_numbered_otherwise_are_told(saved, prompts, tmp_path, undrawn):
    old, _ = saved("qwen3_moe")
    model = AutoModelForCausalLM.from_pretrained(old)
    for layer in model.model.layers:
        gate, experts = layer.mlp.gate, layer.mlp.experts
        order = torch.arange(gate.weight.shape[0]).flip(0)
        with torch.no_grad():
            for weight in (gate.weight, experts.gate_up_proj, experts.down_proj):
                weight.copy_(weight[order].clone())
    model.save_pretrained(tmp_path / "new")
    for path in old.glob("*token*"):
        shutil.copy(path, tmp_path / "new")
    output = run_drift(DriftOptions((str(old), str(tmp_path / "new")), prompts, tmp_path / "out"))
    assert results_of(output)["change"]["slot"]["rate"] > 0.3
    page = (output / "report.html").read_text()
    assert "do not vary beyond rounding" in page and "are experts numbered otherwise in one of the two?" in page


def test_one_at_a_time_gives_the_same_numbers(saved, prompts, tmp_path, undrawn):
    pair = [str(folder) for folder in saved("olmoe")]
    both = run_drift(DriftOptions(tuple(pair), prompts, tmp_path / "both", batch_size=4))
    alone = run_drift(DriftOptions(tuple(pair), prompts, tmp_path / "alone", batch_size=4, one_at_a_time=True))
    a, b = results_of(both), results_of(alone)
    assert a.pop("settings")["one_at_a_time"] is False and b.pop("settings")["one_at_a_time"] is True
    assert a == b
    for name in ("tokens", "sites", "experts", "positions"):
        pd.testing.assert_frame_equal(
            *(pd.read_parquet(f / f"{name}.parquet") for f in (both, alone)), check_exact=True
        )
    assert not (alone / "cache").exists()


def test_where_two_do_not_fit_one_at_a_time_is_taken(saved, prompts, tmp_path, undrawn, monkeypatch):
    cpu = torch.device("cpu")
    assert fits_twice(1, "float32", cpu) and not fits_twice(10**15, "float32", cpu)
    monkeypatch.setattr(run.pair, "fits_twice", lambda *_: False)
    output = run_drift(DriftOptions(tuple(map(str, saved("olmoe"))), prompts, tmp_path / "out"))
    assert results_of(output)["settings"]["one_at_a_time"] is True


def test_one_token_and_all_experts_chosen(tokenizer, prompts, tmp_path, undrawn):
    old = save(build("olmoe", tokenizer, num_experts_per_tok=6), tokenizer, tmp_path / "old")
    prompts.write_text(json.dumps({"prompt": "ab", "completion": "c"}))
    output = run_drift(DriftOptions((str(old), str(old)), prompts, tmp_path / "out", floor_sequences=0))
    assert pd.read_parquet(output / "sites.parquet")["margin_median"].isna().all(), "nothing was left to choose"
    none = pd.DataFrame({"low": [], "high": [], "choices": [], "changed": []})
    assert figures.margins(none, "").render("svg")
    ties = pd.DataFrame({"low": [0.0, 0.1], "high": [1e-7, 0.2], "choices": [40, 60], "changed": [10, 3]})
    assert (
        "40 closer choices, ties most of them, are left of the axes; 25 % of these" in figures.margins(ties, "").caption
    )
    assert "left of the axes" not in figures.margins(ties[1:], "").caption
    drawn = [figures.margins(ties.assign(choices=least), "").figure.axes[0].lines[0].get_ydata() for least in (29, 30)]
    assert [line.tolist() for line in drawn] == [[], [10.0]], "of thirty choices that one can be drawn"
    topics = dict(summary(results_of(output)))
    assert topics["Log-ratio"].startswith("One token alone"), "not: the two say the same"


def test_loads_of_sites_with_fewer_experts_have_one_colour_scale():
    table = pd.DataFrame(
        {"site": [*"aaab", "b"], "expert": [0, 1, 2, 0, 1], "old": [6, 2, 2, 5, 5], "new": [2, 6, 2, 5, 5]}
    )
    uneven = figures.load_by_expert(table, "")
    assert uneven.figure.axes[0].images[0].get_clim() == (-40, 40)  # 6 of 10 to 2 of 10, in points
    assert "even load" not in uneven.caption and "blank" in uneven.caption
    assert "An even load is 33.3 % per expert." in figures.load_by_expert(table[:3], "").caption


def test_of_one_sequence_nothing_is_said_of_averaging(saved, prompts, tmp_path, undrawn):
    prompts.write_text(json.dumps({"text": "abcabbacbacabcaabcb"}))
    output = run_drift(DriftOptions(tuple(map(str, saved("olmoe"))), prompts, tmp_path / "out", floor_sequences=0))
    assert results_of(output)["decomposition"]["token_var_routing"] > 0, "so that it does vary, by token"
    assert dict(summary(results_of(output)))["Does averaging remove it?"].startswith("One sequence alone")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_comparison_on_a_gpu_mixes_no_devices(saved, prompts, tmp_path, undrawn):
    """On one that is not there and, as Apple's, has no float64: all that is measured, and the same as on the CPU."""
    options = DriftOptions(tuple(map(str, saved("qwen3_moe"))), prompts, tmp_path / "cpu")
    here = results_of(run_drift(replace(options, device="cpu")))
    with pretended_cuda(float64=False):
        there = results_of(run_drift(replace(options, device="cuda", output=tmp_path / "cuda")))
    assert there["environment"]["gpu"] == "pretended" and there["change"]["slot"] == here["change"]["slot"]


def test_of_few_tokens_the_log_ratios_say_so():
    tails = pd.DataFrame({"log_ratio": ["natural"] * 2, "size": [0.1, 0.2], "share": [0.5, 0.1]})
    few = pd.DataFrame({"flips": [0, 1], "tokens": [29, 3], "natural": [0.1, 0.2], "replayed": [0.1, 0.1]})
    left, right = figures.log_ratios(tails, few, "").figure.axes
    assert left.get_ylabel() == "share of tokens with |log r| ≥ x", "as Sums.tails counts them"
    assert [text.get_text() for text in right.texts] == ["no bin has 30 tokens"] and not len(right.get_xticks())
    right = figures.log_ratios(tails, few.assign(tokens=30), "").figure.axes[1]
    assert not right.texts and right.get_yscale() == "log"
