"""Prompts as messages: a conversation that the tokenizer's chat template turns into tokens."""

from typing import Any

from moe_rl.rollout.task import Messages, Problem, TaskError, token_ids


def as_problem(asked: str | Messages, answer: str, *, chat: bool = False, instruction: str = "") -> Problem:
    """A problem from what is asked: a text, or a conversation.

    Args:
        asked: the text, or `((role, content), ...)`, the last of which is not the assistant's.
        answer: what the verifier compares with.
        chat: give a text as a message of the user.
        instruction: put behind the text, or behind the last message.

    >>> as_problem("1+1?", "2", chat=True, instruction=" Answer in one word.").messages
    (('user', '1+1? Answer in one word.'),)
    >>> as_problem("1+1=", "2").messages is None
    True
    """
    if isinstance(asked, str):
        text = asked + instruction
        return Problem(text, answer, (("user", text),) if chat else None)
    role, content = asked[-1]
    messages = (*asked[:-1], (role, content + instruction))
    return Problem("\n\n".join(f"{role}: {content}" for role, content in messages), answer, messages)


def message_tokens(tokenizer: Any, problem: Problem) -> list[int]:
    """Token ids of a problem's messages through the chat template, with the assistant's turn opened and without further
    special tokens (the template writes its own).

    Raises:
        TaskError: no chat template, or one that refuses them.
    """
    assert problem.messages is not None
    if not getattr(tokenizer, "chat_template", None):
        raise TaskError(
            "the task gives messages and the tokenizer has no chat template. Give prompts as text, or use a model that "
            "was trained to chat."
        )
    messages = [{"role": role, "content": content} for role, content in problem.messages]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # Jinja's own, and what templates raise themselves
        raise TaskError(
            f"the tokenizer's chat template refuses the messages of {problem.prompt[:80]!r}: "
            f"{type(error).__name__}: {error}"
        ) from error
    return list(token_ids(tokenizer, text, add_special_tokens=False))
