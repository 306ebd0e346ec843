"""Readers of files of prompts: JSONL, Parquet or plain text, row by row, with errors that name the line."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from moe_rl.checks import parse_json
from moe_rl.drift.errors import DriftError
from moe_rl.rollout.engine_config import COLDEST

FORMS = (
    '{"text": ...}, {"prompt": ...}, {"prompt": ..., "completion": ...}, {"messages": [{"role": ..., "content": ...}]} '
    'or {"prompt_ids": [...], "completion_ids": [...]}'
)
IDS = ("prompt_ids", "completion_ids")
KEYS = ("text", "prompt", "completion", "messages", *IDS, "temperature", "sampled_from", "sampler_sha256")
TABLES = (".parquet", ".pq")


def kind_of(row: dict[str, Any]) -> str:
    """Return what of an example is measured: `samples` given as tokens, `completions`, `texts`, or bare `prompts`."""
    if "completion_ids" in row:
        return "samples"
    chat = row.get("messages", row.get("prompt"))
    if "completion" in row or (isinstance(chat, list) and len(chat) > 1 and chat[-1]["role"] == "assistant"):
        return "completions"
    return "texts" if "text" in row else "prompts"


def is_chat(row: dict[str, Any]) -> bool:
    """Return whether an example holds messages, which need a chat template."""
    return "messages" in row or isinstance(row.get("prompt"), list)


def rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line or row from 1, example) of a file: `.txt` has a text per line, `.parquet` rows, any other is JSONL.

    Raises DriftError naming the line that holds no example.
    """
    if not path.is_file():
        raise DriftError(f"--prompts: there is no file {path}")
    kind = path.suffix.lower()
    if kind in (".csv", ".tsv"):
        raise DriftError(
            f"--prompts: {path}: {kind} is not read; write JSON lines, or a .parquet with such columns: {FORMS}"
        )
    for number, row in _table(path) if kind in TABLES else _lines(path, plain=kind == ".txt"):
        problem = _problem(row)
        if problem:
            unit = "row" if kind in TABLES else "line"
            raise DriftError(f"{path} {unit} {number}: {problem}; expected {FORMS}")
        yield number, row


def _lines(path: Path, plain: bool) -> Iterator[tuple[int, Any]]:
    """Yield (line from 1, example) of a file of JSON lines or, if `plain`, of texts; empty lines are skipped."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                text = line.decode("utf-8-sig")
                row = {"text": text.rstrip("\r\n")} if plain else parse_json(text)
            except ValueError as error:  # json's and unicode's errors are ValueErrors
                lines = f"one object per line, {FORMS}; plain texts, one per line, belong in a .txt"
                what, wanted = ("UTF-8 text", "one text per line") if plain else ("JSON", lines)
                raise DriftError(f"{path} line {number} is not {what} ({error}); expected {wanted}") from error
            yield number, row


def _table(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield (row from 1, example) of a Parquet file; null values are left out of an example."""
    number = 0
    try:
        with pq.ParquetFile(path) as file:
            columns = [name for name in file.schema_arrow.names if name in KEYS]
            if not columns:
                names = ", ".join(map(repr, file.schema_arrow.names[:5]))
                raise DriftError(f"{path} has none of the columns {', '.join(KEYS)} ({names}); expected {FORMS}")
            for batch in file.iter_batches(batch_size=256, columns=columns):
                for row in batch.to_pylist():
                    number += 1
                    yield number, {name: value for name, value in row.items() if value is not None}
    except (pa.ArrowException, OSError) as error:  # pyarrow raises OSError for damaged pages
        raise DriftError(f"{path} cannot be read as Parquet: {error}") from error


def _problem(row: Any) -> str | None:
    """Return in words why a row is no example, or None."""
    if not isinstance(row, dict):
        return f"a JSON {type(row).__name__} instead of an object"
    if set(IDS) & row.keys():
        return _problem_of_ids(row)
    if not {"text", "prompt", "messages"} & row.keys():
        keys = ", ".join(map(repr, list(row)[:5])) or "no keys"
        return f"none of the keys text, prompt and messages ({keys})"
    if "completion" in row and not {"prompt", "messages"} & row.keys():
        return "a completion without a prompt"
    chat = [row[key] for key in ("messages", "prompt", "completion") if isinstance(row.get(key), list)]
    for messages in chat:
        if not messages or not all(
            isinstance(m, dict) and isinstance(m.get("role"), str) and "content" in m for m in messages
        ):
            return "messages must be a list of objects with role and content, not empty"
        # Qwen3's template would leave out content that is no text, without a word.
        if not all(isinstance(m["content"], str | None) for m in messages):
            return "the content of a message must be a text, not a list of parts"
    for key in ("text", "prompt", "completion", "messages"):
        wanted = list if key == "messages" else str
        if key in row and row[key] not in chat and not isinstance(row[key], wanted):
            return f"{key} is a {type(row[key]).__name__}"
    if isinstance(row.get("completion"), list) and not isinstance(row.get("messages", row.get("prompt")), list):
        return "a completion of messages needs a prompt of messages"
    if "completion" in row and "prompt" not in row and row["messages"][-1]["role"] == "assistant":
        return "a completion after messages that end with a turn of the assistant"
    if isinstance(row.get("completion"), list) and row["completion"][-1]["role"] != "assistant":
        return "a completion must end with a turn of the assistant, which is what is measured"
    if kind_of(row) == "completions" and row.get("temperature", 1) != 1:
        return "a temperature beside a completion as text, which is scored at 1: it is of prompt_ids and completion_ids"
    return None


def _problem_of_ids(row: dict[str, Any]) -> str | None:
    """Return in words why a row of token ids is no example, or None."""
    for key in IDS:
        ids = row.get(key)
        if not isinstance(ids, list) or not all(type(token) is int and 0 <= token < 2**31 for token in ids):
            return f"{key} must be a list of token ids"
    if not row["prompt_ids"]:
        return "prompt_ids is empty: the first token of a completion must follow something"
    temperature = row.get("temperature", 1.0)
    if type(temperature) not in (int, float) or not (temperature == 0 or COLDEST <= temperature < float("inf")):
        return f"temperature must be 0 (greedy) or a number of at least {COLDEST}"
    wrong = [key for key in ("sampled_from", "sampler_sha256") if not isinstance(row.get(key, ""), str)]
    return f"{wrong[0]} must be a text" if wrong else None
