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
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor
from transformers import PreTrainedModel

from moe_rl.objectives.ratios import as_bool_mask
from moe_rl.routing import RoutedExperts

SHORTEST = 128
"""Tokens that a row may always have: attention over so few costs less than another copy of a prompt."""


@dataclass(frozen=True, eq=False)
class SharedPrompts:
    """A batch `[B,T]` as R rows of N tokens; made by `share_prompts`.

    Attributes:
        source: flat position in the batch of the token at each place, of a shared prompt that in one of its sequences;
            -1 on padding.
        place: flat position in the rows of each token of the batch; -1 on padding and on each sequence's last token.
        input_ids, position_ids: of the rows; 0 on padding.
        allowed: `[r,i,j]`: token i of row r attends to token j.
    """

    source: Int[Tensor, "R N"]
    place: Int[Tensor, "B T"]
    input_ids: Int[Tensor, "R N"]
    position_ids: Int[Tensor, "R N"]
    allowed: Bool[Tensor, "R N N"]

    def inputs(self, lm: PreTrainedModel) -> dict[str, Tensor]:
        """What to call a model with."""
        mask = self.allowed[:, None]
        if lm.config.get_text_config()._attn_implementation == "eager":  # which adds it to the scores
            dtype = lm.dtype
            mask = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)
        return {"input_ids": self.input_ids, "attention_mask": mask, "position_ids": self.position_ids}

    def places(self, input_ids: Int[Tensor, "B T"], flat: Int[Tensor, " n"]) -> Int[Tensor, " n"]:
        """Flat positions in the rows of some tokens of the batch `input_ids`, given as flat positions in it.

        Raises:
            ValueError: these rows are of another batch.
        """
        if self.place.shape == input_ids.shape:
            places = self.place.flatten()[flat]
            if bool((places >= 0).all()) and torch.equal(self.input_ids.flatten()[places], input_ids.flatten()[flat]):
                return places
        raise ValueError(
            "these rows were laid out for another batch: call share_prompts with the same tokens and masks"
        )

    @property
    def tokens(self) -> int:
        """Places that are not padding."""
        return int((self.source >= 0).sum())

    def pack(self, routes: RoutedExperts) -> RoutedExperts:
        """Routes of the batch as those of the rows; -1 on padding."""
        return routes.take(self.source)

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
        longest: tokens that a row may have, unless one sequence has more; default: twice the longest sequence, and at
            least 128.

    Raises:
        ValueError: no sequence has two tokens.

    >>> ids = torch.tensor([[1, 2, 5, 6], [1, 2, 7, 0]])
    >>> mask = ids > 0
    >>> share_prompts(ids, mask, mask & (ids > 2)).input_ids  # 6 and 7 are last tokens
    tensor([[1, 2, 5]])
    """
    attended, completion = (
        as_bool_mask(attention_mask, "attention_mask"),
        as_bool_mask(completion_mask, "completion_mask"),
    )
    B, T = input_ids.shape
    longest = longest or max(2 * T, SHORTEST)
    segments = _segments(input_ids.cpu().numpy(), attended.cpu().numpy(), completion.cpu().numpy(), routes, longest)
    rows = [[segments[i] for i in row] for row in _first_fit([segment.size for segment in segments], longest)]
    R, N = len(rows), max((sum(segment.size for segment in row) for row in rows), default=0)
    if not N:
        raise ValueError("no sequence has two tokens, so that nothing is predicted")
    source, segment_of, response_of = (np.full((R, N), -1) for _ in range(3))
    place = np.full((B, T), -1)
    for r, row in enumerate(rows):
        end = 0
        for number, segment in enumerate(row):
            segment_of[r, end : end + segment.size] = number
            start, end = end, end + len(segment.prompts[0])
            source[r, start:end] = segment.prompts[0]
            place.flat[np.stack(segment.prompts)] = np.arange(r * N + start, r * N + end)
            for response in segment.responses:
                start, end = end, end + len(response)
                source[r, start:end] = response
                response_of[r, start:end] = start
                place.flat[response] = np.arange(r * N + start, r * N + end)
    index = torch.from_numpy(source).to(input_ids.device)
    positions = (attended.long().cumsum(1) - 1).flatten()
    return SharedPrompts(
        source=index,
        place=torch.from_numpy(place).to(input_ids.device),
        input_ids=_at(input_ids.flatten(), index),
        position_ids=_at(positions, index),
        allowed=_allowed(torch.from_numpy(segment_of), torch.from_numpy(response_of)).to(input_ids.device),
    )


def _at(values: Shaped[Tensor, " n"], index: Int[Tensor, "R N"]) -> Shaped[Tensor, "R N"]:
    """The values at these positions, 0 where there is none."""
    return values[index.clamp(min=0)].masked_fill_(index < 0, 0)


def _allowed(segment: Int[Tensor, "R N"], response: Int[Tensor, "R N"]) -> Bool[Tensor, "R N N"]:
    """Whom each token attends to: of its segment, earlier ones of the prompt (response -1) and of its response; padding
    to itself, as a softmax over nothing is NaN."""
    N = segment.shape[1]
    one_segment = segment[:, :, None] == segment[:, None, :]
    one_response = (response[:, :, None] == response[:, None, :]) | (response[:, None, :] < 0)
    return one_segment & one_response & torch.ones(N, N, dtype=torch.bool).tril() | torch.eye(N, dtype=torch.bool)


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
        for part in _first_fit([len(response) for _, response in group], longest - len(group[0][0])):
            found.append(_Segment([group[i][0] for i in part], [group[i][1] for i in part]))
    return found


def _first_fit(sizes: Sequence[int], most: int) -> list[list[int]]:
    """Indices in parts whose sizes sum to at most `most` (one that is larger has a part of its own): the largest first,
    each into the first part that has room."""
    parts: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        place = next((place for place, left in enumerate(room) if left >= sizes[i]), len(parts))
        if place == len(parts):
            parts.append([])
            room.append(most)
        parts[place].append(i)
        room[place] -= sizes[i]
    return parts
