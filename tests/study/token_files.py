"""Tokens and routes of one step in the form that the probe leaves, small enough to check by hand.

Two responses at batch rows 0 and 3, two sites of K = 2 out of 6 experts, updates 1 and 2; prompts of one and two
tokens.
Every token is routed to [0, 1] at both sites by the old policy. After update 2 (after update 1 nothing changed):
in response 0, token 1 changes one expert at site 1 (0 -> 4); in response 3, token 0 changes both experts at site 0, and
its slots at site 1 are swapped, which is no change.
"""

from pathlib import Path

import torch

from moe_rl.routing import RoutedExperts
from moe_rl.tables import write_table
from moe_rl.training.route_tables import write_route_table

SITES = ["model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]
TOKENS = torch.tensor([[0, 9, 5, 6, 7], [8, 9, 5, 3, 0]])  # [2, 5]; 0 pads on both sides; responses begin at column 2
TEXTS = {0: ["2", "<b>", "\n"], 3: ["2", "3"]}


def routes(update: int) -> RoutedExperts:
    """Return the routes after an update; update 0: those of the old policy."""
    ids = torch.tensor([0, 1]).expand(2, 5, 2, 2).clone()
    if update == 2:
        ids[0, 3, 1] = torch.tensor([4, 1])
        ids[1, 2, 0] = torch.tensor([2, 5])
        ids[1, 2, 1] = torch.tensor([1, 0])  # the same set
    return RoutedExperts(ids, SITES, 6, tokens=TOKENS)


def write_step(
    folder: Path, step: int, texts: bool = True, kept: bool = True, routers: bool = False, reward: float = 1.0
) -> None:
    """Write tokens/step_*.parquet of a step, with simple log-probabilities, and routes/ of updates 0 to 2.

    texts: whether to write texts and prompts. kept: whether to write routes.
    routers: whether to write gates and margins, too: at every site, gates of 40 and 20 % for the old experts, 50 and
        30 % for the new ones, and margins of 0.25 (old) and 1.5 (new).
    reward: reward of response 3; that of response 0 is 0.
    """
    names = "seq pos token update old_logp logp_natural logp_replayed flips reward text"
    columns: dict[str, list] = {name: [] for name in names.split()}
    for update in (1, 2):
        for row, seq in enumerate((0, 3)):
            for pos, text in enumerate(TEXTS[seq]):
                flips = int(update == 2 and (seq, pos) in ((0, 1), (3, 0)))
                values = [seq, pos, int(TOKENS[row, 2 + pos]), update, -1.0, -1.0 + 0.25 * flips, -1.0, flips]
                for name, value in zip(columns, [*values, reward * (seq == 3), text], strict=True):
                    columns[name].append(value)
    if routers:
        many = len(columns["seq"])
        columns |= {"old_gates": [[0.4, 0.2] * 2] * many, "new_gates": [[0.5, 0.3] * 2] * many}
        columns |= {"old_margins": [[0.25, 0.25]] * many, "new_margins": [[1.5, 1.5]] * many}
    if not texts:
        del columns["text"]
    about = {"seq": [0, 3], "prompt": ["^1=", "^12="], "first": [2, 2]} if texts else None
    write_table(folder / "tokens" / f"step_{step:06d}.parquet", columns, about)
    for update in (0, 1, 2) if kept else ():
        write_route_table(folder / "routes" / f"step_{step:06d}_update_{update}.parquet", routes(update))
