"""Readers of the log-probabilities of sampled tokens that an engine wrote into files of captured routes."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from moe_rl.drift.errors import DriftError

NAMES = ("logprobs", "rollout_log_probs", "output_token_logprobs")
MASKS = ("response_mask", "loss_mask")
ROUNDING = 1e-3
"""How far above 0 a log-probability may be, as rounding, nats."""
IMPOSSIBLE = -9999.0
"""The log-probability that vLLM's server writes in place of -inf, nats."""


def name_of(keys: Mapping[str, Any] | Sequence[str]) -> str | None:
    """Return the name under which a file or line has log-probabilities, or None."""
    return next((name for name in NAMES if name in keys), None)


def logps_of(row: Mapping[str, Any], tokens: Any, where: str) -> Float[np.ndarray, " n"] | None:
    """Return the log-probability of each of a sequence's `tokens`, nats, NaN where the engine gave none.

    None if the row has no log-probabilities at all. row: a line of JSON or a sample of slime. The values end with the
    last token. If the row says how many tokens were sampled (`token_ids`, or `response_length`), there must be one for
    each sampled token, for each token, or for each but the first. A null, and a token that `loss_mask` (or
    `response_mask`) takes out, counts as no log-probability.

    Raises DriftError naming `where` and the position: a number of values that does not fit, values of other tokens, or
    values that are no log-probabilities.
    """
    inner = row.get("meta_info")
    inner = inner if isinstance(inner, Mapping) else {}
    row = {key: value for key, value in {**inner, **row}.items() if value is not None}
    # an integer is no value: a row may repeat a request's setting, logprobs=1
    row = {k: v for k, v in row.items() if k not in NAMES or not isinstance(v, int)}
    name = name_of(row)
    if name is None:
        return None
    try:
        values, named = _forms(row[name])
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
        raise DriftError(
            f"{where}: {name} are in no form that is known ({type(error).__name__}: {error}); expected numbers, "
            "[number, token id, ...] each (SGLang), or what vLLM's server writes (content, or token_logprobs)"
        ) from error
    n, found = len(tokens), len(values)
    if not found:
        return None
    sampled = row.get("response_length", len(row["token_ids"]) if "token_ids" in row else None)
    if found > n or (sampled is not None and found not in {n, n - 1, sampled}):
        known = f", {sampled} of them sampled" if sampled is not None else ""
        raise DriftError(f"{where}: {name} has {found} values for {n} tokens{known}")
    start = n - found
    for i, token in enumerate(named):
        if token != tokens[start + i]:
            raise DriftError(
                f"{where}, position {start + i}: {name} is of token {token}, the sequence has {tokens[start + i]} there"
            )
    held = [value is not None for value in values]
    for mask in (np.asarray(row[key]).reshape(-1) for key in MASKS if key in row):
        if len(mask) != found or not ((mask == 0) | (mask == 1)).all():
            raise DriftError(f"{where}: the mask beside {name} is not {found} of 0 and 1")
        held = [there and bool(keep) for there, keep in zip(held, mask, strict=True)]
    whole = np.full(n, np.nan)
    for i, (value, there) in enumerate(zip(values, held, strict=True)):
        if there:
            whole[start + i] = _number(value, f"{where}, position {start + i}", name)
    return _checked(whole, np.concatenate([np.zeros(start, bool), held]), where, name)


def padded_logps(
    name: str, values: np.ndarray, mask: np.ndarray | None, tokens: Bool[np.ndarray, "B T"], path: str
) -> Float[np.ndarray, "B T"]:
    """Return the log-probabilities of a padded batch, nats, NaN where the engine gave none.

    name: the array's name in messages. values: `[B,T]`, or `[B,R]` of the last R columns. mask: of the shape of
    `values`, 1 where a value counts. tokens: True on the batch's tokens. Raises DriftError: there is no mask, shapes do
    not fit, the mask is 1 on padding, or a value is no log-probability."""
    if mask is None:
        raise DriftError(
            f"{path}: {name} without {' or '.join(MASKS)} of their shape: what stands at the prompt and the padding "
            "cannot be told from log-probabilities"
        )
    B, T = tokens.shape
    if values.shape != mask.shape or values.ndim != 2 or len(values) != B or values.shape[1] > T:
        raise DriftError(
            f"{path}: {name} {list(values.shape)} and their mask {list(mask.shape)} do not fit tokens {[B, T]}: "
            "expected [B,T] both, or [B,R] of the last R columns"
        )
    if not ((mask == 0) | (mask == 1)).all():
        raise DriftError(f"{path}: the mask beside {name} holds other values than 0 and 1 (or bool)")
    if values.dtype.kind not in "fiu":
        raise DriftError(f"{path}: {name} are {values.dtype}, expected numbers")
    held = np.concatenate([np.zeros((B, T - values.shape[1]), bool), mask == 1], axis=1)
    if (held & ~tokens).any():
        b, t = (int(i) for i in np.argwhere(held & ~tokens)[0])
        raise DriftError(f"{path}: sequence {b}: the mask beside {name} is 1 on padding, first in column {t}")
    whole = np.full((B, T), np.nan)
    whole[:, T - values.shape[1] :] = values
    for b in range(B):
        row = tokens[b]
        whole[b, row] = _checked(whole[b, row], held[b, row], f"{path} sequence {b}", name)
    return np.where(held, whole, np.nan)


def _checked(
    values: Float[np.ndarray, " n"], held: Bool[np.ndarray, " n"], where: str, name: str
) -> Float[np.ndarray, " n"]:
    """Return the values where `held`, NaN elsewhere, and -inf for a probability of 0.

    Raises DriftError: a value is NaN or above 0 by more than ROUNDING, or the first token has one.
    """
    wrong = held & ~(values <= ROUNDING)
    if wrong.any():
        at = int(np.flatnonzero(wrong)[0])
        raise DriftError(
            f"{where}, position {at}: {name} is {values[at]:g}; a log-probability is at most 0. Are they probabilities?"
        )
    if len(held) and held[0]:
        raise DriftError(
            f"{where}, position 0: {name} has a value for the first token, which follows nothing; null belongs there. "
            "Are they those of the next token?"
        )
    return np.where(held, np.where(values <= IMPOSSIBLE, -np.inf, values), np.nan)


def _number(value: Any, where: str, name: str) -> float:
    """Return a value as a float. Raises DriftError: it is no number."""
    try:
        if isinstance(value, bool | str):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise DriftError(f"{where}: {name} is {repr(value)[:40]}, not a number") from error


def _forms(given: Any) -> tuple[list[Any], list[int]]:
    """Return the values of log-probabilities in any known form, and the token ids beside them, [] if there are none."""
    if isinstance(given, Mapping):  # vLLM's server: of a completion or, with `content`, of a chat or of token ids
        entries = given.get("content")
        words = given.get("tokens", []) if entries is None else [entry["token"] for entry in entries]
        values = given["token_logprobs"] if entries is None else [entry["logprob"] for entry in entries]
        ids = [
            int(str(word).removeprefix("token_id:")) for word in words if isinstance(word, int) or "token_id:" in word
        ]
        return list(values), ids if len(ids) == len(values) else []
    values = given.tolist() if hasattr(given, "tolist") else list(given)
    if values and isinstance(values[0], list | tuple):
        return [entry[0] for entry in values], [int(entry[1]) for entry in values]
    return values, []
