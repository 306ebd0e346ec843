"""Run as a script by `MathVerify`. A line is JSON: `["answer", text]`, said to be `read` or `unreadable`, or
`["completion", text]`, which is `equal` to the answer before it or `different`."""

import json
import logging
import sys

from moe_rl.processes import end_with_parent

MEMORY = 4 * 2**30
"""Bytes; a power can need more than there is."""


def main() -> None:
    """Serve until the input ends, or the process whose number is the first argument is gone."""
    end_with_parent(int(sys.argv[1]))
    from math_verify import parse, verify

    logging.disable(logging.CRITICAL)  # it warns that there is no timeout: the one who asks has it
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    except (ImportError, ValueError, OSError):
        pass  # no such limits here
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
        except Exception:  # whatever a completion provokes, it is wrong
            said = "unreadable" if kind == "answer" else "different"
        print(said, flush=True)


if __name__ == "__main__":
    main()
