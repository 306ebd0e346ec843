"""What `moe-rl floor` can be told; imports nothing, so that its help answers at once."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class FloorOptions:
    """What to measure, on what, and how."""

    model: str
    """A folder in hub format, a hub id, or a folder of LoRA adapters (PEFT)."""
    prompts: Path
    """JSONL, each line {"text": ...}, {"prompt": ...}, {"prompt": ..., "completion": ...} or {"messages": [...]}; the
    same as columns of a .parquet; or a .txt of one text per line. Completions are measured where there are any, else
    the whole text."""
    output: Path | None = None
    """Folder to write; by default runs/floor/MODEL. An earlier one there is replaced."""
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    """Each is measured by itself, and against the first."""
    batch_size: int = 8
    """Sequences of the reference's forward; what "batch 1" is compared with."""
    sequences: int = 64
    """The first so many examples are used."""
    max_tokens: int | None = None
    """Longer examples are cut to their first tokens; by default 1024, or as many positions as the model has."""
    decode_tokens: int = 64
    """Tokens of each sequence that are decoded one by one; 0 leaves decoding out."""
    experts: tuple[str, ...] = ("eager", "grouped_mm")
    """Experts implementations to compare with the model's own. batched_mm copies weights for every token: small models
    only."""
    experts_implementation: str | None = None
    """The reference's; by default transformers' choice."""
    adapter: Path | None = None
    """Folder of LoRA adapters (PEFT) to put on MODEL; also compared with themselves merged into the weights."""
    tokenizer: str | None = None
    """Folder or hub id of a tokenizer; by default the model's."""
    device: str | None = None
    """cpu, cuda, cuda:1, mps; by default the GPU if there is one."""
    json: bool = False
    """Print JSON instead of a table."""
    trust_remote_code: bool = False
    """Run code that comes with the model. Leave it off unless you trust its author."""
