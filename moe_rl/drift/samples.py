"""Responses that OLD itself samples to the prompts: the text on which ratios and k3 are those of a policy update."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from rich.console import Console
from torch import nn

from moe_rl.drift.checkpoints import fingerprint
from moe_rl.drift.errors import DriftError
from moe_rl.drift.options import DriftOptions, check_least
from moe_rl.drift.output import partial_of, place_of, progress
from moe_rl.drift.prompts import Text, aligned, in_batches
from moe_rl.files import naming
from moe_rl.rollout.completions import UNWRITTEN, end_tokens
from moe_rl.rollout.engine import ModelEngine, seeded_generator
from moe_rl.rollout.engine_config import COLDEST

Load = Callable[[], nn.Module]
FILE = "samples.jsonl"
"""Name of the file of responses in the output folder; `--prompts` takes it again."""


def check_sampling(options: DriftOptions, text: Text, output: Path) -> None:
    """Raise DriftError for everything that can be wrong with sampling before a model is loaded."""
    if text.path.resolve().is_relative_to(partial_of(output)):
        raise DriftError(f"--prompts: {text.path} lies in a folder that is emptied first; move it elsewhere")
    if options.sample is None:
        for name in ("max_new_tokens", "temperature", "seed"):
            if getattr(options, name) != getattr(DriftOptions, name):
                raise DriftError(f"--{name.replace('_', '-')} is of --sample G, which was not given")
        return
    check_least(options, sample=1, max_new_tokens=1)
    if "samples" in text.holds.kinds:
        raise DriftError(
            f"--sample: {text.path} holds responses already, several to a prompt. Measure them as they are, or "
            "give the prompts that they were sampled for"
        )
    if options.device is not None and str(options.device).startswith("mps"):
        raise DriftError("--sample: mps has no float64, which sampling draws with; take --device cpu")
    if options.temperature != 0 and not COLDEST <= options.temperature < float("inf"):
        raise DriftError(f"--temperature: 0 (greedy) or a number of at least {COLDEST}, got {options.temperature}")
    for _ in text.questions(options.max_new_tokens):
        pass


def to_measure(options: DriftOptions, text: Text, load: Load, folder: Path, output: Path) -> tuple[Text, Load]:
    """Return the text to measure, and the function that loads the first checkpoint.

    The text is `text` or, with `options.sample`, the responses of the model that `load` returns, written to `folder`.
    The returned function also sets the text's `of_old`: whether the loaded model wrote the samples, because by now its
    folder may hold other weights, or be read with another base or dtype. A file of prompts in `output`, which `folder`
    will replace, is copied to `folder`."""
    if text.path.resolve().is_relative_to(output.resolve()):
        shutil.copyfile(text.path, folder / text.path.name)
    if options.sample is not None:
        size = max(1, options.batch_size // options.sample)
        with (
            progress(Console(stderr=True), -(-text.number // size)) as tick,
            open(folder / FILE, "w", encoding="utf-8") as file,
        ):
            for lines in _sampled(load(), text, options, size):
                with naming(folder / FILE):
                    file.writelines(lines)
                    file.flush()  # so that a later error does not lose these responses
                tick()
        text = Text(folder / FILE, text.known, text.max_tokens, text.batch_size)

    def recognising() -> nn.Module:
        """Load the model, and note in `text.of_old` whether its fingerprint is the sampler's."""
        model = load()
        if text.holds.sampler_sha256 is not None:
            text.of_old = text.of_old is not False and text.holds.sampler_sha256 == fingerprint(model)
        return model

    return text, recognising


def _sampled(model: nn.Module, text: Text, options: DriftOptions, size: int) -> Iterator[list[str]]:
    """Yield the lines of the file of responses, those of `size` prompts at a time.

    The random numbers of a prompt depend only on the seed and the prompt's line.
    """
    G, N, tokenizer = options.sample or 0, options.max_new_tokens, text.known.tokenizer
    device = next(model.parameters()).device
    engine, ends = ModelEngine(model, tokenizer, options.batch_size), end_tokens(model, tokenizer).to(device)
    old = options.checkpoints[0]
    place = (
        str(place_of(old)) if Path(old).expanduser().exists() else old
    )  # absolute, so that it does not depend on the current folder
    common = {"temperature": options.temperature, "sampled_from": place, "sampler_sha256": fingerprint(model)}
    for held in in_batches(text.questions(N), size):
        padded_rows = aligned(held, tokenizer.pad_token_id)
        drawn = [seeded_generator(options.seed, "drift", example.line) for example in held]
        uniform = torch.cat([torch.rand(G, N, generator=one, dtype=torch.float64) for one in drawn]).to(device)
        ids, mask = padded_rows.input_ids.to(device), padded_rows.attention_mask.to(device)
        prompt = torch.arange(len(held) * G, device=device) // G
        tokens, _, _ = engine.decode(ids, mask, prompt, uniform, ends, options.temperature, record=False)
        lines = []
        for row, of in zip(tokens.tolist(), prompt.tolist(), strict=True):
            parts = {"prompt": held[of].ids, "completion": [token for token in row if token != UNWRITTEN]}
            texts = {name: tokenizer.decode(part) for name, part in parts.items()}
            whole = {**texts, **{f"{name}_ids": part for name, part in parts.items()}, **common}
            lines.append(json.dumps(whole, ensure_ascii=False) + "\n")
        yield lines
