"""The text of a comparison: a file that is checked whole before a model is loaded, then tokenised and streamed."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from moe_rl.checks import sha256_of_bytes
from moe_rl.drift.checkpoints import Checkpoints
from moe_rl.drift.errors import DriftError
from moe_rl.drift.prompt_files import FORMS, is_chat, kind_of, rows
from moe_rl.measure.scoring import TokenBatch
from moe_rl.rollout.task import token_ids


@dataclass(frozen=True)
class Example:
    """One line of a file, tokenised; its measured tokens are `ids[start:]`.

    prompt: the first line with the same prompt (or the same text, if all of it is measured); 0 if not looked for. kind:
    `kind_of` the line."""

    line: int
    ids: list[int]
    start: int
    prompt: int = 0
    kind: str = ""


@dataclass(frozen=True)
class Holds:
    """Summary of a file of examples.

    kinds: how many examples of each `kind_of`. temperature: at which all tokens were sampled, 1 if none is given.
    sampled_from, sampler_sha256: the place of the model that sampled all examples, and its `fingerprint`; None unless
    every example has the same."""

    kinds: dict[str, int]
    temperature: float
    sampled_from: str | None
    sampler_sha256: str | None


@dataclass(frozen=True)
class TextBatch:
    """Examples as tensors, padded on the right, with the line and the `Example.prompt` of each."""

    lines: list[int]
    prompts: list[int]
    text: TokenBatch


class Text:
    """The examples of a file, tokenised anew in every pass over them.

    known: the model's tokenizer, and how many tokens and positions it has. number: how many examples there are.
    holds: summary of the file. of_old: whether the first checkpoint sampled the examples (`samples.to_measure`), None
    if not known. truncated, empty: how many examples of the latest pass were cut, and how many had no token to measure;
    all passes are alike. Sampled tokens are scored at the temperature at which they were sampled (greedy ones at 1).

    Raises DriftError naming the line that is wrong.
    """

    def __init__(self, path: Path, known: Checkpoints, max_tokens: int, batch_size: int) -> None:
        self.path, self.known, self.max_tokens, self.batch_size = path, known, max_tokens, batch_size
        self.holds = check_file(path, known.tokenizer, known.two_templates)
        self.number, self.truncated, self.empty = sum(self.holds.kinds.values()), 0, 0
        self.of_old: bool | None = None

    @property
    def most_batches(self) -> int:
        """The number of batches of a pass if no example is left out."""
        return -(-self.number // self.batch_size)

    def examples(self) -> Iterator[Example]:
        """Yield the examples, cut to their first `max_tokens` tokens; count those without a token to measure.

        Prompt and completion are tokenised apart, as a sampler would have made them. A text, and a prompt without a
        completion, are measured from the second token on (the first follows nothing); of a chat that ends with the
        assistant, the last turn is measured.

        Raises DriftError naming a line that cannot be tokenised, or has a token that the model does not have.
        """
        self.truncated = self.empty = 0
        for whole in self._tokenised(tokenised):
            self.truncated += len(whole.ids) > self.max_tokens
            if whole.start >= min(len(whole.ids), self.max_tokens):
                self.empty += 1
            else:
                yield replace(whole, ids=whole.ids[: self.max_tokens])

    def questions(self, new: int) -> Iterator[Example]:
        """Yield the prompt of each example, without the completion that it may have; `start` is the prompt's length.

        Raises DriftError naming a line whose prompt is empty, or leaves no room for `new` tokens in `max_tokens`.
        """
        for asked in self._tokenised(question):
            if not asked.ids:
                raise DriftError(f"{self.path} line {asked.line}: the prompt has no tokens: nothing to sample after")
            if asked.start + new > self.max_tokens:
                raise DriftError(
                    f"{self.path} line {asked.line}: a prompt of {asked.start} tokens and {new} new ones "
                    f"(--max-new-tokens) are more than the {self.max_tokens} that count (--max-tokens; the model has "
                    f"{self.known.max_length or 'no fixed number of'} positions)"
                )
            yield asked

    def _tokenised(self, how: Callable[[dict[str, Any], Any], tuple[list[int], int]]) -> Iterator[Example]:
        """Yield all examples, tokenised by `how` (`question` or `tokenised`), in full. Raises DriftError."""
        tokenizer, vocabulary = self.known.tokenizer, self.known.vocabulary
        first = dict[str, int]()
        for line, row in rows(self.path):
            try:
                ids, start = how(row, tokenizer)
            except Exception as error:  # tokenizers and chat templates raise many kinds
                raise DriftError(f"{self.path} line {line} cannot be tokenised: {error}") from error
            if (largest := max(ids[: self.max_tokens], default=0)) >= vocabulary:
                name = tokenizer.convert_ids_to_tokens(largest)
                raise DriftError(
                    f"{self.path} line {line} has token {largest} ({name!r}), and the model embeds {vocabulary} "
                    "tokens: a tokenizer of another model? --tokenizer names one"
                )
            kind = kind_of(row)
            prompt = ids if kind in ("texts", "prompts") else ids[:start]
            yield Example(line, ids, start, first.setdefault(sha256_of_bytes(repr(prompt).encode()), line), kind)

    def laid_out(self, held: Sequence[Example], lay: Callable[[Sequence[Example], int], TokenBatch]) -> TokenBatch:
        """Return examples as a batch laid out by `padded` or `aligned`, to be scored at the temperature of the text."""
        return replace(lay(held, self.known.tokenizer.pad_token_id), temperature=self.holds.temperature or 1.0)

    def batches(self) -> Iterator[TextBatch]:
        """Yield batches of `batch_size` examples, in the order of the file."""
        for held in in_batches(self.examples(), self.batch_size):
            lines, prompts = [example.line for example in held], [example.prompt for example in held]
            yield TextBatch(lines, prompts, self.laid_out(held, padded))

    def nothing_left(self) -> DriftError:
        """Return the error for a text in which no example has a token to measure."""
        return DriftError(
            f"{self.path}: no token to measure: {self.empty} of {self.number} examples are empty, a single token, or "
            f"have a prompt that fills the {self.max_tokens} tokens that count (--max-tokens; the model has "
            f"{self.known.max_length or 'no fixed number of'} positions)"
        )


def longest(asked: int | None, default: int, positions: int | None) -> int:
    """Return the number of tokens that examples are cut to: `asked`, or the least of `default` and the positions.

    positions: of the model, None for no fixed number. Raises DriftError: `asked` is more than these.
    """
    if asked is not None and positions is not None and asked > positions:
        raise DriftError(f"--max-tokens: {asked} are more than the model's {positions} positions")
    return asked or min(default, positions or default)


def in_batches(source: Iterator[Example], size: int) -> Iterator[list[Example]]:
    """Yield lists of `size` examples; the last may be shorter."""
    while held := list(islice(source, size)):
        yield held


def check_file(path: Path, tokenizer: Any, two_templates: str = "") -> Holds:
    """Read every line of a file once, and return a summary; no line is kept.

    two_templates: as in `Checkpoints`. Raises DriftError naming the line that is wrong."""
    kinds, temperatures = Counter[str](), set[float]()
    samplers: dict[str, set[str | None]] = {"sampled_from": set(), "sampler_sha256": set()}
    for line, row in rows(path):
        kind = kind_of(row)
        kinds[kind] += 1
        temperatures.add(row.get("temperature", 1.0) if kind == "samples" else 1.0)
        for key, found in samplers.items():
            found.add(row.get(key) if kind == "samples" else None)
        if len(temperatures) > 1:
            raise DriftError(
                f"{path} line {line}: tokens sampled at another temperature than those before "
                f"({', '.join(map(str, sorted(temperatures)))}); all are scored at one. Split the file"
            )
        if is_chat(row) and not getattr(tokenizer, "chat_template", None):
            raise DriftError(
                f"{path} line {line} holds chat messages, and the tokenizer has no chat template to turn them "
                "into text. Write them out as prompt and completion, or name a tokenizer that has one (--tokenizer)."
            )
        if is_chat(row) and two_templates:
            raise DriftError(
                f"{path} line {line} holds chat messages, and {two_templates} turn them into text by different chat "
                "templates. Name the tokenizer whose template is meant: --tokenizer PATH"
            )
    if not kinds:
        raise DriftError(
            f"{path} holds no examples; expected one JSON object per line ({FORMS}), the same as columns of a "
            ".parquet, or a .txt of one text per line"
        )
    of = {key: found.pop() if len(found) == 1 else None for key, found in samplers.items()}
    return Holds(dict(kinds), temperatures.pop(), **of)


def question(row: dict[str, Any], tokenizer: Any) -> tuple[list[int], int]:
    """Return the token ids of a line's prompt, and their number.

    The prompt of a chat is all before the last turn of the assistant; of a text, it is the text."""
    if "prompt_ids" in row:
        ids = list(row["prompt_ids"])
    elif is_chat(row):
        asked = row["messages"] if "messages" in row else row["prompt"]
        asked = asked[:-1] if asked[-1]["role"] == "assistant" else asked
        text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        ids = _ids(tokenizer, text, add_special_tokens=False)
    else:
        ids = _ids(tokenizer, row["prompt"] if "prompt" in row else row["text"])
    return ids, len(ids)


def tokenised(row: dict[str, Any], tokenizer: Any) -> tuple[list[int], int]:
    """Return the token ids of a line, and the index of the first measured one."""
    if "completion_ids" in row:
        return [*row["prompt_ids"], *row["completion_ids"]], len(row["prompt_ids"])
    if is_chat(row):
        before, whole = _chat(row, tokenizer)
        if not before:
            return _ids(tokenizer, whole, add_special_tokens=False), 1
        prompt = _ids(tokenizer, before, add_special_tokens=False)
        return prompt + _ids(tokenizer, whole[len(before) :], add_special_tokens=False), max(1, len(prompt))
    if "completion" in row:
        prompt = _ids(tokenizer, row["prompt"])
        return prompt + _ids(tokenizer, row["completion"], add_special_tokens=False), max(1, len(prompt))
    return _ids(tokenizer, row["text"] if "text" in row else row["prompt"], add_special_tokens=True), 1


def _ids(tokenizer: Any, text: str, **options: bool) -> list[int]:
    """Return the token ids of a text as `token_ids` does, none for an empty text that is a part of a longer one."""
    return list(token_ids(tokenizer, text, **options)) if text or options.get("add_special_tokens", True) else []


def _chat(row: dict[str, Any], tokenizer: Any) -> tuple[str, str]:
    """Return a chat as text up to the last turn of the assistant ("" if it does not end with one, or has nothing else),
    and as a whole.

    Some templates open an answer with a thought, and leave that out of past answers: there the answer begins with the
    header of its turn. Raises DriftError: the whole does not begin with the first part.
    """
    messages = row["messages"] if "messages" in row else row["prompt"]
    if not {"messages", "prompt"} <= row.keys() or messages[-1]["role"] != "assistant":  # with both, all is in messages
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


def padded(held: Sequence[Example], pad: int) -> TokenBatch:
    """Return examples as a batch, padded on the right. pad: the padding token."""
    return laid_out(held, pad, [0] * len(held))


def aligned(held: Sequence[Example], pad: int) -> TokenBatch:
    """Return examples as a batch in a trainer's layout: prompts padded on the left, completions on the right.

    All measured tokens then begin in one column. pad: the padding token."""
    widest = max(example.start for example in held)
    return laid_out(held, pad, [widest - example.start for example in held])


def laid_out(held: Sequence[Example], pad: int, offsets: Sequence[int]) -> TokenBatch:
    """Return examples as a batch, each from its column of `offsets` on; all else is the padding token `pad`."""
    shape = len(held), max(offset + len(example.ids) for example, offset in zip(held, offsets, strict=True))
    ids = torch.full(shape, pad)
    attention, completion = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool)
    for row, (example, offset) in enumerate(zip(held, offsets, strict=True)):
        end = offset + len(example.ids)
        ids[row, offset:end] = torch.tensor(example.ids)
        attention[row, offset:end] = True
        completion[row, offset + example.start : end] = True
    return TokenBatch(ids, attention, completion)
