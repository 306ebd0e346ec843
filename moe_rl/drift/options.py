"""Command-line options of `moe-rl drift`, `floor`, `check-routes` and `compare-routes`.

This module imports no torch, so that `--help` answers at once."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, arg

from moe_rl.drift.errors import DriftError


@dataclass(frozen=True)
class DriftOptions:
    """Options of `moe-rl drift`: the checkpoints to compare, the text, and how.

    Two checkpoints are compared with each other; of a series of one training, each with the first and with the one
    before it."""

    checkpoints: tuple[str, ...]
    """Folders in hub format or of LoRA adapters (PEFT), run folders or hub ids; a folder that holds several checkpoints
    stands for them."""
    prompts: Path
    """JSONL, each line {"text": ...}, {"prompt": ...}, {"prompt": ..., "completion": ...}, {"messages": [...]} or
    {"prompt_ids": [...], "completion_ids": [...]}, as in samples.jsonl of an earlier call; the same as columns of a
    .parquet; or a .txt of one text per line.
    Completions are measured where there are any (of messages, the assistant's last turn), else the whole text."""
    output: Path | None = None
    """Folder to write; by default runs/drift/OLD_vs_NEW, of a series FIRST_to_LAST. An earlier comparison there is
    replaced."""
    sample: int | None = None
    """Have OLD, of a series the first, write so many responses to each prompt, and measure these instead: then ratios
    and k3 are those of RL, which samples from the old policy. Completions in the file are not used; a text
    without a prompt is taken whole as the prompt. Responses are written to samples.jsonl, which --prompts takes
    again."""
    max_new_tokens: int = 256
    """Longest response, with --sample."""
    temperature: float = 1.0
    """Responses are sampled from, and scored under, softmax(logits / temperature), with --sample; 0: greedy."""
    seed: int = 0
    """Seed of the random numbers of --sample."""
    batch_size: int = 8
    """Sequences per forward."""
    max_tokens: int | None = None
    """Longer examples are cut to their first tokens; by default 2048, or as many positions as the model has."""
    dtype: str = "float32"
    """float32, bfloat16 or float16, for all checkpoints. In float32, differences come from the checkpoints."""
    device: str | None = None
    """cpu, cuda, cuda:1, mps; by default the GPU if there is one."""
    per_site: bool = True
    """Of two checkpoints: also take the log-ratio apart by routing site, two more forwards for each of them
    (--no-per-site)."""
    gate_swap: bool = True
    """Also route with the routers of one on the body of the other: which of the two moves the selection
    (--no-gate-swap)."""
    one_at_a_time: bool = False
    """Of two checkpoints: hold one in memory instead of both, with three passes and a cache on disk, for the same
    numbers. Chosen automatically if two do not fit. A series always holds one."""
    floor_sequences: int = 64
    """Noise floor: score OLD again in other arithmetic (repeated, other batch shapes, other experts implementation, a
    bf16 copy) on the first batches, until this many sequences; 0 leaves it out."""
    base: str | None = None
    """Folder or hub id of the model that LoRA adapters are of; by default the one that each names, if it is here."""
    tokenizer: str | None = None
    """Folder or hub id of a tokenizer that serves both; by default theirs, which must agree (in their chat templates
    where --prompts holds messages)."""
    trust_remote_code: bool = False
    """Run code that comes with the checkpoints. Leave it off unless you trust their author."""


@dataclass(frozen=True)
class CheckOptions:
    """Check whether captured routes are what a model chooses when it scores the same tokens; names the fault if they
    are not: all zeros, wrong shape, a shift, permuted layers, physical ids, duplicates, ids out of range, prefix-cache
    hits. If the file has the engine's log-probabilities, also says how far the model's are from them, and how much of
    that is routing. Exit status 0 if the routes are the model's within its arithmetic, else 1."""

    file: Annotated[Path, Positional, arg(metavar="FILE")]
    """.safetensors (RoutedExperts.save, or tokens and routed_experts), .npz, .jsonl (a sequence per line), .pt (a dump
    of slime) or .parquet (routes of a run folder)."""
    model: str
    """The model that the routes are said to be of: a folder in hub format, a run folder or a hub id."""
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
    """Token that pads, where arrays have neither a mask nor -1 there: leading and trailing ones are no part of a
    sequence."""
    temperature: float = 1.0
    """Temperature of the file's log-probabilities, if it has any: that of sampling, or 1 for raw ones (vLLM's
    default)."""
    json: bool = False
    """Print JSON."""
    trust_remote_code: bool = False
    """Run code that comes with the model. Leave it off unless you trust its author."""


@dataclass(frozen=True)
class CompareOptions:
    """Compare two files of routes of the same tokens: those of the rollout and of the training engine, say, or from
    before and after an update. No model is loaded. Says how many slots, sites and tokens changed, how even the load of
    the experts is on both sides and, where both files have log-probabilities, how far these are apart; names what is no
    change of routing: all zeros, a shift, permuted layers, physical ids, duplicates, routes of other tokens. Exit
    status 1 if it finds such a fault, or no token to compare, else 0."""

    old: Annotated[Path, Positional, arg(metavar="OLD")]
    """.safetensors (RoutedExperts.save, or tokens and routed_experts), .npz, .jsonl (a sequence per line), .pt (a dump
    of slime) or .parquet (routes of a run folder)."""
    new: Annotated[Path, Positional, arg(metavar="NEW")]
    """A file of any of these kinds, of the same tokens."""
    output: Path | None = None
    """Folder to write compare.json and sites.csv to. An earlier comparison there is replaced; a folder that holds
    anything else is refused."""
    experts: int | None = None
    """How many experts a layer has, for their load; by default what the files say, if they do."""
    top_k: int | None = None
    """Experts per token. Only the base64 of SGLang, which does not say it, needs this."""
    pad_token_id: int | None = None
    """Token that pads, where arrays have neither a mask nor -1 there: leading and trailing ones are no part of a
    sequence."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True)
class FloorOptions:
    """Measure what arithmetic alone does to a model's routes and log-probabilities at equal weights: batch shape,
    padding, decoding, dtype, experts implementation, merged adapters; and how much of it is routing."""

    model: Annotated[str, Positional, arg(metavar="MODEL")]
    """A folder in hub format, a run folder, a hub id, or a folder of LoRA adapters (PEFT)."""
    prompts: Path
    """JSONL, each line {"text": ...}, {"prompt": ...}, {"prompt": ..., "completion": ...}, {"messages": [...]} or
    {"prompt_ids": [...], "completion_ids": [...]}, as in samples.jsonl of moe-rl drift; the same as columns of a
    .parquet; or a .txt of one text per line.
    Completions are measured where there are any (of messages, the assistant's last turn), else the whole text."""
    output: Path | None = None
    """Folder to write; by default runs/floor/MODEL. An earlier one there is replaced."""
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    """Dtypes to measure the model in: each by itself, and against the first."""
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
    """Experts implementation of the reference; by default transformers' choice."""
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


def check_least(options: Any, **least: int) -> None:
    """Raise DriftError for the first of these options that is below its least value; None is not checked."""
    for name, low in least.items():
        value = getattr(options, name)
        if value is not None and value < low:
            raise DriftError(f"--{name.replace('_', '-')}: at least {low}, got {value}")
