"""What `moe-rl drift` and `moe-rl check-routes` can be told; imports nothing, so that their help answers at once."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

MAX_TOKENS = 2048


@dataclass(frozen=True)
class DriftOptions:
    """What to compare, on what, and how."""

    old: str
    """The first checkpoint: a folder in hub format or a hub id."""
    new: str
    """The second, of the same architecture."""
    prompts: Path
    """JSONL, each line {"text": ...}, {"prompt": ...}, {"prompt": ..., "completion": ...} or {"messages": [...]}; the
    same as columns of a .parquet; or a .txt of one text per line. Completions are measured where there are any, else
    the whole text."""
    output: Path | None = None
    """Folder to write; by default runs/drift/OLD_vs_NEW. An earlier comparison there is replaced."""
    batch_size: int = 8
    """Sequences per forward."""
    max_tokens: int = MAX_TOKENS
    """Longer examples are cut to their first tokens."""
    dtype: str = "float32"
    """float32, bfloat16 or float16, for both. In float32 what differs is the checkpoints' doing."""
    device: str | None = None
    """cpu, cuda, cuda:1, mps; by default the GPU if there is one."""
    per_site: bool = True
    """Also take the log-ratio apart by routing site: two more forwards for each of them (--no-per-site)."""
    gate_swap: bool = True
    """Also route with the routers of one on the body of the other: which of the two moves the selection
    (--no-gate-swap)."""
    one_at_a_time: bool = False
    """Hold one model in memory instead of two: three passes and a cache on disk, the same numbers. Taken by itself
    where two do not fit."""
    floor_sequences: int = 64
    """Noise floor: score OLD again in other arithmetic (repeated, other batch shapes, other experts implementation, a
    bf16 copy) on the first batches, until this many sequences; 0 leaves it out."""
    tokenizer: str | None = None
    """Folder or hub id of a tokenizer that serves both; by default theirs, which must agree."""
    trust_remote_code: bool = False
    """Run code that comes with the checkpoints. Leave it off unless you trust their author."""


@dataclass(frozen=True)
class CheckOptions:
    """Which captured routes to compare with which model."""

    file: Path
    """.safetensors (RoutedExperts.save, or tokens and routed_experts), .npz, .jsonl (a sequence per line) or .pt (a
    dump of slime)."""
    model: str
    """The model that the routes are said to be of: a folder in hub format or a hub id."""
    batch_size: int = 4
    """Sequences per forward."""
    max_sequences: int = 64
    """Compare the first so many sequences."""
    max_tokens: int = 2048
    """Cut longer sequences to their first tokens."""
    dtype: str = "float32"
    """float32, bfloat16 or float16: of the model's own scoring. Its floor is measured with a copy in bfloat16
    (float32, where this is not)."""
    device: str | None = None
    """cpu, cuda, cuda:1, mps; by default the GPU if there is one."""
    pad_token_id: int | None = None
    """Token that pads, where a padded file has no mask: leading and trailing ones are no part of a sequence."""
    json: bool = False
    """Print JSON."""
    trust_remote_code: bool = False
    """Run code that comes with the model. Leave it off unless you trust its author."""


@dataclass(frozen=True)
class SeriesOptions:
    """Checkpoints of one training, each held against the first and against the one before it."""

    checkpoints: tuple[str, ...]
    """Folders in hub format or hub ids, in order; a folder that holds several stands for them (`choose.chosen`)."""
    prompts: Path
    output: Path | None = None
    batch_size: int = 8
    max_tokens: int = MAX_TOKENS
    dtype: str = "float32"
    device: str | None = None
    gate_swap: bool = True
    floor_sequences: int = 64
    tokenizer: str | None = None
    trust_remote_code: bool = False


def pick(kind: Any, options: Any) -> Any:
    """An instance of another dataclass of options from the fields that both have."""
    return kind(**{field.name: getattr(options, field.name) for field in fields(kind)})
