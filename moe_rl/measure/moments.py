"""Variances and covariances of the parts of a log-ratio, over tokens and over sequences; batches add with `+`."""

from dataclasses import dataclass
from itertools import combinations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from moe_rl.routing.counts import quotient

PARTS = ("weight", "routing", "interaction")


@dataclass(frozen=True, eq=False)
class Moments:
    """Count, mean and scatter matrix of P quantities; float64. `+` pools exactly (Chan, Golub and LeVeque 1979).

    scatter: Σ (x - mean)(x - mean)ᵀ; divided by count - 1 it is the covariance.

    >>> values = torch.tensor([[1.0, 2.0], [3.0, 2.0], [5.0, 8.0]])
    >>> (Moments.of(values[:1]) + Moments.of(values[1:])).covariance
    tensor([[ 4.,  6.],
            [ 6., 12.]], dtype=torch.float64)
    """

    count: int
    mean: Float[Tensor, " P"]
    scatter: Float[Tensor, "P P"]

    @staticmethod
    def of(values: Float[Tensor, "N P"]) -> "Moments":
        """Return the moments of N rows of values."""
        values = values.double()
        if not len(values):
            return Moments(0, values.new_zeros(values.shape[1]), values.new_zeros(values.shape[1], values.shape[1]))
        mean = values.mean(0)
        centred = values - mean
        return Moments(len(values), mean, centred.T @ centred)

    def __add__(self, other: "Moments") -> "Moments":
        count = self.count + other.count
        if not count:
            return self
        gap = other.mean - self.mean
        scatter = self.scatter + other.scatter + torch.outer(gap, gap) * (self.count * other.count / count)
        return Moments(count, self.mean + gap * (other.count / count), scatter)

    @property
    def covariance(self) -> Float[Tensor, "P P"]:
        """The unbiased covariance matrix; NaN with fewer than two rows."""
        return self.scatter / (self.count - 1) if self.count > 1 else torch.full_like(self.scatter, float("nan"))


@dataclass(frozen=True, eq=False)
class Variance:
    """The variance of a log-ratio split into its three parts, at one level (token or sequence).

    Σ variance + 2 Σ covariance = total, exactly. `share` is Cov(part, log r) / Var(log r): each part gets half of its
    covariances. Shares sum to 1; one may be negative, of a part that works against the others.
    """

    moments: Moments

    @property
    def total(self) -> float:
        """Var(log r), nats² (squared nats per token at sequence level)."""
        return float(self.moments.covariance.sum())

    def var(self, part: str) -> float:
        """Return the variance of one part."""
        return self.cov(part, part)

    def cov(self, a: str, b: str) -> float:
        """Return the covariance of two parts, which enters the total twice."""
        return float(self.moments.covariance[PARTS.index(a), PARTS.index(b)])

    def share(self, part: str) -> float:
        """Return Cov(part, log r) / Var(log r), a fraction; NaN if log r does not vary.

        Adding half of the interaction's share to each of the other two gives the shares of the Shapley split."""
        return quotient(float(self.moments.covariance[PARTS.index(part)].sum()), self.total)

    def rows(self) -> dict[str, float]:
        """Return the numbers by name: variance, var_*, cov_* (each counts twice in the total) and share_*."""
        return {
            "variance": self.total,
            **{f"var_{part}": self.var(part) for part in PARTS},
            **{f"cov_{a}_{b}": self.cov(a, b) for a, b in combinations(PARTS, 2)},
            **{f"share_{part}": self.share(part) for part in PARTS},
        }


@dataclass(frozen=True, eq=False)
class Shares:
    """Moments of the parts at token and at sequence level, and the effect of averaging over a sequence on each part.

    inverse_lengths: Σ 1/n over the measured sequences, with n a sequence's number of measured tokens.
    """

    tokens: Moments
    sequences: Moments
    inverse_lengths: float

    @staticmethod
    def of(parts: Float[Tensor, "B T P"], mask: Bool[Tensor, "B T"]) -> "Shares":
        """Return the moments of parts over tokens and over sequence means.

        parts: any P of them, the three of a log-ratio in the order of PARTS; mask: the measured tokens."""
        lengths = mask.sum(1)
        measured = lengths > 0
        means = torch.where(mask[..., None], parts, 0.0).sum(1)[measured] / lengths[measured, None]
        return Shares(Moments.of(parts[mask]), Moments.of(means), float((1 / lengths[measured].double()).sum()))

    def __add__(self, other: "Shares") -> "Shares":
        lengths = self.inverse_lengths + other.inverse_lengths
        return Shares(self.tokens + other.tokens, self.sequences + other.sequences, lengths)

    @property
    def token(self) -> Variance:
        """The variance over tokens, the level of GRPO's ratios."""
        return Variance(self.tokens)

    @property
    def sequence(self) -> Variance:
        """The variance over sequence means, the level of GSPO's ratios (arXiv 2507.18071, eq. 7)."""
        return Variance(self.sequences)

    @property
    def harmonic_length(self) -> float:
        """Harmonic mean length of the sequences, 1 / E[1/n]: averaging divides independent tokens' variance by it."""
        return quotient(self.sequences.count, self.inverse_lengths)

    def averaging(self, part: str) -> float:
        """Return Var over tokens / Var over sequence means, by which averaging divides the part's variance."""
        return quotient(self.token.var(part), self.sequence.var(part))

    def design_effect(self, part: str) -> float:
        """Return Kish's design effect of a part, Var over sequence means * harmonic length / Var over tokens.

        The value is 1 if the tokens of a sequence are independent, so that a mean over |y| tokens divides the variance
        by |y|; above 1 if tokens move together, so that averaging removes less; below 1 if they cancel.

        A sequence ratio divides Var(routing) by harmonic_length / design_effect and leaves the token variance
        unchanged. Whether *training* with GSPO also lowers routing noise, and does not only average it, is seen by
        comparing `token.var("routing")` between arms.
        """
        return quotient(self.harmonic_length, self.averaging(part))

    def rows(self) -> dict[str, float | int]:
        """Return all numbers under the names with which they are logged."""
        return {
            "tokens": self.tokens.count,
            "sequences": self.sequences.count,
            "harmonic_length": self.harmonic_length,
            **{f"token_{name}": value for name, value in self.token.rows().items()},
            **{f"sequence_{name}": value for name, value in self.sequence.rows().items()},
            **{f"averaging_{part}": self.averaging(part) for part in PARTS},
            **{f"design_effect_{part}": self.design_effect(part) for part in PARTS},
        }


@dataclass(frozen=True, eq=False)
class SiteShares:
    """Moments of each routing site's effect alone, of its effect last, and of the whole replay effect.

    tokens, sequences: moments of (alone of sites 0..L-1, last of sites 0..L-1, whole), over tokens and over sequence
    means; see `Decomposition.site_alone` and `site_last`.
    """

    sites: tuple[str, ...]
    tokens: Moments
    sequences: Moments

    @staticmethod
    def of(
        sites: tuple[str, ...],
        alone: Float[Tensor, "L B T"],
        last: Float[Tensor, "L B T"],
        whole: Float[Tensor, "B T"],
        mask: Bool[Tensor, "B T"],
    ) -> "SiteShares":
        both = Shares.of(torch.cat([alone, last, whole[None]]).movedim(0, -1), mask)
        return SiteShares(sites, both.tokens, both.sequences)

    def __add__(self, other: "SiteShares") -> "SiteShares":
        return SiteShares(self.sites, self.tokens + other.tokens, self.sequences + other.sequences)

    def rows(self) -> dict[str, list[float]]:
        """Return lists by site: variances of both effects, over tokens and over sequences (nats²), and token shares.

        A share is Cov(site, whole) / Var(whole); shares sum to 1 over the sites only if the sites' effects add up."""
        number = len(self.sites)
        token, sequence = self.tokens.covariance, self.sequences.covariance
        share = token[:-1, -1] / token[-1, -1]  # NaN (0 / 0) if nothing varies
        found = {"token_var": token.diagonal()[:-1], "sequence_var": sequence.diagonal()[:-1], "token_share": share}
        return {
            f"{name}_{kind}": values.view(2, number)[row].tolist()
            for name, values in found.items()
            for row, kind in enumerate(("alone", "last"))
        }

    @property
    def whole(self) -> float:
        """Token variance of the whole replay effect, nats²."""
        return float(self.tokens.covariance[-1, -1])
