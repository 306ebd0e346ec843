"""Methods of RoutedExperts that select sites, move rows, change the padding, and join batches."""

from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Int, Integer
from torch import Tensor

from moe_rl.routing.errors import RoutingError
from moe_rl.routing.packing import as_mask, repacked, words
from moe_rl.routing.sites import match_sites

Made = TypeVar("Made", bound="Moved")


class Moved:
    """Mixin of `RoutedExperts`: selecting sites, moving rows, changing the padding, joining batches."""

    packed: Tensor
    sites: tuple[str, ...]
    _tokens: Tensor | None
    shape: Any
    device: Any
    _experts: tuple[int, ...]
    _meta: dict[str, Any]
    _has_live: bool | None
    _trusted: Any  # constructor without checks, for valid parts
    _with: Any  # makes routes of the same sites with other rows

    def select(self: Made, sites: str | int | Iterable[str | int]) -> Made:
        """Return the routes of some sites, in the given order: names, shell patterns or indices (`match_sites`)."""
        chosen = match_sites(self.sites, sites)
        index = torch.tensor(chosen, device=self.device)
        packed = words(self.packed).index_select(2, index).view(self.packed.dtype)
        experts = [self._experts[i] for i in chosen]
        return self._trusted(
            repacked(packed, max(experts)),  # without the sites of many experts, the dtype may be smaller
            tuple(self.sites[i] for i in chosen),
            experts,
            tokens=self._tokens,
            meta=self._meta,
            has_live=None if self._has_live else self._has_live,
        )

    def take(self: Made, index: Int[Tensor, "r n"]) -> Made:
        """Return the routes of single tokens in other places. `index[i,j]` is a flat position in `[B*T]`, or -1 for a
        row without a route and with an unknown token."""
        at = index.to(self.device)
        nothing, at = (at < 0).flatten(), at.flatten().clamp(min=0)
        live = 255 if self.packed.dtype == torch.uint8 else -1
        packed = words(self.packed).flatten(0, 1).index_select(0, at).masked_fill_(nothing[:, None, None], live)
        tokens = None
        if self._tokens is not None:
            tokens = self._tokens.flatten().index_select(0, at).masked_fill_(nothing, -1).view(index.shape)
        return self._with(packed.view(self.packed.dtype).view(*index.shape, *self.shape[2:]), tokens)

    def realign(self: Made, from_mask: Tensor, to_mask: Tensor) -> Made:
        """Move the routes from one padding to another: left to right, packed to padded, longer to shorter.

        from_mask: `[B,T]` or `[B,T+1]`, True where the tokens of these routes are. After `generate()` the mask has
            one column more than the routes: the last token was never fed back, so it has no route (-1).
        to_mask: `[B,T']`, True where the same tokens shall be. The n-th True position of a row of from_mask
            moves to the n-th True position of that row of to_mask; all other rows become -1.

        Raises RoutingError if the masks are no tensors, hold other values than 0 and 1 or have other shapes, or if
        a sequence has different numbers of tokens in the two masks.

        >>> from moe_rl.routing import RoutedExperts
        >>> left = RoutedExperts(torch.tensor([[[[-1]], [[5]], [[6]]]]), ["gate"], 8)
        >>> left.realign(torch.tensor([[False, True, True]]), torch.tensor([[True, True]])).ids.flatten()
        tensor([5, 6])
        """
        b, t = self.shape[:2]
        given = {"from_mask": from_mask, "to_mask": to_mask}
        source, target = (as_mask(mask, name).to(self.device) for name, mask in given.items())
        if source.ndim != 2 or source.shape[0] != b or source.shape[1] not in (t, t + 1):
            raise RoutingError(
                f"from_mask must be [B,T] = [{b},{t}], or [{b},{t + 1}] if the last token has no route; "
                f"got {list(source.shape)}"
            )
        if target.ndim != 2 or target.shape[0] != b:
            raise RoutingError(f"to_mask must be [B,T'] with B = {b}, got {list(target.shape)}")
        counts = torch.stack([source.sum(-1), target.sum(-1)]).cpu()
        if not torch.equal(counts[0], counts[1]):
            row = int((counts[0] != counts[1]).nonzero()[0])
            raise RoutingError(
                f"sequence {row} has {int(counts[0, row])} tokens in from_mask and {int(counts[1, row])} in "
                "to_mask: the masks are of different batches, or one lacks the prompt or the last token"
            )
        live = 255 if self.packed.dtype == torch.uint8 else -1
        packed = move_tokens(words(self.packed), source, target, live).view(self.packed.dtype)
        tokens = None if self._tokens is None else move_tokens(self._tokens, source, target, -1)
        return self._with(packed, tokens)

    @classmethod
    def cat(cls: type[Made], parts: Iterable[Made]) -> Made:
        """Join batches along B. Values in `meta` that differ are dropped, except `hash_routed`, which keeps the sites
        of all parts; unknown tokens become -1.

        Raises RoutingError if sites, num_experts, T or K differ.
        """
        batches = list(parts)
        if not batches:
            raise RoutingError("cat needs at least one RoutedExperts")
        first = batches[0]
        for i, part in enumerate(batches):
            if (part.sites, part._experts, part.shape[3]) != (first.sites, first._experts, first.shape[3]):
                raise RoutingError(f"part {i} has other sites, experts or slots: {part} after {first}")
            if part.shape[1] != first.shape[1]:
                raise RoutingError(
                    f"part {i} has T = {part.shape[1]}, part 0 has {first.shape[1]}: bring them to one width "
                    "with realign first"
                )
        tokens = None
        if any(part._tokens is not None for part in batches):
            unknown = [torch.full(p.shape[:2], -1, dtype=torch.int32, device=p.device) for p in batches]
            tokens = torch.cat([u if p._tokens is None else p._tokens for u, p in zip(unknown, batches, strict=True)])
        shared = {k: v for k, v in first._meta.items() if all(p._meta.get(k, ...) == v for p in batches)}
        fixed = [site for site in first.sites if any(site in p._meta.get("hash_routed", ()) for p in batches)]
        if fixed:
            shared.setdefault("hash_routed", fixed)
        known = [part._has_live for part in batches]
        has_live = True if True in known else None if None in known else False
        return cls._trusted(
            torch.cat([words(part.packed) for part in batches]).view(first.packed.dtype),
            first.sites,
            first._experts,
            tokens=tokens,
            meta=shared,
            has_live=has_live,
        )


def move_tokens(
    values: Integer[Tensor, "B T *rest"],
    source: Bool[Tensor, "B T_source"],
    target: Bool[Tensor, "B T_target"],
    fill: int,
) -> Integer[Tensor, "B T_target *rest"]:
    """Move `values` from the n-th True position of `source` to the n-th True position of `target`. Other positions of
    `target` get `fill`, and so do those whose `source` lies behind the end of `values`."""
    b, t = values.shape[:2]
    extra = values.new_full((b, source.shape[1] - t, *values.shape[2:]), fill)
    moved = values.new_full((b, target.shape[1], *values.shape[2:]), fill)
    moved[target] = torch.cat([values, extra], dim=1)[source]
    return moved
