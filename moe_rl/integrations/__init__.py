"""Integrations: Routing Replay and routing diagnostics inside other trainers, `trl`, `swift` (ms-swift) and `verl`.

Each of these modules serves one trainer; it is imported by none of the others and by no other package of moe_rl. An
integration proves the replayed fraction or raises: it never goes on training without replay silently.
docs/integrations.md says which settings work and what has been run.
"""
