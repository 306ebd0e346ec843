"""RoutedExperts: storage, alignment, files, tables, engine formats, and what each mistake is told."""

import base64
import copy
import json
import random
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_rl.routing.errors import RoutingError
from moe_rl.routing.packing import unpack_ids
from moe_rl.routing.routes import RoutedExperts, canonical_site, match_sites

SITES = ["model.layers.1.mlp.gate", "model.layers.2.mlp.gate"]


def random_ids(b: int, t: int, sites: int, k: int, experts: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(b, t, sites, experts, generator=torch.Generator().manual_seed(seed)).topk(k).indices


def example(tokens: bool = True) -> RoutedExperts:
    ids = random_ids(3, 4, 2, 2, 8)
    ids[2, 3] = -1
    return RoutedExperts(ids, SITES, 8, tokens=torch.arange(12).view(3, 4) if tokens else None, meta={"model": "tiny"})


# Storage


@pytest.mark.parametrize(
    ("num_experts", "dtype", "nbytes"),
    [(4, torch.uint8, 4), (255, torch.uint8, 4), (256, torch.uint16, 8), (512, torch.uint16, 8)],
)
def test_the_smallest_dtype_keeps_every_id_and_the_sentinel(num_experts, dtype, nbytes):
    # The largest ids are where an overflow shows: 254, 255 (the sentinel of uint8, so uint16 is needed), 511.
    ids = torch.tensor([[[[num_experts - 1, 0]], [[-1, -1]]]])
    routes = RoutedExperts(ids, ["gate"], num_experts)
    assert routes.packed.dtype == dtype
    assert routes.nbytes == nbytes
    assert torch.equal(routes.ids, ids)
    assert routes.ids.dtype == torch.int64


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 700).flatmap(lambda e: st.tuples(st.just(e), st.integers(1, min(e, 9)))),
    st.sampled_from([torch.int16, torch.int32, torch.int64]),
    st.integers(0, 9999),
)
def test_any_ids_come_back_from_every_integer_dtype(experts_and_k, dtype, seed):
    experts, k = experts_and_k
    ids = random_ids(2, 3, 2, k, experts, seed)
    ids[0, seed % 3, seed % 2] = -1
    assert torch.equal(RoutedExperts(ids.to(dtype), SITES, experts).ids, ids)
    assert torch.equal(RoutedExperts(ids.to(dtype).numpy(), SITES, experts).ids, ids)


def test_one_missing_id_makes_the_whole_row_live():
    routes = RoutedExperts(torch.tensor([[[[3, -1]], [[-1, 2]], [[0, 1]]]]), ["gate"], 4)
    assert routes.ids[0, :, 0].tolist() == [[-1, -1], [-1, -1], [0, 1]]
    assert routes.live[0, :, 0].tolist() == [True, True, False]
    assert routes.has_live
    assert not RoutedExperts(torch.tensor([[[[0, 1]]]]), ["gate"], 4).has_live


def test_a_trusted_object_with_known_liveness_asks_the_device_nothing():
    # has_live is given: it is believed, whatever the ids say.
    packed = torch.zeros(1, 1, 1, 1, dtype=torch.uint8)
    assert RoutedExperts._trusted(packed, ("gate",), 4, has_live=True).has_live


def test_sites_may_have_different_numbers_of_experts():
    routes = RoutedExperts(torch.tensor([[[[3], [299]]]]), ["small", "large"], [4, 300])
    assert routes.num_experts == (4, 300)
    assert routes.packed.dtype == torch.uint16
    assert routes.select("small").num_experts == 4
    with pytest.raises(RoutingError, match=r"site small.*names expert 4, expected 0\.\.3"):
        RoutedExperts(torch.tensor([[[[4], [299]]]]), ["small", "large"], [4, 300])


@pytest.mark.parametrize("num_experts", [np.int64(8), torch.tensor(8), np.array([8, 8]), torch.tensor([8, 8])])
def test_the_number_of_experts_may_be_a_scalar_of_numpy_or_torch(num_experts):
    routes = RoutedExperts(np.array([[[[3, 0], [1, 2]]]]), SITES, num_experts)
    assert routes.num_experts == 8 and type(routes.num_experts) is int


def test_slot_order_and_site_decoding_are_kept():
    routes = example()
    assert torch.equal(routes.site_ids(SITES[1]), routes.ids[:, :, 1])
    assert torch.equal(routes.site_ids(-1), routes.ids[:, :, 1])
    swapped = RoutedExperts(routes.ids.flip(-1), SITES, 8)
    assert not routes.equal(swapped)


def test_equal_looks_at_ids_sites_experts_and_known_tokens():
    routes = example()
    assert routes.equal(copy.deepcopy(routes))
    assert routes.equal(example(tokens=False)), "unknown tokens do not contradict known ones"
    assert not routes.equal(RoutedExperts(routes.ids, SITES, 9))
    assert not routes.equal(RoutedExperts(routes.ids, SITES[::-1], 8))
    assert not routes.equal(RoutedExperts(routes.ids, SITES, 8, tokens=torch.zeros(3, 4, dtype=torch.long)))
    assert not routes.equal(routes.rows([0, 1]))


def test_meta_is_a_copy():
    routes = example()
    routes.meta["model"] = "another"
    assert routes.meta == {"model": "tiny"}


def test_to_moves_ids_and_tokens():
    routes = example().to("meta")
    assert (routes.device.type, routes.tokens.device.type) == ("meta", "meta")
    assert routes.sites == tuple(SITES)


# Names


@pytest.mark.parametrize(
    "wrapped",
    [
        "model.layers.0.mlp.gate",
        "module.model.layers.0.mlp.gate",
        "_orig_mod.model.layers.0.mlp.gate",
        "module._orig_mod.model.layers.0.mlp.gate",
        "_orig_mod.module.model.layers.0.mlp.gate",
        "_fsdp_wrapped_module.model.layers.0._fsdp_wrapped_module.mlp.gate",
        "model.layers.0._checkpoint_wrapped_module.mlp.gate",
        "base_model.model.model.layers.0.mlp.gate",
        "module.base_model.model.model.layers.0.mlp.gate.base_layer",
        "base_model.model.model.layers.0.mlp.gate.base_layer.base_layer",
        "base_model.model.model.layers.0.mlp.gate.modules_to_save.default",
        "base_model.model.model.layers.0.mlp.gate.original_module",
        "model.layers.0._orig_mod.mlp.gate",
    ],
)
def test_wrappers_leave_no_trace_in_a_name(wrapped):
    assert canonical_site(wrapped) == "model.layers.0.mlp.gate"


def test_names_of_the_model_itself_stay():
    # `module` and `model` are only dropped where a wrapper puts them, and nothing is dropped to nothing.
    assert canonical_site("encoder.module.gate") == "encoder.module.gate"
    assert canonical_site("model.base_model.gate") == "model.base_model.gate"
    assert canonical_site("base_layer") == "base_layer"


def test_sites_are_stored_without_wrappers_and_two_names_of_one_site_are_refused():
    ids = torch.zeros(1, 1, 1, 1, dtype=torch.long)
    assert RoutedExperts(ids, ["module.a.gate"], 2).sites == ("a.gate",)
    with pytest.raises(RoutingError, match=r"site a\.gate is named twice"):
        RoutedExperts(ids.repeat(1, 1, 2, 1), ["a.gate.modules_to_save.default", "a.gate.original_module"], 2)


def test_sites_match_by_name_pattern_and_index():
    names = [f"layers.{i}.gate" for i in range(12)]
    assert match_sites(names, "layers.1.gate") == [1], "a name is not a prefix: 10 and 11 stay out"
    assert match_sites(names, "layers.1?.*") == [10, 11]
    assert match_sites(names, [-1, "module.layers.0.gate", 11]) == [11, 0], "each once, in the order asked for"
    with pytest.raises(RoutingError, match=r"no routing site matches 'layers\.1\.gat'.*'layers\.1\.gate'"):
        match_sites(names, "layers.1.gat")
    with pytest.raises(RoutingError, match="no routing site matches 12"):
        match_sites(names, 12)
    with pytest.raises(RoutingError, match="no routing site was asked for"):
        match_sites(names, [])


# Parts


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        (1, [1]),
        (-1, [2]),
        (slice(0, 2), [0, 1]),
        (slice(None, None, 2), [0, 2]),
        ([2, 0, 2], [2, 0, 2]),
        (torch.tensor([2, 1]), [2, 1]),
        (torch.tensor([True, False, True]), [0, 2]),
        ([False, True, True], [1, 2]),
        (torch.tensor([False] * 3), []),
        (slice(None, None, -1), [2, 1, 0]),
        ([], []),
        (np.array([2, 1]), [2, 1]),
        (torch.tensor([2, 1], dtype=torch.uint8), [2, 1]),  # ids of rows, which torch would take for a mask
    ],
)
def test_rows_takes_what_indexing_takes(index, expected):
    routes = example()
    part = routes.rows(index)
    assert torch.equal(part.ids, routes.ids[expected])
    assert torch.equal(part.tokens, routes.tokens[expected])
    assert part.has_live == (2 in expected)


@pytest.mark.parametrize("index", [3, [0, 7], torch.tensor([True, False])])
def test_rows_that_are_not_there_are_refused(index):
    with pytest.raises(RoutingError, match="B = 3"):
        example().rows(index)


def test_rows_works_where_torch_lacks_uint16_kernels():
    ids = random_ids(3, 2, 1, 2, 400)
    assert torch.equal(RoutedExperts(ids, ["gate"], 400).rows([2, 0]).ids, ids[[2, 0]])


def test_select_reorders_sites():
    routes = example()
    part = routes.select([1, 0])
    assert part.sites == (SITES[1], SITES[0])
    assert torch.equal(part.ids, routes.ids[:, :, [1, 0]])


def test_cat_undoes_rows():
    routes = example()
    assert RoutedExperts.cat([routes.rows(0), routes.rows([1, 2])]).equal(routes)


def test_cat_keeps_what_parts_agree_on():
    a = example()
    b = RoutedExperts(a.ids, SITES, 8, meta={"model": "tiny", "seed": 1})
    both = RoutedExperts.cat([a, b])
    assert both.meta == {"model": "tiny"}
    assert torch.equal(both.tokens, torch.cat([a.tokens, torch.full((3, 4), -1, dtype=torch.int32)]))
    with pytest.raises(RoutingError, match="T = 1, part 0 has 4"):
        RoutedExperts.cat([a, RoutedExperts(a.ids[:, :1], SITES, 8)])
    with pytest.raises(RoutingError, match="part 1 has other sites"):
        RoutedExperts.cat([a, RoutedExperts(a.ids, SITES[::-1], 8)])


# Alignment


@pytest.mark.parametrize("num_experts", [8, 300])
def test_left_padding_to_right_padding(num_experts):
    # Token ids double as expert ids, so that a route that goes astray from its token shows.
    tokens = torch.tensor([[0, 0, 5, 6], [0, 1, 2, 3]])
    left = torch.tensor([[False, False, True, True], [False, True, True, True]])
    ids = torch.where(left, tokens, -1)[:, :, None, None]
    routes = RoutedExperts(ids, ["gate"], num_experts, tokens=tokens)
    right = torch.tensor([[True, True, False], [True, True, True]])
    moved = routes.realign(left, right)
    assert moved.ids[..., 0, 0].tolist() == [[5, 6, -1], [1, 2, 3]]
    assert moved.tokens.tolist() == [[5, 6, -1], [1, 2, 3]]
    assert moved.has_live
    assert moved.realign(right, left).ids.tolist() == routes.ids.tolist()


def test_the_last_generated_token_has_no_route():
    # generate() on prompts of 2 gave 2 tokens: 4 tokens, 3 rows. Packed to another place, the last is -1.
    routes = RoutedExperts(torch.tensor([[[[1]], [[2]], [[3]]]]), ["gate"], 4, tokens=torch.tensor([[11, 12, 13]]))
    all_four = torch.ones(1, 4, dtype=torch.bool)
    moved = routes.realign(all_four, torch.tensor([[0, 1, 1, 1, 1]]))
    assert moved.ids.flatten().tolist() == [-1, 1, 2, 3, -1]
    assert moved.tokens.tolist() == [[-1, 11, 12, 13, -1]]


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10_000), st.sampled_from([5, 400]))
def test_realign_there_and_back_is_the_identity_on_routed_tokens(seed, num_experts):
    generator = torch.Generator().manual_seed(seed)
    here = torch.rand(3, 6, generator=generator) < 0.5
    there = torch.stack([torch.randperm(9, generator=generator) < n for n in here.sum(-1)])
    ids = random_ids(3, 6, 2, 3, num_experts, seed).masked_fill(~here[:, :, None, None], -1)
    routes = RoutedExperts(ids, SITES, num_experts)
    moved = routes.realign(here, there)
    assert torch.equal(moved.ids[there], ids[here])
    assert torch.equal(moved.live.all(-1), ~there)
    assert moved.realign(there, here).equal(routes)


def test_masks_that_do_not_fit_are_told_where():
    routes = example()
    ones = torch.ones(3, 4, dtype=torch.bool)
    fewer = ones.clone()
    fewer[1, 0] = False
    with pytest.raises(RoutingError, match="sequence 1 has 4 tokens in from_mask and 3 in to_mask"):
        routes.realign(ones, fewer)
    with pytest.raises(RoutingError, match=r"from_mask must be \[B,T\] = \[3,4\]"):
        routes.realign(torch.ones(3, 6, dtype=torch.bool), ones)
    with pytest.raises(RoutingError, match="to_mask must be"):
        routes.realign(ones, ones[:2])


# Mistakes


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.rand(1, 1, 2, 2), r"integers, got torch\.float32"),
        (torch.ones(1, 1, 2, 2, dtype=torch.bool), r"integers, got torch\.bool"),
        (torch.zeros(1, 2, 2, dtype=torch.long), r"\[B,T,L,K\].*got \[1, 2, 2\]"),
        (torch.zeros(1, 1, 3, 1, dtype=torch.long), "3 sites on axis 2, named: 2"),
        (torch.zeros(1, 1, 2, 0, dtype=torch.long), "no slots"),
        (torch.tensor([[[[0, 1], [2, 8]]]]), r"layers\.2.*sequence 0, token 0, slot 1 names expert 8, expected 0\.\.7"),
        (torch.tensor([[[[0, 1], [2, -2]]]]), "names expert -2.*below zero only -1"),
        (torch.tensor([[[[0, 1], [5, 5]]]]), r"layers\.2.*names an expert twice: \[5, 5\]"),
        (torch.full((1, 1, 2, 2), 255, dtype=torch.uint8), r"names expert 255.*sentinel of packed torch\.uint8"),
    ],
)
def test_wrong_ids_are_told_site_and_value(ids, message):
    with pytest.raises(RoutingError, match=message):
        RoutedExperts(ids, SITES, 8)


def test_a_fault_far_back_in_a_large_batch_is_found_at_its_place():
    # More ids than are checked at a time.
    ids = random_ids(1, 5000, 2, 2, 8).expand(70, -1, -1, -1).clone()
    ids[66, 4321, 1, 0] = 9
    with pytest.raises(RoutingError, match=r"sequence 66, token 4321, slot 0 names expert 9"):
        RoutedExperts(ids, SITES, 8)


@pytest.mark.parametrize(
    ("sites", "num_experts", "message"),
    [
        ([], 8, "no sites"),
        (SITES, 0, "positive"),
        (SITES, [8], "one int or 2"),
        (SITES, np.array([8.0, 8.5]), "got .8.  8.5."),
        (SITES, torch.tensor(8.0), "got 8.0"),
        (SITES, 70_000, "at most 65535"),
    ],
)
def test_wrong_sites_and_expert_numbers(sites, num_experts, message):
    with pytest.raises(RoutingError, match=message):
        RoutedExperts(torch.zeros(1, 1, 2, 1, dtype=torch.long), sites, num_experts)


@pytest.mark.parametrize("tokens", [torch.zeros(3, 5, dtype=torch.long), torch.zeros(3, 4)])
def test_wrong_tokens(tokens):
    with pytest.raises(RoutingError, match=r"tokens must be integers \[B,T\] = \[3, 4\]"):
        RoutedExperts(example().ids, SITES, 8, tokens=tokens)


# Files


@pytest.mark.parametrize("num_experts", [8, 300])
@pytest.mark.parametrize("with_tokens", [True, False])
def test_a_file_gives_back_everything(tmp_path, num_experts, with_tokens):
    ids = random_ids(2, 3, 2, 4, num_experts)
    ids[1, 2] = -1
    tokens = torch.arange(6).view(2, 3) if with_tokens else None
    routes = RoutedExperts(ids, SITES, num_experts, tokens=tokens, meta={"model": "tiny", "step": 3})
    path = tmp_path / "deep" / "routes.safetensors"
    routes.save(path)
    again = RoutedExperts.load(path)
    assert again.equal(routes)
    assert again.token_hash == routes.token_hash
    assert (again.tokens is None) == (not with_tokens)
    assert again.meta["model"] == "tiny"
    assert again.meta["step"] == 3
    assert set(again.meta["written_by"]) == {"moe_rl", "torch", "transformers"}
    assert [p.name for p in path.parent.iterdir()] == ["routes.safetensors"], "no temporary file stays"


def test_an_interrupted_save_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "routes.safetensors"
    example().save(path)
    before = path.read_bytes()

    def power_cut(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("moe_rl.files.os.fsync", power_cut)
    with pytest.raises(KeyboardInterrupt):
        example().rows([0]).save(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["routes.safetensors"]


def test_meta_that_is_not_json_is_refused(tmp_path):
    with pytest.raises(RoutingError, match="JSON values"):
        RoutedExperts(example().ids, SITES, 8, meta={"model": object()}).save(tmp_path / "x")


def rewrite_header(path, change):
    """Change the JSON header of a safetensors file, data untouched; as version 1 wrote it, without a checksum."""
    raw = path.read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + size])
    del header["__metadata__"]["sha256"]
    header["__metadata__"]["format_version"] = "1"
    change(header["__metadata__"])
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + size :])


def test_each_kind_of_wrong_file_has_its_own_message(tmp_path):
    path = tmp_path / "routes.safetensors"

    def fresh():
        example().save(path)
        return path.read_bytes()

    whole = fresh()
    for cut in (0, 5, 40, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(RoutingError, match=f"cut off or damaged, {cut} bytes"):
            RoutedExperts.load(path)
    path.write_text("sequence,position,site,expert\n0,0,gate,3\n")
    with pytest.raises(RoutingError, match="not a safetensors file"):
        RoutedExperts.load(path)
    with pytest.raises(RoutingError, match="is a folder"):
        RoutedExperts.load(tmp_path)
    from safetensors.torch import save_file

    save_file({"lm_head.weight": torch.zeros(2)}, path)
    with pytest.raises(RoutingError, match=r"not of routes.*model weights"):
        RoutedExperts.load(path)
    fresh()
    rewrite_header(path, lambda facts: facts.update(format_version="99"))
    with pytest.raises(RoutingError, match="format version 99, this moe_rl reads up to 2"):
        RoutedExperts.load(path)
    fresh()
    rewrite_header(path, lambda facts: facts.update(sites=json.dumps(["only.one"]), num_experts="[8]"))
    with pytest.raises(RoutingError, match="do not fit each other"):
        RoutedExperts.load(path)
    fresh()
    rewrite_header(path, lambda facts: facts.update(num_experts="[8, 4]"))
    with pytest.raises(RoutingError, match=r"do not fit each other: site model\.layers\.2\.mlp\.gate"):
        RoutedExperts.load(path)
    fresh()
    rewrite_header(path, lambda facts: facts.update(token_hash=json.dumps("0" * 64)))
    with pytest.raises(RoutingError, match="not those that the header names"):
        RoutedExperts.load(path)
    fresh()
    rewrite_header(path, lambda facts: facts.pop("sites"))
    with pytest.raises(RoutingError, match="'sites'"):
        RoutedExperts.load(path)
    with pytest.raises(FileNotFoundError):
        RoutedExperts.load(tmp_path / "nowhere")


def test_no_flipped_bit_passes_for_other_routes(tmp_path):
    path = tmp_path / "routes.safetensors"
    example().save(path)
    whole, rng = path.read_bytes(), random.Random(0)
    for place in rng.sample(range(8 * len(whole)), 200):
        data = bytearray(whole)
        data[place // 8] ^= 1 << place % 8
        path.write_bytes(data)
        with pytest.raises(RoutingError, match=r"routes\.safetensors"):
            RoutedExperts.load(path)


def test_a_file_of_the_first_version_has_no_checksum_and_loads(tmp_path):
    path = tmp_path / "routes.safetensors"
    example().save(path)
    rewrite_header(path, lambda facts: None)
    assert RoutedExperts.load(path).equal(example())
    rewrite_again = path.read_bytes().replace(b'"format_version": "1"', b'"format_version": "2"')
    path.write_bytes(rewrite_again)
    with pytest.raises(RoutingError, match="is damaged"):
        RoutedExperts.load(path)


def test_the_token_hash_depends_on_content_and_shape_only():
    ids = random_ids(2, 3, 1, 1, 4)

    def hash_of(tokens):
        return RoutedExperts(ids.view(*tokens.shape, 1, 1), ["gate"], 4, tokens=tokens).token_hash

    tokens = torch.arange(6).view(2, 3)
    assert hash_of(tokens) == hash_of(tokens.to(torch.int16))
    assert hash_of(tokens) != hash_of(tokens + 1)
    assert hash_of(tokens) != hash_of(tokens.view(3, 2))
    # Fixed once and for all: files carry it. sha256(b"(2, 3)" + int32 0..5 little-endian).
    assert hash_of(tokens) == "7eadaafe1c36d469e89127d4db6a65e85de807235d89f2112257cb61121ba2d0"
    assert example(tokens=False).token_hash is None


# Tables


def test_a_frame_has_one_row_per_routed_sequence_position_and_site():
    ids = torch.tensor([[[[3, 0], [1, 2]], [[-1, -1], [2, 0]]]])
    frame = RoutedExperts(ids, SITES, 4, tokens=torch.tensor([[7, 9]])).to_frame()
    assert list(frame.columns) == ["sequence", "position", "token", "site", "expert_0", "expert_1"]
    assert frame.astype({"site": str}).values.tolist() == [
        [0, 0, 7, SITES[0], 3, 0],
        [0, 0, 7, SITES[1], 1, 2],
        [0, 1, 9, SITES[1], 2, 0],
    ]
    # Slot order 3,0 / 1,2 / 2,0: expert 0 twice in second place, at either site once.
    assert frame.groupby("site", observed=False)["expert_1"].agg(list).tolist() == [[0], [2, 0]]


def test_a_frame_of_some_tokens():
    routes = example()
    mask = torch.zeros(3, 4, dtype=torch.bool)
    mask[1, 2] = mask[2, 3] = True  # the second has no route
    frame = routes.to_frame(mask=mask)
    assert frame[["sequence", "position"]].values.tolist() == [[1, 2], [1, 2]]
    with pytest.raises(RoutingError, match=r"mask must be \[B,T\]"):
        routes.to_frame(mask=mask[:, :2])


# Engines


def engine_arrays(dtype=np.uint8):
    """Two sequences of 3 and 2 tokens, so 2 and 1 rows; 4 layers, of which 0 and 3 are dense; K = 2."""
    a = np.zeros((2, 4, 2), dtype)
    a[0, 1], a[0, 2], a[1, 1], a[1, 2] = [1, 2], [3, 4], [5, 6], [7, 0]
    b = np.zeros((1, 4, 2), dtype)
    b[0, 1], b[0, 2] = [0, 7], [2, 1]
    return [a, b]


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int16, np.int32])
def test_vllm_arrays_lose_dense_layers_and_gain_padding(dtype):
    routes = RoutedExperts.from_vllm(engine_arrays(dtype), SITES, 8)
    # Layers 1 and 2 by the names of the sites; padding on the right.
    assert routes.ids.tolist() == [[[[1, 2], [3, 4]], [[5, 6], [7, 0]]], [[[0, 7], [2, 1]], [[-1, -1], [-1, -1]]]]
    explicit = RoutedExperts.from_vllm(engine_arrays(dtype), ["a", "b"], 8, layers=[1, 2])
    assert torch.equal(explicit.ids, routes.ids)


def test_vllm_arrays_go_where_the_tokens_are():
    # Left-padded tokens [_,x,x,x] and [_,_,x,x]: the last sampled token of each has no route.
    mask = torch.tensor([[0, 1, 1, 1], [0, 0, 1, 1]])
    routes = RoutedExperts.from_vllm(engine_arrays(), SITES, 8, mask=mask)
    assert routes.ids[:, :, 0].tolist() == [
        [[-1, -1], [1, 2], [5, 6], [-1, -1]],
        [[-1, -1], [-1, -1], [0, 7], [-1, -1]],
    ]
    # A mask without the last token means the same rows.
    without_last = torch.tensor([[0, 1, 1, 0], [0, 0, 1, 0]])
    assert torch.equal(RoutedExperts.from_vllm(engine_arrays(), SITES, 8, mask=without_last).ids, routes.ids)


def test_sglang_strings_are_the_same_routes():
    payloads = [base64.b64encode(a.astype("<i4").tobytes()).decode() for a in engine_arrays()]
    routes = RoutedExperts.from_sglang(payloads, SITES, 8, num_layers=4, num_experts_per_tok=2)
    assert routes.equal(RoutedExperts.from_vllm(engine_arrays(), SITES, 8))
    with pytest.raises(RoutingError, match="not a whole number"):
        RoutedExperts.from_sglang(payloads, SITES, 8, num_layers=3, num_experts_per_tok=2)
    with pytest.raises(RoutingError, match="not base64"):
        RoutedExperts.from_sglang(["%%"], SITES, 8, num_layers=4, num_experts_per_tok=2)


def test_engine_results_that_cannot_be_right():
    arrays = engine_arrays()
    with pytest.raises(RoutingError, match=r"site model\.layers\.3\.mlp\.gate \(layer 3 .*captured nothing"):
        RoutedExperts.from_vllm(arrays, [*SITES, "model.layers.3.mlp.gate"], 8)
    with pytest.raises(RoutingError, match=r"layers \[2\] of the engine hold routes, but no site"):
        RoutedExperts.from_vllm(arrays, SITES[:1], 8)
    with pytest.raises(RoutingError, match="pass layers="):
        RoutedExperts.from_vllm(arrays, ["a.gate", "b.gate"], 8)
    with pytest.raises(RoutingError, match="sequence 1: 1 rows of routes for 3 tokens"):
        RoutedExperts.from_vllm(arrays, SITES, 8, mask=torch.tensor([[1, 1, 1], [1, 1, 1]]))
    with pytest.raises(RoutingError, match="one array"):
        RoutedExperts.from_vllm([arrays[0][:, 0]], SITES, 8)
    with pytest.raises(RoutingError, match="integer ids"):
        RoutedExperts.from_vllm([a.astype(float) for a in arrays], SITES, 8)
    zero_row = [a.copy() for a in arrays]
    zero_row[0][1, 2] = 0  # one token not captured, where its neighbours were
    with pytest.raises(RoutingError, match=r"layers\.2.*sequence 0, token 1 names an expert twice: \[0, 0\]"):
        RoutedExperts.from_vllm(zero_row, SITES, 8)


def test_unpacking_is_the_inverse_of_the_cast():
    assert unpack_ids(torch.tensor([0, 254, 255], dtype=torch.uint8)).tolist() == [0, 254, -1]
    assert unpack_ids(torch.tensor([255, 65535], dtype=torch.uint16)).tolist() == [255, -1]
