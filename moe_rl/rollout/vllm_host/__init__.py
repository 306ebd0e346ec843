"""What runs in vLLM's Python, where moe_rl is not: a folder that can be copied to another machine by itself.

- `server`    one vLLM engine, asked over pipes
- `child`     such a server as a process, and its end, whatever happens; the trainer uses it, too
- `agreed`    what both ends must say alike
- `__main__`  `python -I vllm_host [HOST:PORT]`: a `child` lent to a trainer elsewhere, over HTTP

Each file stands alone, but for `__main__`, which finds the others beside it.
"""
