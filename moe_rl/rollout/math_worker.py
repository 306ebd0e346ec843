"""Run as a script by `MathVerify`: one question a line, as JSON; answers `equal`, `different` or `unreadable`."""

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
    for line in sys.stdin:
        answer, completion = json.loads(line)
        gold = parse(f"\\boxed{{{answer}}}", parsing_timeout=None)
        if not gold:
            verdict = "unreadable"
        else:
            try:
                found = parse(completion, parsing_timeout=None)
                verdict = "equal" if verify(gold, found, timeout_seconds=None) else "different"
            except Exception:  # whatever a completion provokes, it is wrong
                verdict = "different"
        print(verdict, flush=True)


if __name__ == "__main__":
    main()
