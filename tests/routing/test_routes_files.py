"""Files of RoutedExperts: what comes back, and what a wrong or damaged file is told."""

import json
import random
import struct

import pytest
import torch
from routing_helpers import SITES, example, random_ids

from moe_rl.routing.errors import RoutingError
from moe_rl.routing.formats import write_routes
from moe_rl.routing.routes import RoutedExperts


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
    assert RoutedExperts.load(path, "meta").device.type == "meta"
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
    rewrite_header(path, lambda header: header.update(format_version="99"))
    with pytest.raises(RoutingError, match="format version 99, this moe_rl reads up to 2"):
        RoutedExperts.load(path)
    fresh()
    rewrite_header(path, lambda header: header.update(sites=json.dumps(["only.one"]), num_experts="[8]"))
    with pytest.raises(RoutingError, match="do not fit each other"):
        RoutedExperts.load(path)
    fresh()
    rewrite_header(path, lambda header: header.update(num_experts="[8, 4]"))
    with pytest.raises(RoutingError, match=r"do not fit each other: site model\.layers\.2\.mlp\.gate"):
        RoutedExperts.load(path)
    fresh()
    rewrite_header(path, lambda header: header.update(token_hash=json.dumps("0" * 64)))
    with pytest.raises(RoutingError, match="not those that the header names"):
        RoutedExperts.load(path)
    fresh()
    rewrite_header(path, lambda header: header.pop("sites"))
    with pytest.raises(RoutingError, match="'sites'"):
        RoutedExperts.load(path)
    with pytest.raises(FileNotFoundError):
        RoutedExperts.load(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("packed", "said"),
    [
        (torch.tensor([[[[255, 3]]]], dtype=torch.uint8), "live in some slots only"),
        (torch.zeros(1, 1, 1, 0, dtype=torch.uint8), r"packed ids are torch.uint8 \[1, 1, 1, 0\]"),
        (torch.zeros(1, 1, 2, 1, dtype=torch.uint8), r"\[1, 1, 2, 1\], expected torch.uint8 \[B,T,1,K\]"),
        (torch.zeros(1, 1, 1, 1, dtype=torch.int16), "packed ids are torch.int16"),
        (torch.tensor([[[[0]]]] * 5 + [[[[9]]]], dtype=torch.uint8), "sequence 5, token 0, slot 0 names expert 9"),
    ],
)
def test_packed_ids_that_no_save_writes_are_refused(tmp_path, monkeypatch, packed, said):
    monkeypatch.setattr("moe_rl.routing.packing._IDS", 2)  # more than are checked at a time
    header = {"sites": ["gate"], "num_experts": [8], "num_experts_per_tok": packed.shape[3], "token_hash": None}
    write_routes(tmp_path / "routes.safetensors", {"ids": packed}, {**header, "meta": {}})
    with pytest.raises(RoutingError, match=f"do not fit each other: .*{said}"):
        RoutedExperts.load(tmp_path / "routes.safetensors")


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
    rewrite_header(path, lambda header: None)
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


def test_a_name_that_another_reader_takes_for_its_own_is_warned_of(tmp_path):
    routes = RoutedExperts(torch.zeros(1, 2, 1, 1, dtype=torch.long), ["gate"], 2)
    with pytest.warns(UserWarning, match="will be a safetensors file, whatever .parquet says"):
        routes.save(tmp_path / "routes.parquet")
    assert torch.equal(RoutedExperts.load(tmp_path / "routes.parquet").ids, routes.ids)
