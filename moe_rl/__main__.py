"""`python -m moe_rl` is `moe-rl`."""

from moe_rl.cli import main

main()
