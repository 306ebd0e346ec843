"""How much of their routing capacity runs use in the end, from the routes that they kept."""

import pandas as pd

from moe_rl.study.data import StudyData


def effective_routes(data: StudyData) -> pd.DataFrame:
    """By arm and seed, of the last policy whose routes were kept, on the tokens of its probe, live routing: `step`,
    `tokens`, `effective_sets` (of K experts) and `effective_experts`, exp of the entropy of their use, mean over sites.

    Every arm's probe has as many responses; sets are compared on the first tokens, as many as the shortest has.
    """
    from moe_rl.routing import effective_sets, expert_load, load_entropy  # torch, which most of a study does without
    from moe_rl.training.route_tables import read_route_table

    found = []
    last = data.route_files.groupby(["arm", "seed"], sort=False).last().reset_index()
    for row in last.itertuples():
        routes = read_route_table(str(row.path))
        ids = routes.ids.flatten(0, 1)
        found.append((row, ids[(ids >= 0).all(-1).all(-1)], routes.num_experts))
    most = min((len(ids) for _, ids, _ in found), default=0)
    rows = []
    for row, ids, experts in found:
        number = experts if isinstance(experts, int) else max(experts)
        load = expert_load(ids[:most], num_experts=number)
        rows.append(
            {
                "arm": row.arm,
                "seed": row.seed,
                "step": row.step,
                "tokens": most,
                "effective_sets": float(effective_sets(ids[:most], num_experts=number).nanmean()),
                "effective_experts": float(load_entropy(load).exp().nanmean()),
            }
        )
    return pd.DataFrame(rows)
