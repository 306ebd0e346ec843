"""Captured routes against the model's: every fault that engines were seen to make, injected and named."""

import tracemalloc

import numpy as np
import pytest
import torch

from moe_rl.drift.captured import Captured, OwnRoutes
from moe_rl.drift.route_check import check_routes
from moe_rl.routing.arrays import pad_left_aligned

L, K, E, HIDDEN = 3, 2, 16, 4  # of four hidden layers the first is dense
SITES = tuple(f"model.layers.{i}.mlp.gate" for i in (1, 2, 3))
LENGTHS = (60, 45, 52)


def noisy(ids, share, rng):
    """One slot of a share of the rows goes to another expert, as rounding does."""
    ids = ids.copy()
    for at in zip(*np.nonzero(rng.random(ids.shape[:2]) < share), strict=True):
        free = [e for e in range(E) if e not in ids[at]]
        ids[at][rng.integers(K)] = rng.choice(free)
    return ids


def model_of(ids, floor, experts=E, layers=None, depth=None):
    """What a model chose for sequences, of sites in every layer or in these."""
    L = ids[0].shape[1]
    layers = tuple(range(L)) if layers is None else layers
    names = tuple(f"model.layers.{i}.mlp.gate" for i in layers)
    padded = (pad_left_aligned([torch.from_numpy(x) for x in some], -1).numpy() for some in (ids, floor))
    return OwnRoutes(*padded, names, (experts,) * L, layers, depth or L)


@pytest.fixture(scope="module")
def own():
    rng = np.random.default_rng(0)
    popular = np.linspace(3, 1, E) / np.linspace(3, 1, E).sum()  # some experts are chosen more often
    ids = [
        np.array([[rng.choice(E, K, replace=False, p=popular) for _ in range(L)] for _ in range(n)]) for n in LENGTHS
    ]
    return model_of(ids, [noisy(x, 0.04, rng) for x in ids], layers=(1, 2, 3), depth=HIDDEN)


def capture(own, change=lambda ids, b: ids, layers=(1, 2, 3), depth=HIDDEN, noise=0.04, sites=None):
    """As vLLM returns it: all hidden layers, dense ones zero, no row of the last token."""
    rng = np.random.default_rng(1)
    found = []
    for b, n in enumerate(LENGTHS):
        rows = np.zeros((n - 1, depth, K), np.int32)
        rows[:, list(layers)] = noisy(own.ids[b, :n], noise, rng)[:-1]
        found.append(change(rows, b))
    return Captured([np.arange(n) for n in LENGTHS], found, sites)


def faults(result):
    return [finding.name for finding in result.faults]


@pytest.mark.parametrize("noise", [0.0, 0.04, 0.1])
def test_what_arithmetic_explains_is_no_fault(own, noise):
    result = check_routes(capture(own, noise=noise), own)
    assert faults(result) == [], result.verdict
    assert result.verdict.startswith("These agree with the model's routes")
    assert result.unseen == pytest.approx(1 - np.mean([row.limit for row in result.rows]))
    assert f"less than {100 * result.unseen:.1f} % of slots" in result.verdict
    assert result.as_captured == pytest.approx(1 - noise / K, abs=0.02)
    assert result.chance < 0.4 and all(row.fits for row in result.rows)


def dark(layer):
    def change(ids, b):
        ids[:, layer] = 0
        return ids

    return change


def shift(by):
    return lambda ids, b: np.roll(ids, by, axis=0)


def physical(ids, b):
    for layer in (1, 2, 3):
        ids[:, layer] = np.random.default_rng(layer).permutation(E)[ids[:, layer]]
    return ids


def redundant(ids, b):
    ids[:, 1:] = np.where(np.random.default_rng(b).random(ids[:, 1:].shape) < 0.5, ids[:, 1:] + E, ids[:, 1:])
    return ids


def twice(ids, b):
    ids[5, 2] = 7
    return ids


def beyond(ids, b):
    ids[3, 1, 0] = 99
    return ids


def hits(kind):
    def change(ids, b):
        if b == 0 or kind == "zeros in the middle":
            return ids
        if kind == "left out":
            return ids[16:]
        if kind == "zeros":
            ids[:16] = 0
        else:
            ids[:16, 1:] = np.random.default_rng(b).permuted(np.tile(np.arange(E), (16, L, 1)), axis=-1)[..., :K]
        return ids

    return change


def middle(ids, b):
    ids[20:23] = 0
    return ids


INJECTED = {
    "all zeros": ("all zeros", {"change": lambda ids, b: ids * 0}),
    "one layer zero": ("all zeros", {"change": dark(2)}),
    "more columns": ("wrong shape", {"change": lambda ids, b: np.concatenate([ids, ids[..., :1]], -1)}),
    "fewer columns": ("wrong shape", {"change": lambda ids, b: ids[..., :1]}),
    "more rows": ("wrong shape", {"change": lambda ids, b: np.concatenate([ids, ids[:4]])}),
    "cut off": ("wrong shape", {"change": lambda ids, b: ids[:-9] if b == 1 else ids}),
    "fewer layers": ("wrong shape", {"change": lambda ids, b: ids[:, :2]}),
    "one token late": ("shifted by one token", {"change": shift(1)}),
    "one token early": ("shifted by one token", {"change": shift(-1)}),
    "two tokens late": ("shifted by 2 tokens", {"change": shift(2)}),
    "layers swapped": ("layers permuted", {"layers": (1, 3, 2)}),
    "layers reversed": ("layers permuted", {"layers": (3, 2, 1)}),
    "dense layers left out": ("dense layers left out", {"layers": (0, 1, 2)}),
    "physical ids": ("physical ids", {"change": physical}),
    "redundant experts": ("physical ids", {"change": redundant}),
    "duplicates": ("duplicates", {"change": twice}),
    "ids out of range": ("ids out of range", {"change": beyond}),
    "cache hits: rows left out": ("prefix-cache hits without routes", {"change": hits("left out")}),
    "cache hits: zeros": ("prefix-cache hits without routes", {"change": hits("zeros")}),
    "cache hits: of others": ("prefix-cache hits without routes", {"change": hits("others")}),
    "zeros in the middle": ("tokens without routes", {"change": middle}),
    "other weights": ("other choices", {"noise": 0.6}),
}


@pytest.mark.parametrize("fault", INJECTED)
@pytest.mark.parametrize("noise", [0.0, 0.04])
def test_every_fault_is_named_and_nothing_else_is(own, fault, noise):
    name, how = INJECTED[fault]
    result = check_routes(capture(own, **{"noise": noise, **how}), own)
    also = {"redundant experts": {"ids out of range"}, "cut off": set()}.get(fault, set())
    assert set(faults(result)) - also == {name}, (result.verdict, result.findings)
    assert name in result.verdict and result.verdict.startswith("These are not the model's routes")


def test_a_shift_is_undone_and_says_how_much_agrees_then(own):
    result = check_routes(capture(own, shift(1), noise=0.0), own)
    assert result.shift == -1
    assert "row t holds the routes of token t-1" in result.findings[0].text
    assert result.as_captured < 0.4 and result.explained == 1.0
    assert "100.0 % once that is undone" in result.verdict


def test_the_permutation_and_the_renaming_are_told(own):
    permuted = check_routes(capture(own, layers=(1, 3, 2), noise=0.0), own)
    assert permuted.findings[0].text == f"{SITES[1]} is captured layer 3, not 2; {SITES[2]} is captured layer 2, not 3"
    assert [row.layer for row in permuted.rows] == [1, 3, 2]
    table = np.random.default_rng(1).permutation(E)
    renamed = check_routes(capture(own, physical, noise=0.0), own).findings[0].text
    first = next(e for e in range(E) if table[e] != e and table[e] == min(t for i, t in enumerate(table) if t != i))
    assert f"{table[first]} is expert {first}" in renamed


@pytest.mark.parametrize("turned", [0, 1])
def test_another_models_routes_are_not_the_models_in_disguise(turned):
    """Each layer has four experts that it prefers, whatever the token; `turned`: those of the next layer. Layers in
    another order, or ids renamed to the preferred ones, then agree with other tokens' routes as well."""

    def drawn(rng, turned):
        weights = [np.where(np.arange(E) // 4 == layer % 4, 4.0, 1.0) for layer in range(L)]
        chances = [w / w.sum() for w in (*weights[turned:], *weights[:turned])]
        return [np.array([[rng.choice(E, K, replace=False, p=p) for p in chances] for _ in range(n)]) for n in LENGTHS]

    ids = drawn(np.random.default_rng(0), 0)
    model = model_of(ids, ids)
    other = Captured([np.arange(n) for n in LENGTHS], drawn(np.random.default_rng(1), turned))
    result = check_routes(other, model)
    assert faults(result) == ["other choices"], result.verdict
    assert result.explained == pytest.approx(result.as_captured) == pytest.approx(result.chance, abs=0.05)


def test_two_faults_are_both_named(own):
    def change(ids, b):
        ids = np.roll(ids, 1, axis=0)
        ids[7, 1] = 3
        return ids

    assert set(faults(check_routes(capture(own, change), own))) == {"duplicates", "shifted by one token"}
    both = check_routes(capture(own, shift(1), layers=(2, 1, 3)), own)
    assert set(faults(both)) == {"shifted by one token", "layers permuted"}


def test_routed_layers_alone_and_names_in_another_order_are_fine(own):
    alone = check_routes(capture(own, lambda ids, b: ids[:, 1:]), own)
    assert faults(alone) == []
    assert [(f.name, f.fault) for f in alone.findings] == [("dense layers left out", False)]
    named = capture(own, lambda ids, b: ids[:, [3, 1, 2]], sites=(SITES[2], SITES[0], SITES[1]))
    assert faults(check_routes(named, own)) == []
    wrong = capture(own, lambda ids, b: ids[:, [3, 1, 2]], sites=SITES)
    assert faults(check_routes(wrong, own)) == ["layers permuted"]


def test_live_rows_and_the_last_token_are_no_faults(own):
    def change(ids, b):
        ids[4:6] = -1
        return np.concatenate([ids, np.zeros_like(ids[:1])])  # zeros for the token that was never fed back

    result = check_routes(capture(own, change), own)
    assert faults(result) == []
    assert [f.name for f in result.findings] == ["live rows"]


@pytest.mark.parametrize(("value", "named"), [(0, [("tokens without routes", True)]), (-1, [("live rows", False)])])
def test_a_token_that_lacks_a_route_at_one_layer_is_no_other_choice(own, value, named):
    def change(ids, b):
        ids[10:30, 2] = value
        return ids

    result = check_routes(capture(own, change), own)
    assert [(f.name, f.fault) for f in result.findings] == named
    assert "first sequence 0, token 10" in result.findings[0].text
    assert result.tokens == sum(LENGTHS) - len(LENGTHS) * 21 and result.as_captured > 0.95


@pytest.mark.parametrize(("renamed", "tokens"), [(False, 48), (True, 192)])
def test_what_is_said_eight_times_fits_no_renaming_by_heart(renamed, tokens):
    """A group of eight responses to one prompt, all alike: each token's routes are in both halves of the rows."""
    rng = np.random.default_rng(0)
    ids, other = (np.argsort(rng.random((tokens, 4, 64)), -1)[..., :6] for _ in range(2))
    model = model_of([ids] * 8, [ids] * 8, experts=64)
    given = rng.permutation(64)[ids] if renamed else other
    result = check_routes(Captured([np.arange(tokens)] * 8, [given] * 8), model)
    assert faults(result) == ["physical ids" if renamed else "other choices"], result.verdict


def test_zeros_of_one_slot_are_no_route_at_many_sites(own):
    """Twelve sites of one expert: three tokens of zeros in each sequence."""
    ids = [np.random.default_rng(n).integers(0, E, (n, 12, 1)) for n in LENGTHS]
    model = model_of(ids, ids)
    rows = [x.copy() for x in ids]
    for x in rows:
        x[20:23] = 0
    result = check_routes(Captured([np.arange(n) for n in LENGTHS], rows), model)
    assert faults(result) == ["tokens without routes"] and result.as_captured == 1


def test_of_a_file_without_any_route_nothing_agrees():
    """Of top-1 zeros may be expert 0, and this model chooses it everywhere."""
    model = model_of([np.zeros((9, 2, 1), int)], [np.zeros((9, 2, 1), int)])
    result = check_routes(Captured([np.arange(9)], [np.full((9, 2, 1), -1)]), model)
    assert faults(result) == ["tokens without routes"] and result.tokens == 0


def test_floats_are_refused(own):
    with pytest.raises(ValueError, match=r"expected integer ids .* got \['float64 \["):
        check_routes(capture(own, lambda ids, b: ids.astype(float)), own)


@pytest.mark.parametrize("id_", [4095, 60_000, 2**40])
def test_one_corrupt_id_costs_neither_memory_nor_the_explanation(own, id_):
    """What is searched grows with the ids that occur, not with the largest."""

    def change(ids, b):
        ids = np.roll(ids.astype(np.int64), 1, axis=0)
        ids[5, 1, 0] = id_
        return ids

    tracemalloc.start()
    result = check_routes(capture(own, change), own)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert set(faults(result)) == {"shifted by one token", "ids out of range"}
    assert f"first sequence 0, token 5, layer 1: [{id_}, " in result.findings[0].text
    assert most < 4e6
