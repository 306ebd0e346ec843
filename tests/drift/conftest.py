"""The tokenizer of the tiny checkpoints."""

import pytest
from drift_models import ALPHABET

from moe_rl.policy.tiny import char_tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    return char_tokenizer(ALPHABET)
