"""Tiny checkpoints of several families, saved as a person would have them."""

import base64
import copy
import errno
import io
import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    JetMoeConfig,
    JetMoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from moe_rl.cli import main
from moe_rl.drift.options import DriftOptions
from moe_rl.drift.run import run_drift
from moe_rl.measure.noise_floor import rounded_copy
from moe_rl.measure.scoring import TokenBatch, score_live
from moe_rl.routing import RoutedExperts
from moe_rl.training.route_tables import write_route_table

ALPHABET = "abcdefghij =+"
TEXTS = ["abc=def", "ghij+a", "aa bb cc dd", "j=i+h", "fedcba", "a+b=c d+e=f"]
COMMON = {
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


def build(family, tokenizer, **changes):
    torch.manual_seed(0)
    common = COMMON | {"vocab_size": len(tokenizer), "pad_token_id": 0} | changes
    experts, moe_size = common.pop("experts", 6), common.pop("moe_size", 12)
    if family == "qwen3_moe":
        config = Qwen3MoeConfig(**common, num_experts=experts, moe_intermediate_size=moe_size, head_dim=8)
        return Qwen3MoeForCausalLM(config)
    if family == "olmoe":
        return OlmoeForCausalLM(OlmoeConfig(**common, num_experts=experts))
    if family == "jetmoe":
        del common["max_position_embeddings"], common["num_attention_heads"]
        return JetMoeForCausalLM(JetMoeConfig(**common, num_local_experts=experts, kv_channels=8))
    if family == "granitemoe":
        return GraniteMoeForCausalLM(GraniteMoeConfig(**common, num_local_experts=experts))
    del common["num_experts_per_tok"]
    return LlamaForCausalLM(LlamaConfig(**common))


LENGTHS, PROMPT = (40, 28), 5
"""Of the sequences of `captured`, and how many tokens of each were not sampled."""


def captured(folder):
    """A model of which the first of three layers is dense, and what its bf16 copy chose and said, as an engine returns
    it."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=2,
        head_dim=16, intermediate_size=32, moe_intermediate_size=16, num_experts=8, num_experts_per_tok=2,
        mlp_only_layers=[0], initializer_range=0.3,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config).eval()
    model.save_pretrained(folder)
    ids = torch.randint(0, 64, (2, LENGTHS[0]))
    mask = torch.arange(LENGTHS[0]) < torch.tensor(LENGTHS)[:, None]
    said = score_live(rounded_copy(model), TokenBatch(ids, mask, mask & (torch.arange(LENGTHS[0]) >= PROMPT)))
    engine = np.zeros((2, LENGTHS[0], 3, 2), np.int32)
    engine[:, :, 1:] = said.routes.ids.numpy()
    return SimpleNamespace(
        model=str(folder), folder=folder, ids=ids, mask=mask, engine=engine, routes=said.routes, logps=said.logps
    )


def captured_rows(place):
    """Tokens and routes of each sequence; the last token was never fed back."""
    return [(place.ids[b, :n].tolist(), place.engine[b, : n - 1]) for b, n in enumerate(LENGTHS)]


def int32(ids):
    return ids.astype("<i4").tobytes()


def npy(ids):
    file = io.BytesIO()
    np.save(file, ids.astype(np.uint8))
    return file.getvalue()


FORMS = ("lines", "base64", "vllm", "npz", "tensors", "own", "slime", "parquet")


def write(place, path, form):
    """A file of one of the kinds that captures have."""
    if form == "lines":
        lines = [{"tokens": words, "routed_experts": ids.tolist()} for words, ids in captured_rows(place)]
    elif form in ("base64", "vllm"):  # of SGLang, and of vLLM's server
        lines = [
            {
                "prompt_token_ids": words[:5],
                "token_ids": words[5:],
                "routed_experts": base64.b64encode((npy if form == "vllm" else int32)(ids)).decode(),
            }
            for words, ids in captured_rows(place)
        ]
    if form in ("lines", "base64", "vllm"):
        path = path / "capture.jsonl"
        path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    elif form == "npz":
        path = path / "capture.npz"
        np.savez(path, input_ids=place.ids, routed_experts=place.engine, attention_mask=place.mask)
    elif form == "tensors":
        path = path / "capture.safetensors"
        tokens = place.ids.masked_fill(~place.mask, -1)
        save_file({"tokens": tokens, "routed_experts": torch.from_numpy(place.engine)}, path)
    elif form == "own":
        path = path / "capture.safetensors"
        tokens = place.ids.masked_fill(~place.mask, -1)
        RoutedExperts(place.routes.ids, place.routes.sites, 8, tokens=tokens).save(path)
    elif form == "parquet":
        path = path / "capture.parquet"
        tokens = place.ids.masked_fill(~place.mask, -1)
        write_route_table(path, RoutedExperts(place.routes.ids, place.routes.sites, 8, tokens=tokens))
    elif form == "slime":
        path = path / "capture.pt"
        torch.save(
            {"samples": [{"tokens": w, "rollout_routed_experts": torch.tensor(i)} for w, i in captured_rows(place)]},
            path,
        )
    return path


def save(model, tokenizer, folder):
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return folder


def padded(texts, tokenizer):
    """Token ids padded on the right, and where they are."""
    width = max(map(len, texts))
    ids = torch.tensor([tokenizer(text)["input_ids"] + [0] * (width - len(text)) for text in texts])
    return ids, torch.arange(width) < torch.tensor([[len(text)] for text in texts])


def compared(output, prompts, *paths, **options):
    """The results of two checkpoints on a text, without a noise floor."""
    options = DriftOptions(tuple(map(str, paths)), prompts, output, floor_sequences=0, **options)
    return json.loads((run_drift(options) / "drift.json").read_text())


def refused(capsys, *arguments, status=1):
    """What a command says that ends with this status."""
    with pytest.raises(SystemExit) as stop:
        main([*map(str, arguments)])
    assert stop.value.code == status
    return capsys.readouterr().err


class Gone(io.StringIO):
    """The end of a pipe that nobody reads any more."""

    def write(self, text):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")


def stands_alone(page, figures):
    """A page without scripts or holes, with so many figures."""
    words = re.sub(r"<svg.*?</svg>", "", page, flags=re.DOTALL)
    assert not re.search(r"\bnan\b|\bNone\b", words) and not re.search(r'(src|href)="(?!#|data:)', page)
    return page.count("<svg") == figures and "<script" not in page


def moved(model, scale=0.05):
    new = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in new.parameters():
            parameter += scale * torch.randn(parameter.shape, generator=generator)
    return new
