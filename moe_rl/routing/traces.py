"""Readers of routing traces on disk: Megatron-LM's JSONL, FLAME-MoE's Parquet, slime's dumps of rollouts. Megatron and
FLAME traces may be larger than memory, so only the part asked for is kept."""

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from moe_rl.checks import parse_json
from moe_rl.routing.arrays import pad_left_aligned
from moe_rl.routing.errors import RoutingError
from moe_rl.routing.packing import LIVE

SLIME = "tokens", "rollout_routed_experts"
"""The fields that are read of a sample of slime."""


def read_megatron(
    path: str | os.PathLike[str], step: int, sequences: int, micro_batches: int
) -> tuple[Int[Tensor, "B T L K"], tuple[int, ...]]:
    """Return ids and layer numbers of one step of `router_trace_rank*.jsonl` (Megatron-LM #5220), decoder layers only.

    A line is one forward of one layer: `top_indices` of its tokens, which Megatron flattens with the position first:
    row t * sequences + b is token t of sequence b. A layer that comes again in a step is the next micro-batch, whose
    sequences follow; shorter ones are padded with -1 on the right.

    Raises RoutingError naming file and line; also if a layer does not come `micro_batches` times, or if every
    micro-batch has an equal one.
    """
    file = _rank_file(Path(path))
    found: dict[int, list[Tensor]] = {}
    steps: set[int] = set()
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            where = f"{file} line {number}"
            try:
                row = parse_json(line)
                layer, at, rows = int(row["layer"]), int(row["step"]), row["top_indices"]
                shape = int(row["num_tokens"]), int(row["topk"])
            except (ValueError, KeyError, TypeError, OverflowError) as error:
                raise RoutingError(
                    f"{where} is no record of a router trace ({type(error).__name__}: {error}); expected step, layer, "
                    "num_tokens, topk and top_indices. A last line that was cut off?"
                ) from error
            if row.get("block", "decoder") != "decoder":
                continue
            steps.add(at)
            if at != step:
                continue
            ids = _table(rows, where)
            if ids.shape != shape:
                raise RoutingError(f"{where}: top_indices are {list(ids.shape)}, it says [num_tokens, topk] = {shape}")
            if len(ids) % sequences:
                raise RoutingError(
                    f"{where}: {len(ids)} tokens are not {sequences} sequences of one length; sequences= is the size "
                    "of a micro-batch, 1 where sequences are packed"
                )
            found.setdefault(layer, []).append(ids.view(-1, sequences, ids.shape[1]).transpose(0, 1))
    if not found:
        raise RoutingError(f"{file} has no decoder layer of step {step}; its steps are {_range(steps)}")
    layers = tuple(sorted(found))
    shapes = {layer: [tuple(part.shape) for part in found[layer]] for layer in layers}
    odd = next((layer for layer in layers if shapes[layer] != shapes[layers[0]]), None)
    if odd is not None:
        raise RoutingError(
            f"{file} step {step}: layer {odd} has micro-batches {shapes[odd]} (sequences, tokens, slots), layer "
            f"{layers[0]} has {shapes[layers[0]]}: a trace that ended in the middle of a step, or layers that ran "
            "twice (recomputed activations)?"
        )
    if (times := len(shapes[layers[0]])) != micro_batches:
        raise RoutingError(
            f"{file} step {step}: each layer comes {times} times, expected micro_batches = {micro_batches}. It comes "
            "again for each micro-batch, but also where activations are recomputed and in each chunk of a virtual "
            "pipeline, whose layers are counted from 0 again: neither can be read"
        )
    parts = [torch.stack([found[layer][i] for layer in layers], 2) for i in range(times)]
    if min(Counter((part.shape, part.numpy().tobytes()) for part in parts).values()) > 1:
        raise RoutingError(
            f"{file} step {step}: each micro-batch has another that is equal at all layers: activations were "
            "recomputed (trace without recomputation), or all are of the same tokens"
        )
    return pad_left_aligned([row for part in parts for row in part], LIVE), layers


def _rank_file(path: Path) -> Path:
    """Return the trace file: `path`, or the only trace of a rank in the folder `path`."""
    if path.is_file():
        return path
    files = sorted(path.glob("router_trace_rank*.jsonl"))
    if not files:
        raise RoutingError(f"{path}: no such file, nor a folder with router_trace_rank*.jsonl")
    if len(files) > 1:
        raise RoutingError(
            f"{path} holds {len(files)} ranks, which saw other tokens, other layers or parts of sequences: name one "
            f"file, e.g. {files[0].name}"
        )
    return files[0]


def _table(rows: Any, where: str) -> Tensor:
    """Return the rows as a tensor. Raises RoutingError unless they are a table of whole numbers."""
    try:
        ids = torch.tensor(rows, device="cpu")
    except (ValueError, TypeError, RuntimeError) as error:
        raise RoutingError(f"{where}: top_indices is no table of ids: {error}") from error
    if ids.ndim != 2 or ids.dtype != torch.int64:
        raise RoutingError(f"{where}: top_indices is no table of whole numbers")
    return ids


def _range(numbers: set[int]) -> str:
    """Return numbers as text: as a range if none is missing in it, else the first eight."""
    if not numbers:
        return "none"
    low, high = min(numbers), max(numbers)
    return f"{low}..{high}" if len(numbers) == high - low + 1 else f"{sorted(numbers)[:8]} ..."


def read_flame(
    folder: str | os.PathLike[str], start: int, count: int, samples: str | os.PathLike[str] | None
) -> tuple[Int[Tensor, "1 T L K"], tuple[str, ...], Tensor | None]:
    """Return ids, layer names and token ids of rows `start .. start + count` of one checkpoint of
    CMU-FLAME/FLAME-MoE-Traces.

    folder: `actives/iter_NNNN`, one `layer_NN.parquet` per routed layer, whose column `indices` has a row per token.
    samples: the folder `samples` of the same model, whose column `token_id` has the same rows over all its files.

    Raises RoutingError naming the file.
    """
    files = sorted(Path(folder).glob("layer_*.parquet"))
    if not files:
        raise RoutingError(f"{folder}: no layer_*.parquet there; expected a folder actives/iter_NNNN")
    if start < 0 or count < 1:
        raise RoutingError(f"rows {start} to {start + count}: expected start >= 0 and at least one row")
    from pyarrow.compute import list_value_length

    layers = []
    for file in files:
        lists = _column([file], "indices", start, count)
        if not hasattr(lists.type, "value_type"):
            raise RoutingError(f"{file}: column 'indices' holds {lists.type}, expected lists of whole numbers")
        ids = _whole(lists.flatten(), f"{file}: column 'indices'")
        if ids.numel() % count or (list_value_length(lists).to_numpy() != ids.numel() // count).any():
            raise RoutingError(f"{file}: rows {start} to {start + count} name different numbers of experts")
        layers.append(ids.view(count, -1))
    if len({ids.shape for ids in layers}) > 1:
        raise RoutingError(f"{folder}: layers name {sorted({ids.shape[1] for ids in layers})} experts for a token")
    tokens = None
    if samples is not None:
        parts = sorted(Path(samples).glob("*.parquet"))
        if not parts:
            raise RoutingError(f"{samples}: no *.parquet there; expected the folder samples")
        tokens = _whole(_column(parts, "token_id", start, count), f"{samples}: column 'token_id'")[None]
    return torch.stack(layers, 1)[None], tuple(file.stem for file in files), tokens


def _whole(values: Any, where: str) -> Int[Tensor, " N"]:
    """Return an arrow array as a tensor. Raises RoutingError for missing values and other values than whole numbers."""
    from pyarrow.types import is_integer

    if values.null_count or not is_integer(values.type):
        missing = ", some of them missing" if values.null_count else ""
        raise RoutingError(f"{where} holds values of {values.type}{missing}; expected whole numbers")
    return torch.tensor(values.to_numpy().astype("int64"), device="cpu")


def _column(files: list[Path], name: str, start: int, count: int) -> Any:
    """Return rows of a column over several files as one arrow array; only the row groups that hold them are read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    found, passed = [], 0
    for path in files:
        try:
            file = pq.ParquetFile(path)
            if name not in file.schema_arrow.names:
                raise RoutingError(f"{path} has no column {name!r}, but {', '.join(file.schema_arrow.names)}")
            for group in range(file.num_row_groups):
                size = file.metadata.row_group(group).num_rows
                low, high = max(0, start - passed), min(size, start + count - passed)
                if low < high:
                    found += file.read_row_group(group, columns=[name])[name].slice(low, high - low).chunks
                passed += size
        except (pa.ArrowInvalid, OSError) as error:
            raise RoutingError(f"{path}: not a readable Parquet file ({error}); copied incompletely?") from error
    got = sum(len(chunk) for chunk in found)
    if got < count:
        raise RoutingError(f"{files[0]}: {passed} rows, asked for {start} to {start + count}")
    return pa.concat_arrays(found)


def read_slime(path: str | os.PathLike[str]) -> list[Mapping[str, Any]]:
    """Return the samples in a file of slime's `--save-debug-rollout-data`, without running what a pickle may hold.

    Raises RoutingError for another file, and for one that holds more than plain values and tensors.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise
    except Exception as error:  # whatever torch says of a file of others: nothing in it has run
        why = (str(error) or type(error).__name__).splitlines()[0]
        raise RoutingError(
            f"{path}: not read, damaged or with objects that could run code ({why}). "
            "Save tokens and rollout_routed_experts alone, as tensors, in slime's own process"
        ) from error
    if not isinstance(content, Mapping) or not isinstance(content.get("samples"), list):
        raise RoutingError(f"{path}: no samples in it; expected a file of --save-debug-rollout-data")
    return content["samples"]


def slime_samples(given: Any) -> list[tuple[Any, Any, Any]]:
    """Return (sample, tokens, routes) for each of slime's samples: mappings or objects in the nesting of a rollout.

    Raises RoutingError: there are no samples, or a sample lacks tokens or routes.
    """
    found = [(sample, *(_field(sample, name) for name in SLIME)) for sample in _flat(given)]
    if not found:
        raise RoutingError("expected samples of slime, got an empty list")
    for number, (_, *values) in enumerate(found):
        for name, value in zip(SLIME, values, strict=True):
            if value is None:
                why = "was the rollout made with --use-rollout-routing-replay?"
                raise RoutingError(f"sample {number} has no {name}: {why}")
    return found


def _flat(samples: Any) -> Iterator[Any]:
    """Yield the samples in nested lists and tuples."""
    if isinstance(samples, list | tuple):
        for sample in samples:
            yield from _flat(sample)
    else:
        yield samples


def _field(sample: Any, name: str) -> Any:
    """Return a field of a sample, or None if it is missing."""
    return sample.get(name) if isinstance(sample, Mapping) else getattr(sample, name, None)
