"""Random numbers that follow from a seed and a purpose, not from the past.

Runs with one seed share prompts, sampling noise and minibatch order whatever their method does with them, and a resumed
run draws what the uninterrupted one would have.
"""

import hashlib
import random

import torch


def seeded_generator(seed: int, purpose: str, step: int, index: int = 0) -> torch.Generator:
    """A torch generator (CPU) for one purpose at one step.

    >>> a, b = (torch.rand(1, generator=seeded_generator(0, "sample", step=3)) for _ in range(2))
    >>> a == b
    tensor([True])
    """
    digest = hashlib.sha256(f"{seed}/{purpose}/{step}/{index}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def seeded_random(seed: int, purpose: str, *index: int) -> random.Random:
    """The same for the choice of prompts, as `random.Random`."""
    return random.Random("/".join(map(str, (seed, purpose, *index))))
