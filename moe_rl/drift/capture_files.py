"""Readers of files of captured routes. Of expert ids only dtype and shape are checked; the comparison does the rest.

- `.safetensors`: written by `RoutedExperts.save` with tokens, or tensors `tokens` `[B,T]`, `routed_experts`
  `[B,T,layers,K]` and, unless padding is -1 in `tokens`, `attention_mask`
- `.npz`: arrays of the same names
- `.jsonl`: a sequence per line, with `tokens` (or `prompt_token_ids` and `token_ids`) and `routed_experts`, the latter
  in the line itself or in its `meta_info`: nested lists `[rows, layers, K]`, or base64 of int32 (SGLang) or of a .npy
  file (vLLM's server)
- `.pt`: a dump of slime's `--save-debug-rollout-data`
- `.parquet`: `routes/*` of a run folder, or another file of `moe_rl.training.route_tables`

The engine's log-probabilities are read, too, where a file has them: under `logprobs`, `rollout_log_probs` or SGLang's
`output_token_logprobs` (`moe_rl.drift.capture_logps`). Files of arrays must then hold a `response_mask` or `loss_mask`
of the same shape.
"""

import base64
import binascii
import json
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from moe_rl.checks import parse_json
from moe_rl.drift.capture_logps import MASKS, logps_of, name_of, padded_logps
from moe_rl.drift.captured import Captured
from moe_rl.drift.errors import DriftError
from moe_rl.routing import RoutedExperts
from moe_rl.routing.arrays import NPY, decode_npy
from moe_rl.routing.formats import FORMAT
from moe_rl.routing.traces import read_slime, slime_samples
from moe_rl.study.words import count

KEYS = ("tokens", "input_ids")
UNPADDED = (".jsonl", ".pt")
"""Endings of files that hold each sequence by itself, and so no padding."""
# Errors of files that are cut off, damaged, of another kind (an array named .npz) or of a dtype that numpy lacks.
UNREADABLE = (SafetensorError, KeyError, ValueError, OSError, EOFError, TypeError, zipfile.BadZipFile, zlib.error)
FORMS = (
    "expected .safetensors, .npz or .jsonl with tokens and routed_experts, a .pt that slime dumped, or a .parquet of a "
    "run folder's routes"
)


def read_capture(
    path: Path, num_experts_per_tok: int | None, pad: int | None = None, likely: Collection[int] = ()
) -> Captured:
    """Read the sequences of a file of captured routes.

    num_experts_per_tok: K, needed for base64 of int32, which has no shape. pad: the padding token, which is taken out
    at either end of a row where arrays have neither a mask nor -1. likely: the numbers of layers that are preferred
    where several would fit such base64.

    Raises DriftError naming the file, the line or sequence, and what is missing there."""
    if path.is_dir():
        raise DriftError(f"{path} is a folder; name a file")
    if not path.is_file():
        raise DriftError(f"there is no file {path}")
    prompts: list[str] | None = None
    notes = (
        []
        if pad is None or path.suffix not in UNPADDED
        else [f"--pad-token-id does nothing: no sequence of {path.suffix} is padded"]
    )
    try:
        if path.suffix == ".jsonl":
            found, prompts = _lines(path, num_experts_per_tok, notes, likely)
        elif path.suffix == ".pt":
            found = [
                (tokens, ids, logps_of(sample, tokens, f"{path} sequence {b}"))
                for b, (sample, tokens, ids) in enumerate(slime_samples(read_slime(path)))
            ]
        elif path.suffix == ".parquet":
            from moe_rl.training.route_tables import read_route_table

            return _own(read_route_table(path), path, pad)
        elif path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as arrays:
                found = _padded(path, arrays.files, arrays.__getitem__, pad, notes)
        elif path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                if (file.metadata() or {}).get("format") == FORMAT:
                    return _own(RoutedExperts.load(path), path, pad)
                found = _padded(path, list(file.keys()), lambda name: file.get_tensor(name).numpy(), pad, notes)
        else:
            raise DriftError(f"{path}: {path.suffix or 'no ending'}; {FORMS}")
    except UNREADABLE as error:
        if isinstance(error, DriftError):
            raise
        why = str(error).removeprefix(f"{path}: ")
        raise DriftError(f"{path}: cannot be read ({why}); {FORMS}") from error
    if not found:
        raise DriftError(f"{path} holds no sequence")
    tokens, ids = [], []
    for b, (words, rows, _) in enumerate(found):
        try:
            tokens.append(np.asarray(words).reshape(-1))
            ids.append(np.asarray(rows))
        except ValueError as error:
            raise DriftError(f"{path}: sequence {b} has tokens or routes of unequal depth: {error}") from error
        if not np.issubdtype(tokens[-1].dtype, np.integer) or not len(tokens[-1]) or (tokens[-1] < 0).any():
            raise DriftError(f"{path}: sequence {b} has no token ids, but {tokens[-1][:4].tolist()}")
    given = [logps for _, _, logps in found]
    logps = None
    if not all(each is None for each in given):
        none = [np.full(len(words), np.nan) for words in tokens]
        logps = [n if x is None else x for x, n in zip(given, none, strict=True)]
    captured = Captured(tokens, ids, logps=logps, prompts=prompts, notes=tuple(notes), path=path)
    try:
        captured.shape()
    except ValueError as error:
        raise DriftError(f"{path}: {error}") from error
    return captured


def likely_padding(*files: Captured) -> tuple[int, int, str] | None:
    """Return the token that probably pads the files, how many sequences show it, and the remedy in words, or None.

    The token is the one of which most sequences begin or end with three; None if no sequence begins or ends so. All
    files hold the same tokens.
    """
    paths = [file.path for file in files]
    runs = Counter(
        int(token)
        for words in files[0].tokens
        for token in {end[0] for end in (words[:3], words[-3:]) if len(words) > 3 and (end == end[0]).all()}
    )
    if not runs:
        return None
    token, many = runs.most_common(1)[0]
    remedies = [f"write {kind} without it" for kind in UNPADDED if any(path.suffix == kind for path in paths)]
    if any(path.suffix not in UNPADDED for path in paths):
        remedies.append(f"give --pad-token-id {token}")
    return token, many, " and ".join(remedies)


def _own(routes: RoutedExperts, path: Path, pad: int | None) -> Captured:
    """Return the sequences of a `RoutedExperts` that this package saved; rows without tokens are left out."""
    if routes.tokens is None or routes.attended is None:
        raise DriftError(f"{path}: these routes were saved without their tokens, so nothing says what they are of")
    notes: list[str] = []
    rows = _tokens_of(routes.tokens.where(routes.attended, -1), pad, notes)
    held = [b for b in range(len(rows)) if rows[b].any()]
    if not held:
        raise DriftError(f"{path} holds no sequence")
    ids, tokens, experts = routes.ids, routes.tokens, routes.num_experts
    return Captured(
        [tokens[b, rows[b]].numpy() for b in held],
        [ids[b, rows[b]].numpy() for b in held],
        routes.sites,
        experts=(experts,) * len(routes.sites) if isinstance(experts, int) else experts,
        notes=tuple(notes),
        path=path,
    )


def _tokens_of(tokens: torch.Tensor, pad: int | None, notes: list[str]) -> torch.Tensor:
    """Return a bool mask of a padded batch's real tokens: all ids but -1 or, if no id is -1, all but the `pad` tokens
    at either end of a row. Adds to `notes` what was done with `pad`."""
    there = tokens >= 0
    if pad is None:
        return there
    if not there.all():
        notes.append("the file says what is padding, --pad-token-id nothing")
        return there
    other = there & (tokens != pad)
    kept = there & (other.cumsum(1) > 0) & (other.flip(1).cumsum(1).flip(1) > 0)
    notes.append(f"--pad-token-id {pad} took out {count(int((there & ~kept).sum()), 'token')}")
    return kept


def _padded(
    path: Path, names: Sequence[str], read: Callable[[str], np.ndarray], pad: int | None, notes: list[str]
) -> list[tuple[np.ndarray, np.ndarray, np.ndarray | None]]:
    """Return the sequences (tokens, expert ids, log-probabilities or None) of a file of padded arrays.

    names: the arrays that the file has. read: reads one of them; arrays that are not needed are not read.
    """
    held = next((key for key in KEYS if key in names), None)
    if held is None or "routed_experts" not in names:
        some = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        raise DriftError(f"{path} holds {some or 'nothing'}; expected tokens and routed_experts")
    tokens, ids = read(held), read("routed_experts")
    if tokens.ndim != 2:
        raise DriftError(f"{path}: tokens are {list(tokens.shape)}, expected [B,T]")
    if tokens.dtype.kind == "u":  # torch has few kernels for unsigned integers
        tokens = tokens.astype(np.int64)
    if "attention_mask" in names:
        mask = read("attention_mask")
        if not ((mask == 0) | (mask == 1)).all():  # labels (-100) or weights would all count as tokens
            raise DriftError(f"{path}: attention_mask holds other values than 0 and 1 (or bool)")
        mask = mask.astype(bool)
        notes += [] if pad is None else ["the file says what is padding, --pad-token-id nothing"]
    else:
        mask = _tokens_of(torch.from_numpy(tokens), pad, notes).numpy()
    if mask.shape != tokens.shape or ids.shape[:2] != tokens.shape:
        raise DriftError(
            f"{path}: tokens {list(tokens.shape)}, attention_mask {list(mask.shape)} and routed_experts "
            f"{list(ids.shape)} do not fit each other: expected [B,T], [B,T] and [B,T,layers,K]"
        )
    logps, name = None, name_of(names)
    if name is not None:
        masks = [read(key) for key in MASKS if key in names]
        measured = next(iter(masks), None)
        if len(masks) > 1 and masks[0].shape == masks[1].shape:  # masks of what was sampled and of what is in the loss
            measured = masks[0] * masks[1]
        logps = padded_logps(name, read(name), measured, mask, str(path))
    rows = [b for b in range(len(tokens)) if mask[b].any()]
    return [(tokens[b, mask[b]], ids[b, mask[b]], None if logps is None else logps[b, mask[b]]) for b in rows]


def _lines(
    path: Path, K: int | None, notes: list[str], likely: Collection[int]
) -> tuple[list[tuple[Any, Any, np.ndarray | None]], list[str] | None]:
    """Return the sequences of a JSONL file and a key of each prompt, None unless all lines have `prompt_token_ids`."""
    found: list[tuple[Any, Any, np.ndarray | None]] = []
    prompts, flat = [], {}  # flat: sequences of int32, whose number of layers follows from all lines together
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"{path} line {number}"
            try:
                row = parse_json(line)
                if not isinstance(row, dict):
                    raise ValueError(f"a JSON {type(row).__name__} instead of an object")
                tokens = next((row[key] for key in KEYS if key in row), None)
                if tokens is None:
                    tokens = [*row["prompt_token_ids"], *row["token_ids"]]
                if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
                    raise ValueError("tokens are no list of token ids")
                inner = row.get("meta_info")
                ids = (inner if "routed_experts" not in row and isinstance(inner, dict) else row)["routed_experts"]
                if not ids:
                    raise ValueError(f"no routes: routed_experts are {ids!r}")
                ids, shaped = _decoded(ids, K) if isinstance(ids, str) else (np.array(ids), True)
                if not shaped:
                    flat[len(found)] = where
            except (ValueError, KeyError, TypeError) as error:
                why = f"there is no {error}" if isinstance(error, KeyError) else error
                raise DriftError(
                    f"{where}: {why}; expected tokens (or prompt_token_ids and token_ids) and routed_experts [rows, "
                    "layers, K]"
                ) from error
            if ids.ndim != 3 or not np.issubdtype(ids.dtype, np.integer):
                raise DriftError(
                    f"{where}: routed_experts are {ids.dtype} {list(ids.shape)}, expected [rows, layers, K]"
                )
            found.append((tokens, ids, logps_of(row, tokens, where)))
            prompts += [json.dumps(row["prompt_token_ids"])] if "prompt_token_ids" in row else []
    if flat and K is not None:
        layers = _layers({where: (found[b][1].size, len(found[b][0])) for b, where in flat.items()}, K, likely)
        found = [(t, ids.reshape(-1, layers, K) if b in flat else ids, x) for b, (t, ids, x) in enumerate(found)]
        notes.append(f"base64 of int32 was read as {count(layers, 'layer')} of {count(K, 'expert')} (--top-k)")
    return found, prompts if len(prompts) == len(found) else None


def _layers(sizes: dict[str, tuple[int, int]], K: int, likely: Collection[int]) -> int:
    """Return the number of layers of expert ids that have no shape.

    sizes: the line -> its numbers of ids and of tokens. The number of layers must fit every line, with a row for each
    token or for each but the last; of several that fit, those in `likely` are preferred. Raises DriftError unless
    exactly one number is left.
    """
    fit: set[int] | None = None
    for where, (ids, tokens) in sizes.items():
        here = {ids // (rows * K) for rows in (tokens - 1, tokens) if rows and ids and ids % (rows * K) == 0}
        fit = here if fit is None else fit & here
        if not fit:
            raise DriftError(
                f"{where}: {ids} ids are no whole number of layers of {K} experts for {tokens} tokens, or another than "
                "in the lines before"
            )
    first = next(iter(sizes))
    fit = fit and (fit & set(likely) or fit)
    if fit is None or len(fit) > 1:
        raise DriftError(f"{first}: {sizes[first][0]} ids may be of {sorted(fit or ())} layers: give nested lists")
    return fit.pop()


def _decoded(payload: str, K: int | None) -> tuple[np.ndarray, bool]:
    """Decode base64 into expert ids, and tell whether they have their shape (a .npy file) or not yet (int32)."""
    try:
        raw = base64.b64decode(payload, validate=True)
    except binascii.Error as error:
        raise ValueError(f"routed_experts are no base64: {error}") from error
    if raw.startswith(NPY):
        return decode_npy(payload), True
    if K is None:
        raise ValueError("base64 of int32 does not say how many experts a token has: give --top-k")
    return np.frombuffer(raw, dtype="<i4")[:, None, None], False
