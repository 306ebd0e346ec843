"""The text that is measured on: JSONL, Parquet or plain text, checked whole before a model is loaded, then streamed."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from moe_rl.checks import parse_json
from moe_rl.drift.checkpoints import Checkpoints
from moe_rl.drift.errors import DriftError
from moe_rl.measure.scoring import TokenBatch

FORMS = (
    '{"text": ...}, {"prompt": ...}, {"prompt": ..., "completion": ...} or '
    '{"messages": [{"role": ..., "content": ...}]}'
)
KEYS = ("text", "prompt", "completion", "messages")
TABLES = (".parquet", ".pq")


@dataclass(frozen=True)
class Example:
    """One line, tokenised. Its measured tokens are `ids[start:]`."""

    line: int
    ids: list[int]
    start: int


@dataclass(frozen=True)
class TextBatch:
    """Examples as tensors, padded on the right."""

    lines: list[int]
    text: TokenBatch


class Text:
    """The examples of a file, from the beginning as often as they are wanted.

    known: the model's tokenizer, and how many tokens and positions it has. number: how many examples there are.
    truncated, empty: of the latest pass, those that were cut, and those without a token to measure; all passes are
    alike.

    Raises DriftError naming the line that is wrong.
    """

    def __init__(self, path: Path, known: Checkpoints, max_tokens: int, batch_size: int) -> None:
        self.path, self.known, self.max_tokens, self.batch_size = path, known, max_tokens, batch_size
        self.number, self.truncated, self.empty = check_file(path, known.tokenizer), 0, 0

    @property
    def most_batches(self) -> int:
        """Of a pass: as many if no example is left out."""
        return -(-self.number // self.batch_size)

    def examples(self) -> Iterator[Example]:
        """One at a time, cut to their first `max_tokens` tokens; those without a token to measure are counted.

        Prompt and completion are tokenised apart, as a sampler would have made them. Text and a prompt alone are
        measured from their second token on (the first follows nothing); of a chat that ends with the assistant, its
        last turn.

        Raises DriftError naming a line that cannot be tokenised, or has a token that is none of the model's.
        """
        self.truncated = self.empty = 0
        tokenizer, vocabulary = self.known.tokenizer, self.known.vocabulary
        for line, row in _rows(self.path):
            try:
                ids, start = tokenised(row, tokenizer)
            except Exception as error:  # tokenizers and chat templates raise many kinds
                raise DriftError(f"{self.path} line {line} cannot be tokenised: {error}") from error
            self.truncated += len(ids) > self.max_tokens
            ids = ids[: self.max_tokens]
            if ids and max(ids) >= vocabulary:
                name = tokenizer.convert_ids_to_tokens(max(ids))
                raise DriftError(
                    f"{self.path} line {line} has token {max(ids)} ({name!r}), and the model embeds {vocabulary} "
                    "tokens: a tokenizer of another model? --tokenizer names one"
                )
            if start >= len(ids):
                self.empty += 1
            else:
                yield Example(line, ids, start)

    def batches(self) -> Iterator[TextBatch]:
        """`batch_size` examples at a time, in the order of the file."""
        for held in in_batches(self.examples(), self.batch_size):
            batch = laid_out(held, self.known.tokenizer.pad_token_id, [0] * len(held))
            yield TextBatch([example.line for example in held], batch)

    def nothing_left(self) -> DriftError:
        """The error where no example has a token to measure."""
        return DriftError(
            f"{self.path}: no token to measure: {self.empty} of {self.number} examples are empty, a single token, or "
            f"have a prompt that fills the {self.max_tokens} tokens that count (--max-tokens; the model has "
            f"{self.known.max_length or 'no fixed number of'} positions)"
        )


def longest(asked: int | None, default: int, positions: int | None) -> int:
    """To how many tokens examples are cut: as asked for, or `default` or the model's positions, whichever is less.

    Raises DriftError where more are asked for than the model has positions (None: no fixed number).
    """
    if asked is not None and positions is not None and asked > positions:
        raise DriftError(f"--max-tokens: {asked} are more than the model's {positions} positions")
    return asked or min(default, positions or default)


def in_batches(source: Iterator[Example], size: int) -> Iterator[list[Example]]:
    while held := list(islice(source, size)):
        yield held


def check_file(path: Path, tokenizer: Any) -> int:
    """Read every line once, keep none: the number of examples. Raises DriftError naming the line that is wrong."""
    number = 0
    for line, row in _rows(path):
        number += 1
        if _is_chat(row) and not getattr(tokenizer, "chat_template", None):
            raise DriftError(
                f"{path} line {line} holds chat messages, and the tokenizer has no chat template to turn them "
                "into text. Write them out as prompt and completion, or name a tokenizer that has one (--tokenizer)."
            )
    if not number:
        raise DriftError(
            f"{path} holds no examples; expected one JSON object per line ({FORMS}), the same as columns of a "
            ".parquet, or a .txt of one text per line"
        )
    return number


def tokenised(row: dict[str, Any], tokenizer: Any) -> tuple[list[int], int]:
    """Token ids of a line and where its measured tokens start."""
    if _is_chat(row):
        before, whole = _chat(row, tokenizer)
        if not before:
            return _ids(tokenizer, whole, special=False), 1
        prompt = _ids(tokenizer, before, special=False)
        return prompt + _ids(tokenizer, whole[len(before) :], special=False), max(1, len(prompt))
    if "completion" in row:
        prompt = _ids(tokenizer, row["prompt"])
        if len(prompt) > 1 and prompt[-1] == tokenizer.eos_token_id:  # some tokenizers end every text
            prompt = prompt[:-1]
        return prompt + _ids(tokenizer, row["completion"], special=False), max(1, len(prompt))
    return _ids(tokenizer, row["text"] if "text" in row else row["prompt"]), 1


def _ids(tokenizer: Any, text: str, special: bool = True) -> list[int]:
    return list(tokenizer(text, add_special_tokens=special)["input_ids"]) if text else []


def _chat(row: dict[str, Any], tokenizer: Any) -> tuple[str, str]:
    """The chat as text up to the last turn of the assistant, and whole; the first is empty if there is no such turn.

    Raises DriftError where the first is not how the second begins. Of templates that open an answer with a thought, and
    leave it out of past answers, the answer begins with its header.
    """
    messages = row["messages"] if "messages" in row else row["prompt"]
    if not {"messages", "prompt"} <= row.keys():  # with both, `messages` are the whole conversation
        answer = row.get("completion", [])
        messages = messages + ([{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer)
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    if len(messages) < 2 or messages[-1]["role"] != "assistant":
        return "", whole
    for prompted in (True, False):
        before = tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=prompted)
        if before and whole.startswith(before):
            return before, whole
    raise DriftError(
        "where the answer begins is not known: the chat template writes the turns before it otherwise once it follows. "
        "Write prompt and completion as text"
    )


def _is_chat(row: dict[str, Any]) -> bool:
    return "messages" in row or isinstance(row.get("prompt"), list)


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line or row from 1, example) of a file: `.txt` a text per line, `.parquet` a row each, any other JSONL."""
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
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                text = line.decode("utf-8-sig")
                row = {"text": text.rstrip("\r\n")} if plain else parse_json(text)
            except ValueError as error:  # json's and unicode's errors are ValueErrors
                what, wanted = ("UTF-8 text", "one text per line") if plain else ("JSON", FORMS)
                raise DriftError(f"{path} line {number} is not {what} ({error}); expected {wanted}") from error
            yield number, row


def _table(path: Path) -> Iterator[tuple[int, Any]]:
    """Rows of a Parquet file; a column without a value in a row is not there."""
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
    except pa.ArrowException as error:
        raise DriftError(f"{path} is no Parquet file: {error}") from error


def _problem(row: Any) -> str | None:
    if not isinstance(row, dict):
        return f"a JSON {type(row).__name__} instead of an object"
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
    for key in KEYS:
        wanted = list if key == "messages" else str
        if key in row and row[key] not in chat and not isinstance(row[key], wanted):
            return f"{key} is a {type(row[key]).__name__}"
    if isinstance(row.get("completion"), list) and not isinstance(row.get("messages", row.get("prompt")), list):
        return "a completion of messages needs a prompt of messages"
    if "completion" in row and "prompt" not in row and row["messages"][-1]["role"] == "assistant":
        return "a completion after messages that end with a turn of the assistant"
    return None


def aligned(held: Sequence[Example], pad: int) -> TokenBatch:
    """Examples as a trainer lays out rollouts: prompts padded on the left, so that all measured tokens begin in one
    column, and completions on the right."""
    widest = max(example.start for example in held)
    return laid_out(held, pad, [widest - example.start for example in held])


def laid_out(held: Sequence[Example], pad: int, offsets: Sequence[int]) -> TokenBatch:
    """Each example from its column on; all else is padding."""
    shape = len(held), max(offset + len(example.ids) for example, offset in zip(held, offsets, strict=True))
    ids = torch.full(shape, pad)
    attention, completion = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool)
    for row, (example, offset) in enumerate(zip(held, offsets, strict=True)):
        end = offset + len(example.ids)
        ids[row, offset:end] = torch.tensor(example.ids)
        attention[row, offset:end] = True
        completion[row, offset + example.start : end] = True
    return TokenBatch(ids, attention, completion)
