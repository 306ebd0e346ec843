"""The same instrument inside other people's trainers: `trl`, `swift` (ms-swift), `verl`.

Each file plugs into one trainer, and none of them is imported by the others or by any other room. An integration
replays at a proven fraction or raises: it never trains on silently without replay. What works with which setting, and
what has been run, is in docs/integrations.md.
"""
