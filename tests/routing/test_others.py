"""Routes from other programs' arrays and files: each in the form in which its producer writes it."""

import json
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from routing_helpers import moe, routes_of, tokens
from tiny_families import families, tiny_config, tiny_model

from moe_rl.routing import RoutedExperts, RoutingError, UnsupportedModelError, slot_change
from moe_rl.routing.others import sites_of

SITES = ["model.layers.1.mlp.gate", "model.layers.2.mlp.gate"]


def padded():
    """Two sequences of 3 and 2 tokens as verl pads them: prompts left, zeros; 3 layers, of which 0 is dense; K = 2.
    The last token of each was never fed back."""
    ids = torch.zeros(2, 5, 3, 2, dtype=torch.int32)
    ids[0, 1, 1:] = torch.tensor([[1, 2], [3, 4]])
    ids[0, 2, 1:] = torch.tensor([[5, 6], [7, 0]])
    ids[1, 2, 1:] = torch.tensor([[0, 7], [2, 1]])
    return ids, torch.tensor([[0, 1, 1, 1, 0], [0, 0, 1, 1, 0]])


EXPECTED = [
    [[[-1, -1]] * 2, [[1, 2], [3, 4]], [[5, 6], [7, 0]], [[-1, -1]] * 2, [[-1, -1]] * 2],
    [[[-1, -1]] * 2, [[-1, -1]] * 2, [[0, 7], [2, 1]], [[-1, -1]] * 2, [[-1, -1]] * 2],
]


def test_padding_dense_layers_and_the_last_token_have_no_routes():
    ids, mask = padded()
    routes = RoutedExperts.from_padded(ids, mask, SITES, 8)
    assert routes.ids.tolist() == EXPECTED
    ids[0, 0], ids[0, 4], ids[1, :2] = 99, -7, 3  # garbage outside of the mask
    assert RoutedExperts.from_padded(ids.numpy(), mask.bool().numpy(), SITES, 8).equal(routes)
    assert RoutedExperts.from_padded(ids[:, :, 1:], mask, ["a", "b"]).num_experts == 8  # the largest id is 7


def test_tokens_that_were_set_to_live_are_live_dense_layers_or_not():
    """As the error about tokens without routes advises."""
    ids, mask = padded()
    ids[0, 2] = -1  # every layer, the dense one too
    live = torch.tensor(EXPECTED)
    live[0, 2] = -1
    assert torch.equal(RoutedExperts.from_padded(ids, mask, SITES, 8).ids, live)
    arrays = [ids[0, 1:3].numpy(), ids[1, 2:3].numpy()]
    assert RoutedExperts.from_vllm(arrays, SITES, 8, mask=mask).equal(RoutedExperts(live, SITES, 8))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda a, m: (a.float(), m), r"integer expert ids .* got torch.float32: router logits"),
        (lambda a, m: (a[:, :, 0], m), r"\[B,T,layers,K\].* got \[2, 5, 2\]"),
        (lambda a, m: (a, m[:, 1:]), r"mask \[2, 4\] does not fit ids \[2, 5, 3, 2\].*not a response mask"),
        (lambda a, m: (a, m * 0), "False everywhere"),
        (lambda a, m: (a, m * 2 - 1), "mask: expected only 0 and 1"),
        (lambda a, m: (a * 0, m), r"site model\.layers\.1\.mlp\.gate \(layer 1 .*all zeros"),
        (lambda a, m: (a.roll(1, 2), m), r"site model\.layers\.1\.mlp\.gate \(layer 1 .*all zeros"),
        (lambda a, m: (a.index_fill(2, torch.tensor(0), 3), m), r"layers \[0\] of the engine hold routes, but no site"),
        (
            lambda a, m: (a, torch.ones_like(m)),
            r"sequence 0, token 0 has no routes \(zeros at every site\), nor have 4",
        ),
        (lambda a, m: (a + 5 * (a > 0), m), "names expert 8, expected 0..7"),
        (lambda a, m: (a.where(a != 6, 5), m), r"sequence 0, token 2 names an expert twice: \[5, 5\]"),
    ],
)
def test_an_array_that_cannot_be_right_is_refused(change, said):
    with pytest.raises(RoutingError, match=said):
        RoutedExperts.from_padded(*change(*padded()), SITES, 8)


@pytest.mark.parametrize(
    "family",
    [
        "Qwen3MoeForCausalLM",
        "DeepseekV3ForCausalLM",  # dense layers first
        "LongcatFlashForCausalLM",  # zero experts are ranked, too
        "ZayaForCausalLM",  # a class for skipping
        "DbrxForCausalLM",
        "Gemma4ForCausalLM",
        "InklingForCausalLM",
    ],
)
def test_a_configuration_names_the_sites_as_a_recording_does(family):
    if family not in families():
        pytest.skip(f"{family} is not in this transformers")
    recorded = routes_of(tiny_model(family), tokens(1, 4))
    names, experts = sites_of(tiny_config(families()[family]))
    assert names == recorded.sites
    assert experts == (recorded.num_experts,) * len(names)


def test_sites_come_from_a_folder_without_its_weights_and_a_dense_model_is_refused(tmp_path):
    model = moe()
    model.config.save_pretrained(tmp_path)
    recorded = routes_of(model, tokens())
    again = RoutedExperts.from_padded(recorded.ids, torch.ones(2, 7), tmp_path)
    assert again.equal(recorded) and again.num_experts == recorded.num_experts
    assert sites_of(model) == sites_of(str(tmp_path))
    with pytest.raises(RoutingError, match="no configuration of a model there"):
        sites_of(tmp_path / "nothing")
    from transformers import LlamaConfig

    small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": 8}
    with pytest.raises(UnsupportedModelError, match="registers no router"):
        sites_of(LlamaConfig(**small, intermediate_size=8))


def test_a_batch_of_verl():
    ids, mask = padded()
    input_ids = torch.arange(10).view(2, 5)
    batch = {"routed_experts": ids, "attention_mask": mask, "input_ids": input_ids}
    routes = RoutedExperts.from_verl(SimpleNamespace(batch=batch), SITES, 8)
    assert routes.ids.tolist() == EXPECTED
    assert routes.tokens.tolist() == [[-1, 1, 2, 3, -1], [-1, -1, 7, 8, -1]]
    parts = [ids[0, 1:4], ids[1, 2:4]]
    jagged = {"routed_experts": torch.nested.nested_tensor(parts, layout=torch.jagged)}
    jagged["input_ids"] = torch.nested.nested_tensor([input_ids[0, 1:4], input_ids[1, 2:4]], layout=torch.jagged)
    packed = RoutedExperts.from_verl(jagged, SITES, 8)
    assert packed.tokens.tolist() == [[1, 2, 3], [7, 8, -1]]
    assert packed.ids[1].tolist() == [[[0, 7], [2, 1]], [[-1, -1]] * 2, [[-1, -1]] * 2]
    placed = RoutedExperts.from_verl({**jagged, "attention_mask": mask}, SITES, 8)
    assert placed.ids[0, 1].tolist() == [[1, 2], [3, 4]]
    ended = {**batch, "attention_mask": torch.ones_like(mask)}  # behind the last answer stands what a tool said
    with pytest.raises(RoutingError, match=r"token 0 has no routes .* a tool's text behind the last answer \(verl\)"):
        RoutedExperts.from_verl(ended, SITES, 8)
    with pytest.raises(RoutingError, match="no routed_experts in the batch, but attention_mask, input_ids: is actor"):
        RoutedExperts.from_verl({k: v for k, v in batch.items() if k != "routed_experts"}, SITES, 8)
    with pytest.raises(RoutingError, match="no attention_mask"):
        RoutedExperts.from_verl({"routed_experts": ids}, SITES, 8)
    arrays = {key: value.numpy() for key, value in batch.items()}
    assert RoutedExperts.from_verl(arrays, SITES, 8).equal(routes)
    with pytest.raises(RoutingError, match=r"input_ids \[2, 4\] and attention_mask \[2, 5\] differ"):
        RoutedExperts.from_verl({**batch, "input_ids": input_ids[:, :4]}, SITES, 8)
    nested = {**batch, "routed_experts": jagged["routed_experts"]}
    for other in (input_ids[:, :4], input_ids[:1]):
        with pytest.raises(RoutingError, match=r"input_ids \[., .\] and attention_mask \[2, 5\] differ"):
            RoutedExperts.from_verl({**nested, "input_ids": other}, SITES, 8)
    with pytest.raises(RoutingError, match="routed_experts: expected a tensor or an array of numbers, got str"):
        RoutedExperts.from_verl({**batch, "routed_experts": "ids"}, SITES, 8)


def slime_samples():
    ids, _ = padded()
    a = {"tokens": [4, 5, 6], "rollout_routed_experts": ids[0, 1:3]}
    b = SimpleNamespace(tokens=[7, 8], rollout_routed_experts=ids[1, 2:3].tolist())
    return [[a], [b]]


def test_samples_of_slime_and_their_dump(tmp_path):
    routes = RoutedExperts.from_slime(slime_samples(), SITES, 8)
    assert routes.tokens.tolist() == [[4, 5, 6], [7, 8, -1]]
    assert routes.ids[0].tolist() == [[[1, 2], [3, 4]], [[5, 6], [7, 0]], [[-1, -1]] * 2]
    flat = [{**s, "status": "completed"} if isinstance(s, dict) else vars(s) for (s,) in slime_samples()]
    torch.save({"rollout_id": 0, "samples": flat}, tmp_path / "0.pt")
    assert RoutedExperts.from_slime(tmp_path / "0.pt", SITES, 8).equal(routes)
    torch.save({"samples": [SimpleNamespace()]}, tmp_path / "code.pt")
    with pytest.raises(RoutingError, match=r"code\.pt: not read, damaged or with objects that could run code"):
        RoutedExperts.from_slime(tmp_path / "code.pt", SITES, 8)
    with pytest.raises(RoutingError, match="sample 1 has no rollout_routed_experts"):
        RoutedExperts.from_slime([slime_samples()[0], {"tokens": [1]}], SITES, 8)
    with pytest.raises(RoutingError, match="sequence 0: 2 rows of routes for 5 tokens"):
        RoutedExperts.from_slime([{**flat[0], "tokens": [1, 2, 3, 4, 5]}], SITES, 8)
    none = {"tokens": [], "rollout_routed_experts": flat[0]["rollout_routed_experts"][:0]}
    assert RoutedExperts.from_slime([none, *slime_samples()], SITES, 8).rows(torch.tensor([1, 2])).equal(routes)
    with pytest.raises(RoutingError, match="none of 1 samples has a token"):
        RoutedExperts.from_slime([none], SITES, 8)
    with pytest.raises(RoutingError, match="tokens of sample 0: expected a tensor or an array of numbers, got list"):
        RoutedExperts.from_slime([{**flat[0], "tokens": ["a", "b", "c"]}], SITES, 8)
    with pytest.raises(RoutingError, match=r"tokens of sample 1: expected whole numbers, got torch\.float32"):
        RoutedExperts.from_slime([none, {**flat[0], "tokens": [4.0, 5.5, 6.0]}], SITES, 8)  # were cut to 4, 5, 6
    with pytest.raises(RoutingError, match="expected samples of slime, got an empty list"):
        RoutedExperts.from_slime([], SITES, 8)


def megatron(path, steps=2, layers=(1, 2), micro=2, T=3, B=2, K=2):
    """A trace as #5220 writes it, position first; the ids say where they are from."""
    with open(path, "w") as file:
        for step in range(steps):
            for m in range(micro):
                for layer in layers:
                    rows = [[10 * t + b + 100 * m, 500 + layer + 10 * step] for t in range(T) for b in range(B)]
                    row = {"step": step, "stage": "pre_dispatch", "block": "decoder", "layer": layer, "rank": 0}
                    file.write(json.dumps({**row, "num_tokens": T * B, "topk": K, "top_indices": rows}) + "\n")
                extra = {"step": step, "block": "mtp", "mtp_idx": 0, "layer": 1, "num_tokens": 1, "topk": 1}
                file.write(json.dumps({**extra, "top_indices": [[0]]}) + "\n")
    return path


def test_a_trace_of_megatron_is_position_first_and_micro_batches_follow(tmp_path):
    path = megatron(tmp_path / "router_trace_rank0.jsonl")
    routes = RoutedExperts.from_megatron_jsonl(tmp_path, None, 600, step=1, sequences=2, micro_batches=2)
    assert routes.shape == (4, 3, 2, 2)
    assert routes.sites == ("decoder.layers.1.mlp.router", "decoder.layers.2.mlp.router")
    assert routes.ids[1, :, 0].tolist() == [[1, 511], [11, 511], [21, 511]]  # sequence 1 of micro-batch 0
    assert routes.ids[2, :, 1].tolist() == [[100, 512], [110, 512], [120, 512]]
    of_two = {"sequences": 2, "micro_batches": 2}
    named = RoutedExperts.from_megatron_jsonl(path, [SITES[1]], 600, **of_two)
    assert torch.equal(named.ids[:, :, 0], RoutedExperts.from_megatron_jsonl(path, SITES, **of_two).ids[:, :, 1])
    with pytest.raises(RoutingError, match=r"no decoder layer of step 7; its steps are 0\.\.1"):
        RoutedExperts.from_megatron_jsonl(path, step=7)
    with pytest.raises(RoutingError, match="line 1: 6 tokens are not 4 sequences of one length"):
        RoutedExperts.from_megatron_jsonl(path, sequences=4)
    with pytest.raises(RoutingError, match=r"sites are of layers \[0\], .* has \[1, 2\]"):
        RoutedExperts.from_megatron_jsonl(path, ["model.layers.0.gate"], **of_two)
    with pytest.raises(RoutingError, match=r"layers \[1, 1\] do not name one of 0\.\.2 for each of 2 sites"):
        RoutedExperts.from_megatron_jsonl(path, SITES, layers=[1, 1], **of_two)
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:-2]) + "\n")
    with pytest.raises(RoutingError, match=r"layer 2 has micro-batches .* ended in the middle of a step"):
        RoutedExperts.from_megatron_jsonl(path, step=1, sequences=2)
    path.write_text(lines[0].replace('"layer": 1', '"layer": Infinity'))
    with pytest.raises(RoutingError, match=r"line 1 is no record .*OverflowError"):
        RoutedExperts.from_megatron_jsonl(path)
    path.write_text("\n".join(lines)[:-9])
    with pytest.raises(RoutingError, match=f"line {len(lines)} is no record .* cut off"):
        RoutedExperts.from_megatron_jsonl(path)
    for ids, said in (("true, false", "of whole numbers"), ("null, 1", "of ids"), ("[" * 10**5, "line 1 is no record")):
        path.write_text(f'{{"step": 0, "layer": 0, "num_tokens": 1, "topk": 2, "top_indices": [[{ids}]]}}')
        with pytest.raises(RoutingError, match=said):
            RoutedExperts.from_megatron_jsonl(path)
    megatron(tmp_path / "router_trace_rank1.jsonl")
    with pytest.raises(RoutingError, match="holds 2 ranks"):
        RoutedExperts.from_megatron_jsonl(tmp_path)


@pytest.mark.parametrize(
    ("rows", "micro_batches", "said"),
    [
        ([(0, 0), (1, 1), (0, 4), (1, 5)], 1, "each layer comes 2 times, expected micro_batches = 1.*virtual pipeline"),
        ([(0, 0), (1, 1), (1, 1), (0, 0)], 2, "each micro-batch has another that is equal .* recomputed"),
        ([(0, 0), (1, 1), (1, 2), (0, 0)], 2, ""),  # two micro-batches that agree at one layer
        ([(0, 0), (1, 1), (0, 0), (1, 1), (0, 0), (1, 2)], 3, ""),  # two of one response that was sampled twice
    ],
)
def test_layers_that_come_again_in_a_trace_of_megatron_are_micro_batches_or_refused(
    tmp_path, rows, micro_batches, said
):
    """A virtual pipeline counts the layers of each chunk from 0; a recomputation is written as a second forward."""
    row = {"step": 0, "block": "decoder", "num_tokens": 2, "topk": 2}
    lines = [json.dumps({**row, "layer": layer, "top_indices": [[expert, 7]] * 2}) + "\n" for layer, expert in rows]
    (tmp_path / "trace.jsonl").write_text("".join(lines))
    with pytest.raises(RoutingError, match=said) if said else nullcontext():
        routes = RoutedExperts.from_megatron_jsonl(tmp_path / "trace.jsonl", None, 8, micro_batches=micro_batches)
        assert routes.ids[[0, -1], 0, :, 0].tolist() == [[0, 1], [0, 2]]


def flame(folder, seed, kind):
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    written = []
    for layer in (2, 3):
        ids = np.stack([rng.permutation(64)[:6] for _ in range(50)]).astype(np.int16)
        scores = pa.array([[0.1] * 6] * 50, pa.list_(pa.float16()))
        table = pa.table({"scores": scores, "indices": pa.array(ids.tolist(), kind)})
        pq.write_table(table, folder / f"layer_{layer:02d}.parquet", row_group_size=16)
        written.append(ids)
    return np.stack(written, 1)


@pytest.mark.parametrize("kind", [pa.list_(pa.int16()), pa.list_(pa.int16(), 6)])
def test_traces_of_flame_are_read_in_part_and_compare_over_checkpoints(tmp_path, kind):
    old = flame(tmp_path / "actives" / "iter_540", 0, kind)
    new = flame(tmp_path / "actives" / "iter_1080", 1, kind)
    samples = tmp_path / "samples"
    samples.mkdir()
    for part in range(2):
        ids = pa.array(range(30 * part, 30 * part + 30), pa.int32())
        pq.write_table(pa.table({"token_id": ids}), samples / f"{part:03d}.parquet")
    a, b = (
        RoutedExperts.from_flame(tmp_path / "actives" / name, samples, start=14, count=30)
        for name in ("iter_540", "iter_1080")
    )
    assert a.ids[0].tolist() == old[14:44].tolist()
    assert a.tokens.tolist() == [list(range(14, 44))]
    assert a.sites == ("layer_02", "layer_03") and a.num_experts == 64
    shared = sum(
        len(set(x) & set(y)) for x, y in zip(old[14:44].reshape(-1, 6), new[14:44].reshape(-1, 6), strict=True)
    )
    assert float(slot_change(a, b).mean()) == pytest.approx(1 - shared / (30 * 2 * 6))
    with pytest.raises(RoutingError, match="50 rows, asked for 40 to 60"):
        RoutedExperts.from_flame(tmp_path / "actives" / "iter_540", start=40, count=20)
    with pytest.raises(RoutingError, match="expected a folder actives/iter_NNNN"):
        RoutedExperts.from_flame(samples)
    with pytest.raises(RoutingError, match=r"has no column 'token_id', but scores, indices"):
        RoutedExperts.from_flame(tmp_path / "actives" / "iter_540", tmp_path / "actives" / "iter_540", count=2)


@pytest.mark.parametrize(
    ("ids", "tokens", "said"),
    [
        (pa.array([[1.5, 2.0]]), [1], "layer_00.parquet: column 'indices' holds values of double; expected whole"),
        (pa.array([[1, None]]), [1], "column 'indices' holds values of int64, some of them missing"),
        (pa.array([1]), [1], "column 'indices' holds int64, expected lists"),
        (pa.array([[1, 2]]), ["a"], "samples: column 'token_id' holds values of string; expected whole"),
        (pa.array([[1, 2]]), pa.array([None], pa.int32()), "'token_id' holds values of int32, some of them missing"),
    ],
)
def test_traces_of_flame_hold_whole_numbers(tmp_path, ids, tokens, said):
    """Ids of 1.5 were read as 1."""
    (tmp_path / "samples").mkdir()
    pq.write_table(pa.table({"indices": ids}), tmp_path / "layer_00.parquet")
    pq.write_table(pa.table({"token_id": tokens}), tmp_path / "samples" / "0.parquet")
    with pytest.raises(RoutingError, match=said):
        RoutedExperts.from_flame(tmp_path, tmp_path / "samples", count=1)
