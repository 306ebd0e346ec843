"""TRL in two processes (DDP over gloo): replay is exact in each, and rows count both."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from forked import run_two

pytest.importorskip("trl", reason="needs `pip install '.[trl]'`")

sys.path.append(str(Path(__file__).parent))
SEQUENCES = 4  # of a process and an update


def worker(rank, port, folder):
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2"
    )
    torch.set_num_threads(1)
    from tiny_trl import logged, make, replayed_all, spying
    from trl import GRPOTrainer

    from moe_rl.integrations import measures
    from moe_rl.integrations.trl import routing_replay
    from moe_rl.training.distributed import _leave

    loads, count = [], measures.expert_load
    measures.expert_load = lambda *args: loads.append(count(*args)) or loads[-1]
    trainer = make(
        routing_replay(spying(GRPOTrainer)),
        folder / "trl",
        options={"replay": "R2", "run_folder": folder / "runs"},
        max_steps=4,
        num_generations=8,
        learning_rate=0.1,
        gradient_accumulation_steps=2,
        ddp_find_unused_parameters=True,  # an expert that no token chose has no gradient
    )
    assert trainer.accelerator.num_processes == 2
    trainer.train()
    torch.save(loads, folder / f"loads{rank}.pt")
    assert replayed_all(trainer) and len(trainer.used) == 4 * 2 * SEQUENCES
    if trainer.accelerator.is_main_process:
        assert set(logged(trainer, "routing/replayed_fraction").values()) == {1.0}
        assert set(logged(trainer, "routing/first_change").values()) == {0.0}
        assert max(logged(trainer, "routing/slot_change").values()) > 0
        assert len(logged(trainer, "routing/max_vio")) == 4
    del trainer
    _leave()  # a DDP model that is freed with the interpreter can abort the process


@pytest.mark.slow
def test_two_processes_replay_exactly_and_are_counted_together(tmp_path):
    run_two(worker, tmp_path)
    (metrics,) = tmp_path.rglob("metrics.jsonl")
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    updates = [row for row in rows if row["kind"] == "update"]
    assert [row["sequences"] for row in updates] == [2 * 2 * SEQUENCES] * 4  # two micro-batches of each process
    assert all(0 < row["replayed_rows"] == row["routed_rows"] for row in updates)
    loads = [torch.load(tmp_path / f"loads{rank}.pt") for rank in range(2)]
    for row, *one in zip((row for row in rows if row["kind"] == "probe"), *loads, strict=True):
        load = sum(one)
        assert row["site_max_vio"] == pytest.approx((load.amax(1) / load.double().mean(1) - 1).tolist())
    assert {row["reward_n"] for row in rows if row["kind"] == "rollout"} == {2 * 4 * SEQUENCES}
