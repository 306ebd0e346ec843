"""moe-rl compare-routes: two captures of the same tokens, by hand and with every fault injected."""

import json
import math

import numpy as np
import pandas as pd
import pytest
from drift_models import FORMS, LENGTHS, refused, write

from moe_rl.cli import main
from moe_rl.drift.compare import compared
from moe_rl.drift.errors import DriftError
from moe_rl.drift.options import CompareOptions
from moe_rl.routing import RoutedExperts

TOKENS = [[5, 6, 7], [8, 9]]
OLD = [
    [[[0, 1], [1, 2]], [[2, 3], [0, 3]], [[0, 2], [1, 3]]],
    [[[1, 3], [2, 3]], [[0, 3], [0, 1]]],
]  # two sequences of 3 and 2 tokens, two sites, two of four experts


def changed():
    """One slot of sequence 0, token 1, site 0 went from expert 2 to expert 0; slots of token 0 in another order."""
    new = json.loads(json.dumps(OLD))
    new[0][1][0], new[0][0][0] = [3, 0], [1, 0]
    return new


def lines(path, routes, tokens=TOKENS, **more):
    rows = [{"tokens": t, "routed_experts": r} for t, r in zip(tokens, routes, strict=True)]
    for name, values in more.items():
        rows = [{**row, name: value} for row, value in zip(rows, values, strict=True)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def comparison(path, old, new, tokens=TOKENS, **options):
    files = lines(path / "old.jsonl", old, tokens), lines(path / "new.jsonl", new, tokens)
    return compared(CompareOptions(*files, **options))


def names(results):
    return [found["name"] for found in results["findings"] if found["fault"]]


def test_one_slot_of_twenty_by_hand(tmp_path):
    found = comparison(tmp_path, OLD, changed(), experts=4)
    assert found["ok"] and names(found) == [], found["verdict"]
    assert (found["sequences"], found["tokens"], found["compared"], found["experts_per_token"]) == (2, 5, 5, 2)
    (note,) = (finding["text"] for finding in found["findings"] if finding["name"] == "few tokens")
    assert note == "NEW against OLD: 5 tokens can be compared: too few to be sure"
    rates = {level: (row["changed"], row["of"]) for level, row in found["change"].items()}
    assert rates == {"slot": (1, 20), "site": (1, 10), "token": (1, 5)}
    # changed tokens 1 of 3 and 0 of 2: residuals 0.4 and -0.4, error 0.4 / 2.5 a token, four slots a token, t = 12.706
    assert found["change"]["slot"]["low"] == 0
    assert found["change"]["slot"]["high"] == pytest.approx(0.05 + 12.7062 * 0.4 / 2.5 / 4, rel=1e-4)
    assert [(row["site"], row["slots_changed"], row["slots"]) for row in found["by_site"]] == [
        ("layer 0", 1, 10),
        ("layer 1", 0, 10),
    ]
    # site 0 gives its experts 3, 2, 2, 3 slots, then 4, 2, 1, 3; site 1 always 2, 3, 2, 3; the even load is 2.5
    assert [row["max_vio_old"] for row in found["by_site"]] == pytest.approx([0.2, 0.2])
    assert [row["max_vio_new"] for row in found["by_site"]] == pytest.approx([0.6, 0.2])
    even = -2 * (0.3 * math.log(0.3) + 0.2 * math.log(0.2))
    assert found["loads"]["old"]["load_entropy_mean"] == pytest.approx(even)
    first = -sum(p * math.log(p) for p in (0.4, 0.2, 0.1, 0.3))
    assert found["loads"]["new"] == pytest.approx(
        {"max_vio_mean": 0.4, "max_vio_max": 0.6, "load_entropy_mean": (first + even) / 2, "load_entropy_min": first}
    )


def test_without_a_number_of_experts_loads_are_left_out_and_that_is_said(tmp_path):
    found = comparison(tmp_path, OLD, changed())
    assert found["loads"] is None and found["loads_left_out"].endswith("(--experts)")
    assert "max_vio_old" not in found["by_site"][0] and found["change"]["slot"]["changed"] == 1


@pytest.mark.parametrize("form", FORMS)
def test_every_kind_of_file_holds_the_same_routes(place, tmp_path, form):
    (tmp_path / "a").mkdir()
    files = write(place, tmp_path / "a", "npz"), write(place, tmp_path, form)
    found = compared(CompareOptions(*files, top_k=2))
    assert names(found) == [] and found["change"]["slot"]["changed"] == 0
    lost = 2 if form in ("lines", "base64", "vllm", "slime") else 0  # the last token was never fed back
    assert found["compared"] == sum(LENGTHS) - lost and found["without_route"] == {"old": 0, "new": lost}
    assert len(found["by_site"]) == 2, "the dense layer is left out"
    named = form in ("own", "parquet")
    assert found["by_site"][0]["site"] == ("model.layers.1.mlp.gate" if named else "layer 1")
    assert found["experts"] == ([8, 8] if named else None)


@pytest.fixture(scope="module")
def long():
    """Tokens and routes of two sequences, three layers, two of eight experts."""
    rng = np.random.default_rng(0)
    ids = [np.array([[rng.choice(8, 2, replace=False) for _ in range(3)] for _ in range(n)]) for n in (60, 45)]
    return [rng.integers(0, 50, len(x)).tolist() for x in ids], ids


def renamed(ids):
    return np.stack([np.random.default_rng(layer).permutation(8)[ids[:, layer]] for layer in range(3)], 1)


def put(ids, place, value):
    ids = ids.copy()
    ids[place] = value
    return ids


INJECTED = {
    "shifted by one token": (lambda ids: np.roll(ids, 1, 0), "NEW against OLD: row t holds the routes of token t-1"),
    "layers permuted": (lambda ids: ids[:, [1, 0, 2]], "NEW against OLD: layer 0 is captured layer 1, not 0"),
    "physical ids": (renamed, "NEW against OLD: ids are renamed one by one"),
    "duplicates": (lambda ids: put(ids, (5, 2), 3), "NEW: 2 rows with an expert twice, first sequence 0, token 5"),
    "ids out of range": (lambda ids: put(ids, (5, 2, 0), 99), "NEW: 2 rows with ids that are not 0..7, first sequence"),
}


@pytest.mark.parametrize("fault", INJECTED)
def test_every_fault_is_named_with_its_side_and_is_no_change_of_routing(tmp_path, long, fault):
    tokens, ids = long
    change, text = INJECTED[fault]
    found = comparison(tmp_path, [x.tolist() for x in ids], [change(x).tolist() for x in ids], tokens, experts=8)
    assert names(found) == [fault] and text in found["findings"][0]["text"] and not found["ok"]
    assert found["verdict"].startswith(f"This is no change of routing: {fault}. As they stand, ")
    if fault in ("shifted by one token", "layers permuted", "physical ids"):
        undone = None if fault == "physical ids" else 0  # ids are renamed on a part: no number
        assert found["slot_change_once_undone"] == undone and found["change"]["slot"]["rate"] > 0.3


@pytest.mark.parametrize("side", ["OLD", "NEW"])
def test_zeros_are_no_routes_whichever_side_they_are_on(tmp_path, long, side):
    tokens, ids = long
    whole, zeros = [x.tolist() for x in ids], [(0 * x).tolist() for x in ids]
    found = comparison(tmp_path, *((zeros, whole) if side == "OLD" else (whole, zeros)), tokens)
    assert names(found) == ["all zeros"] and found["findings"][0]["text"].startswith(f"{side}: no layer of any token")
    assert (found["compared"], found["change"], found["ok"]) == (0, None, False)
    assert found["without_route"][side.lower()] == 105 and found["verdict"].startswith("Nothing can be compared")
    layer = [put(x, (slice(None), 1), 0).tolist() for x in ids]
    found = comparison(tmp_path, *((layer, whole) if side == "OLD" else (whole, layer)), tokens)
    assert names(found) == ["layers without routes"] and "[1] in one file only" in found["findings"][0]["text"]
    assert [row["site"] for row in found["by_site"]] == ["layer 0", "layer 2"]
    assert found["change"]["slot"]["changed"] == 0 and found["verdict"].endswith("Left out: layers without routes.")


def test_missing_routes_are_counted_and_equal_nothing(tmp_path, long):
    """OLD has no row of the last tokens, and -1 for one; NEW no rows of the first ten tokens of the second sequence,
    and zeros for the first three of the first. What is missing on one side is missing on no other."""
    tokens, ids = long
    old = [put(x, 20, -1)[:-1].tolist() if b == 0 else x[:-1].tolist() for b, x in enumerate(ids)]
    new = [put(ids[0], slice(3), 0).tolist(), ids[1][10:].tolist()]
    found = comparison(tmp_path, old, new, tokens)
    assert found["without_route"] == {"old": 3, "new": 13} and found["compared"] == 105 - 16
    assert found["change"]["slot"] == {"rate": 0, "low": 0, "high": 0, "changed": 0, "of": 89 * 6}
    said = [(f["name"], f["text"].split(":")[0], f["fault"]) for f in found["findings"]]
    assert said == [
        ("live rows", "OLD", False),
        ("prefix-cache hits without routes", "NEW", True),
        ("prefix-cache hits without routes", "NEW", True),
    ]
    assert not found["ok"] and found["verdict"].endswith("Left out: prefix-cache hits without routes.")


def test_a_sequence_of_which_nothing_is_compared_is_no_cluster(tmp_path):
    found = comparison(tmp_path, OLD, [OLD[0], [[[-1, -1]] * 2] * 2])
    assert (found["compared"], found["clusters"]) == (3, 1)
    assert found["change"]["slot"] == {"rate": 0, "low": None, "high": None, "changed": 0, "of": 12}


def test_routes_of_other_tokens_are_no_change_of_routing(tmp_path, long):
    """All of them, the first or last tokens of a sequence, a whole sequence, one site: in the rates, and a fault."""
    tokens, ids = long
    old = [x.tolist() for x in ids]
    found = comparison(tmp_path, old, [np.random.default_rng(1).permutation(x).tolist() for x in ids], tokens)
    assert names(found) == ["not told apart"]
    assert found["verdict"].startswith("Nothing shows that these are of the same tokens and layers. As they stand, ")
    parts = {
        "sequence 0, tokens 0 to 8": [put(ids[0], slice(15), ids[1][20:35]), ids[1]],
        "sequence 0, tokens 44 to 51": [put(ids[0], slice(40, 60), ids[1][20:40]), ids[1]],
        "sequence 1, tokens 0 to 8": [ids[0], ids[0][10:55]],
        "layer 1": [np.stack([x[:, 0], np.roll(x[:, 1], 1, 0), x[:, 2]], 1) for x in ids],
    }
    for where, new in parts.items():
        found = comparison(tmp_path, old, [x.tolist() for x in new], tokens)
        assert names(found) == ["parts not told apart"] and f": {where}: " in found["findings"][0]["text"], where
        assert found["verdict"].startswith("Nothing shows that all of these are of the same tokens and layers. As")
        assert found["compared"] == 105


def test_sites_are_compared_by_name(tmp_path):
    ids, tokens = np.array([OLD[0]]), np.array([TOKENS[0]])
    RoutedExperts(ids, ["a.0.gate", "a.1.gate"], 4, tokens=tokens).save(tmp_path / "old.safetensors")
    RoutedExperts(ids[:, :, ::-1].copy(), ["a.1.gate", "a.0.gate"], 4, tokens=tokens).save(tmp_path / "new.safetensors")
    found = compared(CompareOptions(tmp_path / "old.safetensors", tmp_path / "new.safetensors"))
    assert found["change"]["slot"]["changed"] == 0 and found["experts"] == [4, 4] and found["loads"]
    with pytest.raises(DriftError, match="the files and --experts name different numbers of experts: 4 and 6"):
        compared(CompareOptions(tmp_path / "old.safetensors", tmp_path / "new.safetensors", experts=6))
    RoutedExperts(ids, ["a.0.gate", "b.1.gate"], 4, tokens=tokens).save(tmp_path / "new.safetensors")
    with pytest.raises(DriftError, match=r"site a\.1\.gate is only in .*old\.safetensors \(one of 2\)"):
        compared(CompareOptions(tmp_path / "old.safetensors", tmp_path / "new.safetensors"))


def test_log_probabilities_are_new_less_old(tmp_path, capsys):
    old = lines(tmp_path / "old.jsonl", OLD, logprobs=[[None, -1.0, -2.0], [None, -3.0]])
    new = lines(tmp_path / "new.jsonl", changed(), logprobs=[[None, -1.2, -2.0], [None, None]])
    found = compared(CompareOptions(old, new))["logprobs"]
    assert (found["tokens"], found["left_out"], found["outside_fraction"]) == (2, 1, 0.5)  # e^-0.2 = 0.82
    assert (found["log_ratio_mean"], found["gap_mean"]) == pytest.approx((-0.1, 0.1))
    assert found["k3"] == pytest.approx((math.exp(-0.2) - 1 + 0.2) / 2)
    with pytest.raises(SystemExit):
        main(["compare-routes", str(old), str(new)])
    assert "d = NEW - OLD over 2 tokens: mean |d| 0.1 nats, k3 0.00937, ratio e^d outside" in capsys.readouterr().out
    assert compared(CompareOptions(lines(tmp_path / "new.jsonl", OLD), old))["logprobs"] is None
    old = lines(tmp_path / "old.jsonl", OLD, logprobs=[[None, 0.0, -2.0], [None, 0.0]])
    new = lines(tmp_path / "new.jsonl", OLD, logprobs=[[None, 0.0, 0.0], [None, None]])
    found = compared(CompareOptions(old, new))["logprobs"]
    assert (found["tokens"], found["left_out"], found["zero_in_both"]) == (2, 1, 1)
    with pytest.raises(SystemExit):
        main(["compare-routes", str(old), str(new)])
    assert "  1 of these are exactly 0 in both files: filled in, of a prompt?" in capsys.readouterr().out


def test_what_is_written_and_the_exit_status(tmp_path, capsys):
    old, new = lines(tmp_path / "old.jsonl", OLD), lines(tmp_path / "new.jsonl", changed())
    with pytest.raises(SystemExit) as end:
        main(["compare-routes", str(old), str(new), "--experts", "4", "--output", str(tmp_path / "out")])
    said = capsys.readouterr().out
    assert end.value.code == 0
    assert said.startswith(
        "5 % of slots [0, 55.8], 10 % of sites [0, 100] and 20 % of tokens [0, 100] changed from OLD"
    )
    assert "Load of experts, NEW: MaxVio 0.4 (largest 0.6)" in said and "layer 0       5    10 %    20 %" in said
    written = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["compare.json", "sites.csv"]
    assert pd.read_csv(tmp_path / "out" / "sites.csv").to_dict("records") == written["by_site"]
    with pytest.raises(SystemExit) as end:
        main(["compare-routes", str(old), str(lines(new, [[[[0, 0]] * 2] * 3, [[[0, 0]] * 2] * 2])), "--json"])
    assert end.value.code == 1 and json.loads(capsys.readouterr().out)["findings"][0]["name"] == "all zeros"
    assert "is no earlier comparison" in refused(capsys, "compare-routes", old, new, "--output", tmp_path)


def test_files_that_do_not_go_together_are_one_message(tmp_path):
    old = lines(tmp_path / "old.jsonl", OLD)
    new = tmp_path / "new.jsonl"

    def fails(said, routes, tokens=TOKENS, **more):
        with pytest.raises(DriftError, match=said):
            compared(CompareOptions(old, lines(new, routes, tokens), **more))

    fails(r"new\.jsonl holds 1 sequence, .*old\.jsonl 2", OLD[:1], TOKENS[:1])
    fails(r"new\.jsonl: sequence 1, token 1 is 4, in .*old\.jsonl it is 9: are the", OLD, [[5, 6, 7], [8, 4]])
    fails(r"new\.jsonl: sequence 1 has 3 tokens, in .*old\.jsonl 2; if it is padding", OLD, [[5, 6, 7], [8, 9, 9]])
    wide = [[[[0, 1, 2]] * 2 for _ in rows] for rows in OLD]
    fails(r"new\.jsonl has 3 experts for a token, .*old\.jsonl 2", wide)
    fails(r"new\.jsonl has routes in 1 of 1 layers, .* in 2 of 2 layers", [[[x[0]] for x in rows] for rows in OLD])
    fails(r"new\.jsonl: expected integer ids .*layers and K alike", [OLD[0], [[[1, 3]], [[0, 3]]]])
    fails(r"new\.jsonl: sequence 1 has id -7; expected 0\.\.65534, or -1", [OLD[0], [OLD[1][0], [[0, -7], [1, 2]]]])
    fails("--experts: at least 1, got 0", OLD, experts=0)
    lines(old, [OLD[0][:1], OLD[1]])
    fails(r"sequence 0 has 1 rows for 3 tokens, in .*old\.jsonl 1: nothing says which", [OLD[0][:1], OLD[1]])
    with pytest.raises(DriftError, match="there is no file"):
        compared(CompareOptions(old, tmp_path / "x.npz"))
    new.write_text('{"tokens": [5, 6, 7], "routed_experts": "AAAAAA=="}')
    with pytest.raises(DriftError, match=r"new\.jsonl line 1: .*how many experts a token has: give --top-k"):
        compared(CompareOptions(old, new))
