"""moe-rl compare-routes fails closed: every change rate is of tokens that have routes in both files, or it says so."""

import base64
import json

import numpy as np
import pandas as pd
import pytest
import torch
from test_compare_routes import comparison, lines, names, put

from moe_rl.drift.capture_files import read_capture
from moe_rl.drift.compare import compared, run_compare
from moe_rl.drift.errors import DriftError
from moe_rl.drift.options import CompareOptions
from moe_rl.routing import RoutedExperts
from moe_rl.routing.packing import hide


def drawn(*lengths, L=3, K=2, E=8, seed=0):
    """Tokens, and distinct experts of each at every layer."""
    rng = np.random.default_rng(seed)
    ids = [np.argsort(rng.random((n, L, E)), -1)[..., :K] for n in lengths]
    return [rng.integers(1, 50, n).tolist() for n in lengths], ids


def between(path, tokens, old, new, **options):
    return comparison(path, [x.tolist() for x in old], [x.tolist() for x in new], tokens, **options)


def said(found):
    return [(f["name"], f["fault"]) for f in found["findings"]]


def files(path, **arrays):
    """OLD and NEW as arrays; of `routed_experts` the first and the second."""
    old, new = arrays.pop("routed_experts")
    np.savez(path / "old.npz", routed_experts=old, **arrays)
    np.savez(path / "new.npz", routed_experts=new, **arrays)
    return path / "old.npz", path / "new.npz"


@pytest.mark.parametrize(
    ("where", "value", "compared", "told"),
    [
        ((slice(10, 40), 1), 0, 75, ("tokens without routes", True)),  # some layers: no set of two is {0}
        ((slice(10, 40), 1), -1, 75, ("live rows", False)),
        ((slice(0, 3), slice(1, 4)), 0, 102, ("prefix-cache hits without routes", True)),  # all but the dense layer
    ],
)
def test_a_token_without_a_route_at_a_compared_layer_is_in_no_rate(tmp_path, where, value, compared, told):
    tokens, ids = drawn(60, 45)
    ids = [np.concatenate([np.full((len(x), 1, 2), -1), x], 1) if value == 0 and told[0][0] == "p" else x for x in ids]
    found = between(tmp_path, tokens, ids, [put(ids[0], where, value), ids[1]])
    assert found["compared"] == compared and found["change"]["slot"]["changed"] == 0 and told in said(found)
    assert found["without_route"] == {"old": 0, "new": 105 - compared}


def test_one_zero_is_expert_0_unless_it_is_everywhere(tmp_path):
    """Of one expert per token: at twelve sites no route, at two it may be meant, and is counted."""
    tokens, many = drawn(60, 45, L=12, K=1)
    found = between(tmp_path, tokens, many, [put(x, slice(20, 24), 0) for x in many])
    assert (found["compared"], found["change"]["slot"]["changed"]) == (97, 0)
    assert names(found) == ["tokens without routes"]
    _, few = drawn(60, 45, L=2, K=1)
    zeros = [put(x, slice(20, 22), 0) for x in few]
    found = between(tmp_path, tokens, few, zeros)
    assert found["compared"] == 105 and ("zeros of one slot", False) in said(found) and found["ok"]
    assert found["change"]["slot"]["changed"] == sum(int((x != y).sum()) for x, y in zip(few, zeros, strict=True))


def test_an_expert_twice_is_a_table_only_if_a_token_id_always_has_the_same_row(tmp_path):
    tokens, ids = drawn(60, 45)
    rows = np.array([[t % 8, t % 4] for t in range(50)])  # of tokens below 4 modulo 8 one expert twice
    table = [put(x, (slice(None), 1), rows[words]) for words, x in zip(tokens, ids, strict=True)]
    assert names(between(tmp_path, tokens, table, table)) == []
    both = [put(x, (slice(0, 8), 1), 7) for x in ids]
    assert set(names(between(tmp_path, tokens, both, both))) == {"duplicates"}
    one, other = put(ids[0], (0, 1), 3), put(ids[0], (slice(10, 40), 1), 4)
    assert set(names(between(tmp_path, tokens, [one, ids[1]], [other, ids[1]]))) == {"duplicates"}


def test_a_table_that_names_an_expert_twice_has_a_load(tmp_path):
    tokens, ids = drawn(60, 45)
    rows = np.array([[t % 8, t % 4] for t in range(50)])
    table = [put(x, (slice(None), 1), rows[words]) for words, x in zip(tokens, ids, strict=True)]
    found = between(tmp_path, tokens, table, table, experts=8)
    load = np.bincount(rows[np.concatenate(tokens)].ravel(), minlength=8)
    assert found["loads"]["old"] == found["loads"]["new"] and found["loads_left_out"] == ""
    assert found["by_site"][1]["max_vio_new"] == pytest.approx(load.max() / load.mean() - 1)


def test_loads_are_of_both_sides_or_of_none(tmp_path):
    """An id that no expert has, in NEW alone: nothing of OLD stands in the tables either."""
    tokens, ids = drawn(60, 45)
    found = between(tmp_path, tokens, ids, [put(ids[0], (5, 2, 0), 99), ids[1]], experts=8)
    assert found["loads"] is None and "names expert 99" in found["loads_left_out"]
    assert not any(name.startswith("max_vio") for row in found["by_site"] for name in row)


def test_a_site_without_routes_is_left_out_where_files_name_their_sites_too(tmp_path):
    tokens, ids = drawn(45, 45)
    whole, sites = np.stack(ids), ["a.0.gate", "a.1.gate", "a.2.gate"]
    dark = put(whole, (slice(None), slice(None), 1), -1)
    for name, given in (("whole", whole), ("dark", dark)):
        path = tmp_path / f"{name}.safetensors"
        RoutedExperts(given, sites, 8, tokens=np.array(tokens)).save(path)
    both = compared(CompareOptions(tmp_path / "dark.safetensors", tmp_path / "dark.safetensors"))
    one = compared(CompareOptions(tmp_path / "whole.safetensors", tmp_path / "dark.safetensors"))
    for found in (both, one):
        assert found["compared"] == 90 and [row["site"] for row in found["by_site"]] == ["a.0.gate", "a.2.gate"]
    assert both["ok"] and "layers ['a.1.gate'] are all zeros (or -1) in both" in both["findings"][1]["text"]
    assert names(one) == ["layers without routes"] and "['a.1.gate'] in one file only" in one["findings"][0]["text"]
    first = RoutedExperts(0 * whole[..., :1], sites, 8, tokens=np.array(tokens))  # of top-1: expert 0, says its name
    first.save(tmp_path / "first.safetensors")
    found = compared(CompareOptions(tmp_path / "first.safetensors", tmp_path / "first.safetensors"))
    assert found["compared"] == 90 and len(found["by_site"]) == 3


def test_where_nothing_is_compared_every_number_is_null_and_the_table_empty(tmp_path):
    tokens, ids = drawn(45)
    whole = between(tmp_path, tokens, ids, ids, experts=8)
    old, new = lines(tmp_path / "a.jsonl", [ids[0].tolist()], tokens), tmp_path / "b.jsonl"
    lines(new, [(0 * ids[0]).tolist()], tokens)
    assert run_compare(CompareOptions(old, new, output=tmp_path / "out")) == 1
    found = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert set(found) == set(whole) and found["change"] is found["clusters"] is found["slot_change_once_undone"] is None
    table = pd.read_csv(tmp_path / "out" / "sites.csv")
    assert len(table) == 0 and list(table) == ["site", "tokens", "tokens_changed", "slots", "slots_changed"]


@pytest.mark.parametrize("tokens_without", [1, 0])
def test_short_sequences_are_placed_alike_or_refused(tmp_path, tokens_without):
    """Two rows of twenty at two layers, a third of the slots changed: each alone would be misplaced now and then."""
    tokens, ids = drawn(*[20] * 60, L=2)
    rng, end = np.random.default_rng(1), 20 - tokens_without
    new = [x[end - 2 : end].copy() for x in ids]
    for rows in new:
        rows[..., 0] = np.where(rng.random(rows.shape[:2]) < 0.6, (rows[..., 1] + 3) % 8, rows[..., 0])
    pairs = [(set(a.tolist()), set(b.tolist())) for x, y in zip(ids, new, strict=True)
             for a, b in zip(x[end - 2 : end].reshape(-1, 2), y.reshape(-1, 2), strict=True)]  # fmt: skip
    found = between(tmp_path, tokens, ids, new)
    assert found["compared"] == 120 and found["change"]["slot"]["changed"] == sum(2 - len(a & b) for a, b in pairs)
    with pytest.raises(DriftError, match=r"new\.jsonl: 60 sequences with fewer rows .* which fit no tokens clearly"):
        between(tmp_path, tokens, ids, [(x + 1) % 8 for x in new])
    found = between(tmp_path, tokens, ids, [x[:-5] for x in ids])
    assert found["verdict"].endswith("Left out: tokens without routes.") and found["compared"] == 900


def test_a_shift_is_undone_over_all_tokens_that_have_both_rows(tmp_path):
    """OLD lacks the last row: it is no row that disagrees. 5000 tokens, more than are searched."""
    tokens, ids = drawn(*[10] * 12)
    found = between(tmp_path, tokens, [x[:-1] for x in ids], [np.roll(x, -1, 0) for x in ids])
    assert found["slot_change_once_undone"] == 0 and names(found) == ["shifted by one token"]
    tokens, ids = drawn(2500, 2500, L=2)
    new = [put(x, (slice(0, None, 10), 0), ids[0][7, 0]) for x in ids]
    shifted = between(tmp_path, tokens, ids, [np.roll(x, 1, 0) for x in new])
    true = between(tmp_path, tokens, [x[:-1] for x in ids], [x[:-1] for x in new])["change"]["slot"]["rate"]
    assert shifted["slot_change_once_undone"] == pytest.approx(true, abs=1e-12)


@pytest.mark.parametrize("tokens", [2, 10])
def test_no_token_is_among_the_others_that_it_is_held_against(tmp_path, tokens):
    """Two tokens have each other; of ten a third would meet themselves in the order that is drawn."""
    words, ids = drawn(tokens, L=4, K=1, E=64)
    each = np.arange(tokens)[:, None, None] + np.zeros_like(ids[0])  # no two tokens have an expert in common
    found = between(tmp_path, words, [each + 1], [each + 1])
    assert found["slot_change_of_other_tokens"] == 1 and found["ok"], found["verdict"]


def test_ids_beyond_their_own_site_and_numbers_that_wrapped(tmp_path):
    tokens, ids = drawn(45, 45)
    batch, sites = np.stack(ids), ["a.0.gate", "a.1.gate", "a.2.gate"]
    RoutedExperts(batch, sites, [8, 8, 16], tokens=np.array(tokens)).save(tmp_path / "old.safetensors")
    new = lines(tmp_path / "new.jsonl", [put(ids[0], (3, 0, 0), 12).tolist(), ids[1].tolist()], tokens)
    found = compared(CompareOptions(tmp_path / "old.safetensors", new))
    assert names(found) == ["ids out of range"] and "1 row with ids that are not 0..7" in found["findings"][0]["text"]
    wrapped = put(batch, (0, slice(5)), -1).astype(np.uint8)
    two = files(tmp_path, tokens=np.array(tokens), routed_experts=(batch, wrapped))
    with pytest.raises(DriftError, match=r"new\.npz: sequence 0 has id 255, the largest uint8: a -1 that wrapped"):
        compared(CompareOptions(*two))
    assert "ids out of range" in names(compared(CompareOptions(*two, experts=8)))


def test_base64_without_a_shape_is_read_in_one_way_or_refused(tmp_path):
    def given(name, rows, tokens):
        raw = [base64.b64encode(x.astype("<i4").tobytes()).decode() for x in rows]
        return lines(tmp_path / name, raw, tokens)

    tokens, ids = drawn(60, 45, L=4, K=8, E=32)
    whole = given("whole.jsonl", ids, tokens)
    found = compared(CompareOptions(whole, given("less.jsonl", [x[:-1] for x in ids], tokens), top_k=8))
    assert (found["compared"], found["change"]["slot"]["of"]) == (103, 103 * 4 * 8)
    assert "OLD: base64 of int32 was read as 4 layers of 8 experts (--top-k)" in found["findings"][0]["text"]
    for wrong in (4, 2):
        found = compared(CompareOptions(whole, whole, top_k=wrong))
        assert names(found) == ["sets cut in parts"] and "(--top-k 8)" in found["findings"][-1]["text"]
    nested = lines(tmp_path / "nested.jsonl", [x.tolist() for x in ids], tokens)
    with pytest.raises(DriftError, match=r"--top-k 4: .*nested\.jsonl has 8 experts for a token"):
        compared(CompareOptions(whole, nested, top_k=4))
    words, five = drawn(5, L=4, K=8, E=32)
    either = given("five.jsonl", five, words)  # 5 rows of 4 layers, or 4 rows of 5
    with pytest.raises(DriftError, match=r"line 1: 160 ids may be of \[4, 5\] layers"):
        compared(CompareOptions(either, either, top_k=8))
    assert read_capture(either, 8, likely=(4, 9)).shape() == (4, 8), "check-routes knows the layers of its model"


def test_padding_is_named_taken_out_and_known_where_a_mask_hid_it(tmp_path):
    tokens, ids = drawn(45, 45)
    _, padding = drawn(15, 15, 15, 15, seed=1)
    wide = np.pad(np.array(tokens), ((0, 0), (0, 15)))
    both = [np.stack([np.concatenate([x, padding[2 * i + b]]) for b, x in enumerate(ids)]) for i in (0, 1)]
    two = files(tmp_path, tokens=wide, routed_experts=both)
    bare = compared(CompareOptions(*two))
    assert not bare["ok"] and "--pad-token-id 0" in bare["findings"][0]["text"]
    found = compared(CompareOptions(*two, pad_token_id=0))
    assert (found["compared"], found["change"]["slot"]["changed"]) == (90, 0)
    assert found["findings"][0]["text"] == "OLD: --pad-token-id 0 took out 30 tokens"
    with pytest.raises(DriftError, match="--pad-token-id: at least 0, got -1"):
        compared(CompareOptions(*two, pad_token_id=-1))
    hidden = hide(torch.from_numpy(wide), torch.arange(60) < 45)
    sites = ["a.0.gate", "a.1.gate", "a.2.gate"]
    for path, one in zip(two, both, strict=True):
        routes = RoutedExperts(one, sites, 8)
        routes = routes._with(routes.packed, hidden.int())
        routes.save(path.with_suffix(".safetensors"))
        again = RoutedExperts.load(path.with_suffix(".safetensors"))
        assert again.attended.sum() == 90 and torch.equal(again.tokens, torch.from_numpy(wide).int())
    known = [path.with_suffix(".safetensors") for path in two]
    for pad in (None, 0, tokens[0][-1]):  # the last token may end a response and be what pads, too
        found = compared(CompareOptions(*known, pad_token_id=pad))
        assert (found["tokens"], found["compared"], found["change"]["slot"]["changed"]) == (90, 90, 0)
        assert pad is None or found["findings"][0]["text"].endswith("--pad-token-id nothing")


def test_padding_of_one_sequence_is_named_where_there_is_a_fault_and_advice_is_of_what_the_file_takes(tmp_path):
    tokens, ids = drawn(60, 45)
    wide = np.array([tokens[0], tokens[1] + [0] * 15])
    both = [np.stack([ids[0], np.concatenate([ids[1], *drawn(15, seed=seed)[1]])]) for seed in (1, 2)]
    found = compared(CompareOptions(*files(tmp_path, tokens=wide, routed_experts=both)))
    assert names(found) == ["parts not told apart"]
    assert found["findings"][0]["text"] == (
        "1 sequence begins or ends with a run of token 0, and these tokens count: if it is padding, give "
        "--pad-token-id 0"
    )
    found = compared(CompareOptions(*files(tmp_path, tokens=wide, routed_experts=both[:1] * 2)))
    assert found["ok"] and found["findings"] == []
    found = comparison(tmp_path, *([x.tolist() for x in one] for one in both), wide.tolist())
    assert found["findings"][0]["text"].endswith("if it is padding, write .jsonl without it")


def test_intervals_are_over_prompts_or_sequences_of_other_tokens(tmp_path):
    """Each sequence ten times says no more than once; four responses to two prompts are two clusters."""
    tokens, ids = drawn(60, 45)
    new = [put(x, (slice(0, 5 + 9 * b), 0), ids[0][7, 0]) for b, x in enumerate(ids)]
    once, often = between(tmp_path, tokens, ids, new), between(tmp_path, tokens * 10, ids * 10, new * 10)
    assert (once["clusters"], often["clusters"]) == (2, 2)
    assert often["change"]["site"]["high"] == pytest.approx(once["change"]["site"]["high"])
    tokens, ids = drawn(30, 30, 30, 30)
    rows = [
        {"prompt_token_ids": [b // 2, 1], "token_ids": words, "routed_experts": x.tolist()}
        for b, (words, x) in enumerate(zip(tokens, [np.concatenate([x, x[:2]]) for x in ids], strict=True))
    ]
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = compared(CompareOptions(tmp_path / "x.jsonl", tmp_path / "x.jsonl"))
    assert (found["clusters"], found["clusters_are_prompts"]) == (2, True) and ("one file", False) in said(found)


def test_layers_of_zeros_in_both_files_and_files_that_hold_nothing(tmp_path):
    tokens, ids = drawn(45, 45)
    dark = [put(x, (slice(None), 1), 0) for x in ids]
    found = between(tmp_path, tokens, dark, dark)
    assert found["findings"][0]["text"].startswith("layers [1] are all zeros (or -1) in both files: dense, or not capt")
    empty = RoutedExperts(np.zeros((0, 5, 1, 2), int), ["gate"], 8, tokens=np.zeros((0, 5), int))
    empty.save(tmp_path / "x.safetensors")
    (tmp_path / "x.pt").write_bytes(b"")
    torch.save({"samples": [{"tokens": [1, 2], "rollout_routed_experts": None}]}, tmp_path / "none.pt")
    np.savez(tmp_path / "x.npz", tokens=np.array(tokens), routed_experts=np.zeros((2, 45, 3, 0), int))
    nothing = lines(tmp_path / "x.jsonl", [ids[0].tolist(), None], tokens)
    known = tmp_path / "new.jsonl"
    for path, why in (
        (tmp_path / "x.safetensors", "holds no sequence"),
        (tmp_path / "x.pt", "damaged .*EOFError"),
        (tmp_path / "none.pt", "sample 0 has no rollout_routed_experts: .*--use-rollout-routing-replay"),
        (tmp_path / "x.npz", "3 layers and 0 experts for a token: there are none"),
        (nothing, "line 2: .*no routes: routed_experts are None"),
        (tmp_path, "is a folder; name a file"),
    ):
        with pytest.raises(DriftError, match=why):
            compared(CompareOptions(path, known))
