"""What `moe-rl drift` can be told; imports nothing, so that its help answers at once."""

from dataclasses import dataclass
from pathlib import Path

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
