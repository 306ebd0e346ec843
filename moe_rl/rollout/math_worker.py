"""Script that `MathVerify` runs: it answers questions on its standard input, one JSON array per line.

The reply to `["answer", text]` is `read` or `unreadable`. The reply to `["completion", text]` is `equal` or
`different`: the completion compared with the last answer.
"""

import json
import logging
import sys

from moe_rl.processes import end_with_parent

MEMORY = 4 * 2**30
"""Limit of the process's memory in bytes; a power such as `9^{9^9}` can need more than the machine has."""


def main() -> None:
    """Answer questions until the input ends, or the process whose id is the first argument is gone."""
    end_with_parent(int(sys.argv[1]))
    from math_verify import parse, verify

    logging.disable(logging.CRITICAL)  # math-verify warns that it has no timeout; `MathVerify` has one
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    except (ImportError, ValueError, OSError):
        pass  # this system has no such limit
    print("ready", flush=True)
    gold = None
    for line in sys.stdin:
        kind, text = json.loads(line)
        try:
            if kind == "answer":
                gold = parse(f"\\boxed{{{text}}}", parsing_timeout=None)
                said = "read" if gold else "unreadable"
            else:
                found = parse(text, parsing_timeout=None)
                said = "equal" if verify(gold, found, timeout_seconds=None) else "different"
        except Exception:  # a completion on which math-verify fails counts as wrong
            said = "unreadable" if kind == "answer" else "different"
        print(said, flush=True)


if __name__ == "__main__":
    main()
