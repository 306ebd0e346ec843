"""Batches in which responses share their prompt: one row holds a prompt and several responses to it.

A forward then computes the prompt once, and little padding. For G responses of R tokens to a prompt of P tokens,
P + G (R - 1) positions take the place of G (P + R) and their padding: the last token of a sequence predicts nothing. An
attention mask keeps responses apart, and positions count from each sequence's start: every token attends to the same
tokens as in a row of its own, and log-probabilities and gradients are the same, up to rounding. (Prefix Grouper, arXiv
2506.05433, does this with two attentions; here it is one attention with a mask.)

    check_shared_prompts(model)  # once: raises if the model does not compute such rows rightly
    shared = share_prompts(*tokens, routes=routes)
    with replay_routes(model, shared.pack(routes)):
        logps = token_logps(model, *tokens, shared=shared).logps
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor
from transformers import PreTrainedModel

from moe_rl.objectives.ratios import as_bool_mask, check_shapes
from moe_rl.routing import RoutedExperts


@dataclass(frozen=True, eq=False)
class SharedPrompts:
    """A batch `[B,T]` as R rows of N tokens; made by `share_prompts`.

    Attributes:
        source: flat position in the batch of the token at each place of the rows; for a token of a shared prompt, its
            position in one of the sequences; -1 on padding.
        place: flat position in the rows of each token of the batch; -1 on padding and on each sequence's last token.
        input_ids, position_ids: those of the rows; 0 on padding.
        allowed: `[r,i,j]`: token i of row r attends to token j.
        batch, attended: tokens and attention mask of the batch.
        longest: number of tokens of the batch's longest sequence.
    """

    source: Int[Tensor, "R N"]
    place: Int[Tensor, "B T"]
    input_ids: Int[Tensor, "R N"]
    position_ids: Int[Tensor, "R N"]
    allowed: Bool[Tensor, "R N N"]
    batch: Int[Tensor, "B T"]
    attended: Bool[Tensor, "B T"]
    longest: int

    def inputs(self, lm: PreTrainedModel) -> dict[str, Tensor]:
        """Return the arguments with which to call a model: tokens, attention mask and positions of the rows.

        Raises:
            ValueError: in sequences or rows of this length, the model does not attend as the mask says.
        """
        if why := too_long(lm.config.get_text_config(), self.longest, self.source.shape[1]):
            raise ValueError(f"{type(lm).__name__} cannot share prompts in this batch: {why}. Train without sharing")
        # A float mask, which is added to the scores: from a bool mask every layer would make and keep one of its own.
        mask = torch.zeros(self.allowed.shape, dtype=lm.dtype, device=self.allowed.device)
        mask.masked_fill_(~self.allowed, torch.finfo(lm.dtype).min)
        return {"input_ids": self.input_ids, "attention_mask": mask[:, None], "position_ids": self.position_ids}

    def places(
        self, batch: Int[Tensor, "B T"], attended: Bool[Tensor, "B T"], flat: Int[Tensor, " n"]
    ) -> Int[Tensor, " n"]:
        """Return the flat positions in the rows of the batch's tokens at the flat positions `flat`.

        Raises:
            ValueError: these rows are of another batch.
        """
        same = torch.equal(self.attended, attended) and torch.equal(self.batch[attended], batch[attended])
        if not same:
            raise ValueError("these rows are of another batch: call share_prompts with the same tokens and masks")
        return self.place.flatten()[flat]

    @property
    def tokens(self) -> int:
        """Number of places in the rows that are not padding."""
        return int((self.source >= 0).sum())

    def pack(self, routes: RoutedExperts) -> RoutedExperts:
        """Return the batch's routes laid out as the rows; -1 on padding.

        Raises:
            ValueError: routes of another shape, or routes that differ on a shared prompt.
        """
        if routes.shape[:2] != self.place.shape:
            raise ValueError(
                f"routes of {tuple(routes.shape[:2])} tokens do not fit a batch of {tuple(self.place.shape)}: those of "
                "another batch, or without its padding (RoutedExperts.realign)?"
            )
        packed, there = routes.take(self.source), (self.place >= 0).to(routes.device)
        back, given = (one.packed.view(torch.uint8)[there] for one in (packed.take(self.place), routes))
        if not torch.equal(back, given):
            raise ValueError("a prompt is shared by responses whose routes on it differ: give routes= to share_prompts")
        return packed

    def unpack(self, routes: RoutedExperts) -> RoutedExperts:
        """Return the rows' routes laid out as the batch; -1 on tokens that have no place in the rows."""
        return routes.take(self.place)


def share_prompts(
    input_ids: Int[Tensor, "B T"],
    attention_mask: Bool[Tensor, "B T"] | Int[Tensor, "B T"],
    completion_mask: Bool[Tensor, "B T"] | Int[Tensor, "B T"],
    *,
    routes: RoutedExperts | None = None,
    longest: int | None = None,
) -> SharedPrompts:
    """Return a batch laid out as rows in which responses share their prompts.

    A prompt is all tokens before the first one of `completion_mask`. Sequences share a prompt if they have the same
    tokens in it and, with `routes`, the same routes: passes of other shapes may have routed one prompt differently,
    and each response keeps its own routes.

    Args:
        routes: the routes that will be replayed.
        longest: the most tokens of a row, unless one sequence has more; default: twice the longest sequence. Longer
            rows hold fewer copies of a prompt, but attention is quadratic in the length of a row.

    Raises:
        ValueError: masks or routes of another shape; masks of other values than 0 and 1; `longest` is below 1; no
            sequence has two tokens.

    >>> ids = torch.tensor([[1, 2, 5, 6], [1, 2, 7, 0]])
    >>> mask = ids > 0
    >>> share_prompts(ids, mask, mask & (ids > 2)).input_ids  # 6 and 7 are last tokens
    tensor([[1, 2, 5]])
    """
    routed = None if routes is None else routes.packed[:, :, 0, 0]
    masks = {"attention_mask": attention_mask, "completion_mask": completion_mask}
    check_shapes(input_ids, {**masks, "routes": routed}, "input_ids")
    if longest is not None and longest < 1:
        raise ValueError(f"longest counts tokens and must be at least 1, got {longest}")
    attended = as_bool_mask(attention_mask, "attention_mask")
    completion = as_bool_mask(completion_mask, "completion_mask")
    of_a_sequence = int(attended.sum(1).max()) if attended.numel() else 0
    most = longest or 2 * of_a_sequence
    segments = _segments(input_ids.cpu().numpy(), attended.cpu().numpy(), completion.cpu().numpy(), routes, most)
    rows = [[segments[i] for i in row] for row in _parts([segment.size for segment in segments], most)]
    R, N = len(rows), max((sum(segment.size for segment in row) for row in rows), default=0)
    if not N:
        raise ValueError("no sequence has two tokens, so that nothing is predicted")
    source, segment_of, response_of = (np.full((R, N), -1) for _ in range(3))
    place = np.full(input_ids.shape, -1)
    for r, row in enumerate(rows):
        end = 0
        for number, part in enumerate(row):
            segment_of[r, end : end + part.size] = number
            start, end = end, end + len(part.prompts[0])
            source[r, start:end] = part.prompts[0]
            place.flat[np.stack(part.prompts)] = np.arange(r * N + start, r * N + end)
            for tokens in part.responses:
                start, end = end, end + len(tokens)
                source[r, start:end] = tokens
                response_of[r, start:end] = start
                place.flat[tokens] = np.arange(r * N + start, r * N + end)
    arrays = (source, place, segment_of, response_of)
    sources, places, segment, response = (torch.from_numpy(array).to(input_ids.device) for array in arrays)
    return SharedPrompts(
        source=sources,
        place=places,
        input_ids=_values_at(input_ids.flatten(), sources),
        position_ids=_values_at((attended.long().cumsum(1) - 1).flatten(), sources),
        allowed=_allowed(segment, response),
        batch=input_ids,
        attended=attended,
        longest=of_a_sequence,
    )


def packed(position_ids: Int[Tensor, "B T"], attended: Bool[Tensor, "B T"]) -> Bool[Tensor, "B T"] | None:
    """Return True on each sequence's first token, `[B,T]`, if rows hold several sequences; else None.

    Rows hold several sequences one after the other ("padding-free") if positions begin at 0 again within a row. Many
    models of transformers keep such sequences apart by their positions, if no attention mask is given; others do not
    (`packed_rows.leak`).

    Raises:
        ValueError: such rows have padding, which needs a mask.
    """
    first = (position_ids == 0) & attended
    if not bool((first[:, 1:] & attended[:, :-1]).any()):
        return None
    if not bool(attended.all()):
        raise ValueError(
            "position_ids begin anew within a row, so that it holds several sequences, and attention_mask has padding: "
            "sequences are kept apart only in rows without any"
        )
    return first


def too_long(config: Any, longest: int, width: int) -> str | None:
    """Return why a model would not attend as `SharedPrompts.allowed` says; None if it does.

    `longest`: tokens of the longest sequence; `width`: tokens of a row."""
    whole = set(getattr(config, "layer_types", None) or ()) == {"full_attention"}
    windowed = not whole and getattr(config, "use_sliding_window", True) is not False
    for name in ("sliding_window", "attention_chunk_size") if windowed else ():
        window = getattr(config, name, None)
        if window and window < longest:
            return f"its attention has a window ({name} {window}), and a sequence has {longest} tokens"
    if getattr(config, "attn_temperature_tuning", False) and width >= getattr(config, "floor_scale", 0):
        return f"its attention is scaled by the place in a row, which has {width} (floor_scale {config.floor_scale})"
    rope = getattr(config, "rope_parameters", None) or {}
    for one in (rope, *(part for part in rope.values() if isinstance(part, dict))):
        first = one.get("original_max_position_embeddings") or config.max_position_embeddings
        if one.get("rope_type") in ("dynamic", "longrope") and longest > first:
            return (
                f"its rotary embedding ({one['rope_type']}) depends on the longest sequence, which has {longest} tokens"
            )
    return None


def _values_at(values: Shaped[Tensor, " n"], index: Int[Tensor, "R N"]) -> Shaped[Tensor, "R N"]:
    """Return the values at the positions `index`; 0 where the position is -1."""
    return values[index.clamp(min=0)].masked_fill_(index < 0, 0)


def _allowed(segment: Int[Tensor, "R N"], response: Int[Tensor, "R N"]) -> Bool[Tensor, "R N N"]:
    """Return the attention mask of rows: True where token i of a row attends to token j.

    A token attends, in its segment, to itself and to earlier tokens of the prompt (response -1) and its own response.
    Padding attends to itself, too, as a softmax over nothing is NaN."""
    N = segment.shape[1]
    one_segment = segment[:, :, None] == segment[:, None, :]
    one_response = (response[:, :, None] == response[:, None, :]) | (response[:, None, :] < 0)
    itself = torch.eye(N, dtype=torch.bool, device=segment.device)
    return one_segment & one_response & torch.ones_like(itself).tril() | itself


class _Segment(NamedTuple):
    """A prompt and some of its responses, as flat positions in the batch; `prompts` has each sequence's own copy."""

    prompts: list[np.ndarray]
    responses: list[np.ndarray]

    @property
    def size(self) -> int:
        return len(self.prompts[0]) + sum(map(len, self.responses))


def _segments(
    ids: np.ndarray, attended: np.ndarray, completion: np.ndarray, routes: RoutedExperts | None, longest: int
) -> list[_Segment]:
    """Return the batch as segments: prompts, each with as many of its responses as fit a row of `longest` tokens."""
    packed = None if routes is None else routes.packed.cpu().numpy()
    groups: dict[bytes, list[tuple[np.ndarray, np.ndarray]]] = {}
    for b in range(len(ids)):
        columns = attended[b].nonzero()[0][:-1]
        start = int(np.searchsorted(columns, completion[b].argmax())) if completion[b].any() else len(columns)
        prompt = columns[:start]
        same = ids[b, prompt].tobytes() + (b"" if packed is None else packed[b, prompt].tobytes())
        flat = b * ids.shape[1] + columns
        groups.setdefault(same, []).append((flat[:start], flat[start:]))
    found = []
    for group in groups.values():
        for part in _parts([len(response) for _, response in group], longest - len(group[0][0])):
            found.append(_Segment([group[i][0] for i in part], [group[i][1] for i in part]))
    return found


def _parts(sizes: Sequence[int], most: int) -> list[list[int]]:
    """Split indices into few parts with nearly equal sums of sizes, each at most `most`.

    A size above `most` gets a part of its own. Equal sums save padding, as the rows made of the parts are padded to the
    longest. First-fit by falling size gives the number of parts; each index then goes to the emptiest of that many
    parts. If a part becomes too large that way, the parts of first-fit are returned."""
    order = sorted(range(len(sizes)), key=lambda i: -sizes[i])
    tight: list[list[int]] = []
    for i in order:
        place = next((part for part in tight if sum(sizes[j] for j in part) + sizes[i] <= most), None)
        if place is None:
            tight.append([i])
        else:
            place.append(i)
    even: list[list[int]] = [[] for _ in tight]
    for i in order:
        min(even, key=lambda part: sum(sizes[j] for j in part)).append(i)
    fits = all(len(part) == 1 or sum(sizes[j] for j in part) <= most for part in even)
    return even if fits else tight
