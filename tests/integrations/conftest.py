"""Where TRL is not installed, its helpers are not collected; the tests skip themselves."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("trl") else ["tiny_trl.py"]
