"""The code that runs in vLLM's Python, without moe_rl: a folder that can be copied to another machine by itself.

- `server`    a server of one vLLM engine, asked over pipes
- `child`     such a server as a child process, which is always ended and cleaned up; the trainer uses it, too
- `agreed`    constants and functions that both ends share
- `__main__`  `python -I vllm_host [HOST:PORT]`: a `child` lent to a trainer elsewhere, over HTTP

Each file imports none of the others, but for `__main__`, which imports those beside it.
"""
