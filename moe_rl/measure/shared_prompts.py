"""Responses to one prompt in one row behind it, so that a forward computes the prompt once, and little padding.

Of G responses of R tokens to a prompt of P, G (P + R) positions and the padding become P + G (R - 1): the last token of
a sequence predicts nothing. An attention mask keeps responses apart, and positions count from each sequence's start:
every token sees what it saw in a row of its own, and log-probabilities and gradients are the same, up to rounding.
(Prefix Grouper, arXiv 2506.05433, does it with two attentions; here it is one with a mask.)

    check_shared_prompts(model)  # once: does it compute such rows rightly?
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
        source: flat position in the batch of the token at each place, of a shared prompt that in one of its sequences;
            -1 on padding.
        place: flat position in the rows of each token of the batch; -1 on padding and on each sequence's last token.
        input_ids, position_ids: of the rows; 0 on padding.
        allowed: `[r,i,j]`: token i of row r attends to token j.
        batch, attended: tokens and attention mask of the batch.
        longest: tokens of its longest sequence.
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
        """What to call a model with.

        Raises:
            ValueError: it attends otherwise than by this mask in sequences, or rows, as long as these.
        """
        if why := too_long(lm.config.get_text_config(), self.longest, self.source.shape[1]):
            raise ValueError(f"{type(lm).__name__} cannot share prompts in this batch: {why}. Train without sharing")
        # Added to the scores: of a bool mask every layer would make and keep such a one for itself.
        mask = torch.zeros(self.allowed.shape, dtype=lm.dtype, device=self.allowed.device)
        mask.masked_fill_(~self.allowed, torch.finfo(lm.dtype).min)
        return {"input_ids": self.input_ids, "attention_mask": mask[:, None], "position_ids": self.position_ids}

    def places(
        self, batch: Int[Tensor, "B T"], attended: Bool[Tensor, "B T"], flat: Int[Tensor, " n"]
    ) -> Int[Tensor, " n"]:
        """Flat positions in the rows of some tokens of the batch, given as flat positions in it.

        Raises:
            ValueError: these rows are of another batch.
        """
        same = torch.equal(self.attended, attended) and torch.equal(self.batch[attended], batch[attended])
        if not same:
            raise ValueError("these rows are of another batch: call share_prompts with the same tokens and masks")
        return self.place.flatten()[flat]

    @property
    def tokens(self) -> int:
        """Places that are not padding."""
        return int((self.source >= 0).sum())

    def pack(self, routes: RoutedExperts) -> RoutedExperts:
        """Routes of the batch as those of the rows; -1 on padding.

        Raises:
            ValueError: routes of another shape, or that differ on a prompt which is shared.
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
        """Routes of the rows as those of the batch; -1 where it has no place."""
        return routes.take(self.place)


def share_prompts(
    input_ids: Int[Tensor, "B T"],
    attention_mask: Bool[Tensor, "B T"] | Int[Tensor, "B T"],
    completion_mask: Bool[Tensor, "B T"] | Int[Tensor, "B T"],
    *,
    routes: RoutedExperts | None = None,
    longest: int | None = None,
) -> SharedPrompts:
    """Lay a batch out so that responses share their prompts.

    A prompt is what stands before the first token of `completion_mask`. Sequences share it where they have the same
    tokens there and, with `routes`, the same routes: passes of other shapes may have routed one prompt differently,
    and each response keeps its own.

    Args:
        routes: those that will be replayed.
        longest: tokens that a row may have, unless one sequence has more; default: twice the longest sequence. More
            means fewer copies of a prompt, and more attention, which is quadratic in a row.

    Raises:
        ValueError: masks or routes of another shape; no sequence has two tokens.

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
        input_ids=_at(input_ids.flatten(), sources),
        position_ids=_at((attended.long().cumsum(1) - 1).flatten(), sources),
        allowed=_allowed(segment, response),
        batch=input_ids,
        attended=attended,
        longest=of_a_sequence,
    )


def packed(position_ids: Int[Tensor, "B T"], attended: Bool[Tensor, "B T"]) -> Bool[Tensor, "B T"] | None:
    """Where rows hold several sequences one behind the other ("padding-free"): True on the first token of each,
    which follows nothing. None where no position within a row is 0. Many models of transformers keep such sequences
    apart by their positions, if they are given no attention mask; others do not (`packed_rows.leak`).

    Raises:
        ValueError: there is padding, which only a mask tells.
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
    """Why sequences of so many tokens, in rows of `width`, are attended to otherwise than this mask says; None: they
    are not."""
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


def _at(values: Shaped[Tensor, " n"], index: Int[Tensor, "R N"]) -> Shaped[Tensor, "R N"]:
    """The values at these positions, 0 where there is none."""
    return values[index.clamp(min=0)].masked_fill_(index < 0, 0)


def _allowed(segment: Int[Tensor, "R N"], response: Int[Tensor, "R N"]) -> Bool[Tensor, "R N N"]:
    """Whom each token attends to: of its segment, earlier ones of the prompt (response -1) and of its response; padding
    to itself, as a softmax over nothing is NaN."""
    N = segment.shape[1]
    one_segment = segment[:, :, None] == segment[:, None, :]
    one_response = (response[:, :, None] == response[:, None, :]) | (response[:, None, :] < 0)
    itself = torch.eye(N, dtype=torch.bool, device=segment.device)
    return one_segment & one_response & torch.ones_like(itself).tril() | itself


class _Segment(NamedTuple):
    """A prompt and some of its responses, as flat positions in the batch; the prompt as each of them has it."""

    prompts: list[np.ndarray]
    responses: list[np.ndarray]

    @property
    def size(self) -> int:
        return len(self.prompts[0]) + sum(map(len, self.responses))


def _segments(
    ids: np.ndarray, attended: np.ndarray, completion: np.ndarray, routes: RoutedExperts | None, longest: int
) -> list[_Segment]:
    """Prompts with as many of their responses as fit a row of `longest`."""
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
    """Indices in few parts whose sizes sum to at most `most` (one that is larger has a part of its own) and are nearly
    equal, as the rows that they become are padded to the longest: the largest first, each into the emptiest of as many
    parts as the first that has room would make; these, where that does not fit."""
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
