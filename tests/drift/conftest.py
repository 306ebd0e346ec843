"""The tokenizer of the tiny checkpoints, and pairs of them."""

import json

import pytest
from drift_models import ALPHABET, TEXTS, build, captured, moved, save

from moe_rl.drift import run, series
from moe_rl.policy.tiny import char_tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    return char_tokenizer(ALPHABET)


@pytest.fixture(scope="session")
def saved(tmp_path_factory, tokenizer):
    """family -> (old folder, new folder), made when first asked for."""
    made = {}

    def pair(family):
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            old = build(family, tokenizer)
            made[family] = save(old, tokenizer, folder / "old"), save(moved(old), tokenizer, folder / "new")
        return made[family]

    return pair


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    return captured(tmp_path_factory.mktemp("model"))


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


@pytest.fixture
def undrawn(monkeypatch):
    monkeypatch.setattr(run, "draw", lambda *_: [])
    monkeypatch.setattr(series, "draw", lambda *_: [])
