"""Two processes are one: same prompts, samples and losses, whatever holds the weights; and what stops at once."""

import json
import math
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from forked import run_two
from micro import MICRO, judged, rows
from safetensors.torch import load_file

from moe_rl.policy.lora import LoraConfig
from moe_rl.policy.models import ModelConfig
from moe_rl.policy.tiny import TinyConfig, build_tiny, char_tokenizer
from moe_rl.rollout import make_task
from moe_rl.rollout.engines import EngineConfig, EngineError, gathered
from moe_rl.routing import RoutedExperts
from moe_rl.study.run import run_one
from moe_rl.training import EvalConfig, MethodConfig, ProbeConfig, begin, resume, run, setup, sharding
from moe_rl.training.config import DistributedConfig, RewardConfig
from moe_rl.training.distributed import Group, ranks_of
from moe_rl.training.launch import DistributedError, check_shares
from moe_rl.training.sharding import ShardingError, check_sharded

sys.path.append(str(Path(__file__).parents[1] / "routing"))
from routing_helpers import moe

CPU = replace(
    MICRO,
    model=replace(MICRO.model, device="cpu"),
    rollout=replace(MICRO.rollout, prompts=8),
    eval=EvalConfig(prompts=9),  # shares of 4 and 5
    probe=replace(MICRO.probe, sequences=5, floor=False),
    optim=replace(MICRO.optim, max_grad_norm=0.5),
    checkpoint_every=4,  # at the end
)


def case(strategy, objective="grpo", replay="none", lag=0, micro_batch=None, **changes):
    config = replace(
        CPU,
        method=MethodConfig(objective=objective, replay=replay, kl_coef=changes.pop("kl_coef", None)),
        rollout=replace(CPU.rollout, lag=lag),
        optim=replace(CPU.optim, micro_batch=micro_batch),
        distributed=DistributedConfig(strategy),
    )
    return replace(config, **changes)


def until(config, steps):
    return replace(config, optim=replace(config.optim, steps=steps))


LORA = LoraConfig(2, target_modules=("q_proj",), target_parameters=("mlp.experts.down_proj",), train_router=True)
BIAS = {"expert_bias_rate": 0.01, "expert_bias_loads": "live"}
RESCORED = replace(CPU.rollout, lag=1, rescore=True)
ENGINE = replace(CPU.rollout, engine=EngineConfig("hf", "bfloat16"))
CASES = {
    "ddp": case("ddp"),
    "ddp_replay": case("ddp", replay="R2", micro_batch=3),
    "ddp_replay_lag": until(case("ddp", replay="R2", rollout=RESCORED, kl_coef=0.1), 3),
    "ddp_learned_reward": case("ddp", reward=RewardConfig(model="learned", initial_batches=1, epochs=1)),
    "fsdp2": case("fsdp2", objective="dapo"),
    "fsdp2_replay_lag": until(case("fsdp2", replay="R2", lag=1, kl_coef=0.1, keep_policy_every=3), 3),
    "fsdp2_rollout_replay": case("fsdp2", objective="gspo", replay="R3"),
    "fsdp2_shared_prompts": case("fsdp2", replay="R2", optim=replace(CPU.optim, share_prompts=True)),
    "fsdp2_ppo": case("fsdp2", objective="ppo"),
    "fsdp2_dpo": case("fsdp2", objective="dpo"),
    "fsdp2_expert_bias": case("fsdp2", replay="R2", optim=replace(CPU.optim, **BIAS)),
    "fsdp2_lora": case("fsdp2", replay="R2", kl_coef=0.1, model=replace(CPU.model, lora=LORA)),
    "ddp_engine": case("ddp", replay="R3", rollout=ENGINE),
    "fsdp2_engine": case("fsdp2", replay="R3", rollout=ENGINE),
}


def pay_at_random():
    """Rewards with variance, in this process: see `Judge`."""
    made = setup.make_task
    setup.make_task = judged(made)
    return made


def join(rank, port):
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2"
    )
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    torch.set_num_threads(1)
    pay_at_random()


@pytest.fixture
def random_rewards():
    made = pay_at_random()
    yield
    setup.make_task = made


def others_hold_nothing(rank):
    """Under fsdp2, before it is sharded, a module has memory on rank 0 alone."""
    shard = sharding.shard

    def watched(module, *args):
        devices = {p.device.type for p in module.parameters()}
        assert devices == ({"cpu"} if rank == 0 else {"meta"}), devices
        shard(module, *args)
        WATCHED.append(type(module).__name__)

    sharding.shard = watched


WATCHED = []


def worker(rank, port, folder):
    join(rank, port)
    others_hold_nothing(rank)
    for name, config in CASES.items():
        run_one(config, folder / name)
    ranks = ranks_of(DistributedConfig("ddp"), "cpu")
    assert (ranks.rank, ranks.size, ranks.main) == (rank, 2, rank == 0)
    modules = {"fsdp2_replay_lag": 2, "fsdp2_ppo": 3, "fsdp2_dpo": 2}  # references, a value model
    assert len(WATCHED) == sum(modules.get(name, 1) for name in CASES if name.startswith("fsdp2")), WATCHED
    other_families(ranks, folder)
    ends_apart(ranks, folder)
    routers_in_fp32(folder)
    wrong_sync(ranks, folder)
    resumes_exactly(folder)
    disagree(ranks, folder)
    dist.barrier()


def other_families(ranks, folder):
    """A parameter that no forward uses (Ernie's selection bias), and routes of one expert per token (ZAYA)."""
    for family in ("Ernie4_5_MoeForCausalLM", "ZayaForCausalLM"):
        place = folder / family
        if ranks.main:
            moe(family).save_pretrained(place)
            char_tokenizer(make_task(CPU.task).alphabet).save_pretrained(place)
        dist.barrier()
        for strategy in ("ddp", "fsdp2"):
            config = replace(case(strategy, replay="R2"), model=ModelConfig(path=str(place), device="cpu"))
            run_one(config, folder / f"{family}_{strategy}")
            if ranks.main:
                updates = rows(folder / f"{family}_{strategy}", "update")
                assert all(row["replayed_rows"] == row["routed_rows"] > 0 for row in updates), family
                assert updates[0]["k3"] < 1e-12 < updates[-1]["k3"], family


def ends_apart(ranks, folder):
    """Ranks call a sharded model as often as each needs to; here for certain not equally often. With LoRA the policy of
    the beginning is such a one, too."""
    for model in (begin(CASES["fsdp2"], folder / "apart").policy, begin(CASES["fsdp2_lora"], folder / "off").reference):
        token = torch.tensor([[1, 2]])
        calls = []
        with torch.no_grad(), ranks.lock_step(model):
            for _ in range(1 + 3 * ranks.rank):
                calls.append(model(input_ids=token).logits)
        assert ranks.exchange(str(len(calls))) == ["1", "4"]
        assert all(torch.equal(logits, calls[0]) for logits in calls)


def routers_in_fp32(folder):
    """bf16 layers, fp32 routers, fp32 shards: by what arrives at the modules and leaves them."""
    for keep in (False, True):
        distributed = DistributedConfig("fsdp2", compute_dtype="bfloat16", router_fp32=keep)
        config = until(replace(CASES["fsdp2_replay_lag"], distributed=distributed), 2)
        made = begin(config, folder / f"precision_{keep}")
        layer, seen = made.policy.model.layers[1].mlp, {}
        layer.gate.register_forward_hook(
            lambda m, _, out, seen=seen: seen.update(router=(m.weight.dtype, out[0].dtype))
        )
        layer.experts.register_forward_pre_hook(
            lambda m, args, seen=seen: seen.update(experts=(m.down_proj.dtype, args[0].dtype))
        )
        resume(made), run(made)
        low = (torch.bfloat16, torch.bfloat16)
        assert seen == {"experts": low, "router": (torch.float32, torch.float32) if keep else low}
        assert {p.dtype for p in made.policy.parameters()} == {torch.float32}


def wrong_sync(ranks, folder):
    """An engine whose weights stop arriving on one rank stops all; a gap that one built anew has too stops none."""
    for strategy in ("ddp", "fsdp2"):
        made = begin(CASES[f"{strategy}_engine"], folder / f"{strategy}_flips")
        made.sync_guard.tolerance = 0.0
        resume(made), run(made)
        assert made.sync_guard.gap > 0
        made.config = until(made.config, 3)
        if ranks.rank == 1:  # deaf from here on
            made.engine.sync = lambda weights, version: [gathered(tensor) for tensor in weights.values()]
        with pytest.raises(EngineError, match=r"weight sync 2: .* does not hold the policy"):
            run(made)


def resumes_exactly(folder):
    """Interrupted after step 1 of 3, resumed by as many ranks: every number as without the interruption."""
    for strategy in ("ddp", "fsdp2"):
        config = CASES[f"{strategy}_replay_lag"]
        broken = begin(config, folder / f"{strategy}_broken")
        resume(broken)
        broken.config = until(config, 1)
        run(broken)
        resumed = begin(config, folder / f"{strategy}_broken")
        resume(resumed)
        assert (resumed.step, config.optim.steps) == (1, 3)
        run(resumed)


def disagree(ranks, folder):
    """Every rank raises, not only the one that is wrong."""
    with pytest.raises(DistributedError, match="disagree on the configuration: seed is 0 on rank 0, 1 on rank 1"):
        begin(replace(CASES["ddp"], seed=ranks.rank), folder / "refused")
    with pytest.raises(DistributedError, match=r"no multiple of optim\.num_minibatches x processes = 2 x 2"):
        begin(replace(CASES["ddp"], rollout=replace(CPU.rollout, prompts=6)), folder / "refused")
    with pytest.raises(DistributedError, match=r"2 processes were started, and distributed\.strategy is none"):
        begin(CPU, folder / "refused")
    with pytest.raises(DistributedError, match=r"distributed\.processes: 4, and 2 were started"):
        begin(replace(CASES["ddp"], distributed=DistributedConfig("ddp", processes=4)), folder / "refused")
    with pytest.raises(DistributedError, match="disagree on the batch"):
        ranks.agree("the batch", ranks.rank)
    with pytest.raises((DistributedError, ValueError), match="only rank 0 can see this"):
        ranks.first(fail if ranks.main else never)
    assert not (folder / "refused").exists()
    own = torch.arange(ranks.rank * 2, 5)[: 2 + ranks.rank]  # [0, 1] and [2, 3, 4]
    for dtype in (torch.float64, torch.bfloat16, torch.bool, torch.uint8):
        assert torch.equal(ranks.gather(own.to(dtype), 5), torch.arange(5).to(dtype))
    assert ranks.sums(1, 0.5) == (2, 1.0)
    assert ranks.exchange("é" * ranks.rank) == ["", "é"]


def fail():
    raise ValueError("only rank 0 can see this")


def never():
    raise AssertionError("rank 1 does not look")


EXACT = ("reward", "response_length", "lr")
PADDED = ("routed_rows", "replayed_rows")
"""Counts that hold the padding of micro-batches."""


@pytest.mark.slow
def test_two_processes_are_one(tmp_path, random_rewards):
    run_two(worker, tmp_path)
    one_process = {name: replace(config, distributed=DistributedConfig()) for name, config in CASES.items()}
    for name, config in one_process.items():
        first = next(other for other in CASES if one_process[other] == config)  # one run for all strategies
        run_one(config, tmp_path / f"{first}_alone")
        found, wanted = rows(tmp_path / name), rows(tmp_path / f"{first}_alone")
        assert [r["kind"] for r in found] == [r["kind"] for r in wanted]
        for mine, alone in zip(found, wanted, strict=True):
            for key, value in alone.items():
                where = (name, alone["kind"], alone["step"], alone.get("update"), key)
                if config.optim.micro_batch and key in PADDED:  # ranks make micro-batches of their own rows
                    continue
                if isinstance(value, float) and key not in EXACT:
                    assert mine[key] == pytest.approx(value, rel=2e-4, abs=2e-6), where
                elif not isinstance(value, list):
                    assert mine[key] == value, where
        assert max(r["grad_norm"] for r in wanted if r["kind"] == "update") > 1e-3, f"{name}: nothing was learned"
        assert (tmp_path / name / "DONE").exists()
        assert json.loads((tmp_path / name / "env.json").read_text())["processes"] == 2
    for strategy in ("ddp", "fsdp2"):
        unbroken, broken = tmp_path / f"{strategy}_replay_lag", tmp_path / f"{strategy}_broken"
        assert rows(unbroken) == rows(broken)
        for name in ("model", "optimizer", "batch_0"):
            ends = [load_file(folder / "checkpoint" / f"{name}.safetensors") for folder in (unbroken, broken)]
            assert ends[0].keys() == ends[1].keys() and all(torch.equal(ends[0][key], ends[1][key]) for key in ends[0])
    for folder in ("fsdp2_replay_lag", "fsdp2_broken"):  # gathered, as the checkpoint's
        kept, end = (tmp_path / folder / place for place in ("checkpoints/step_000003", "checkpoint"))
        assert (kept / "model.safetensors").read_bytes() == (end / "model.safetensors").read_bytes()
        assert sorted(path.name for path in kept.parent.iterdir()) == ["step_000000", "step_000003"]
    # A checkpoint does not say how many ranks wrote it: one process goes on where two stopped.
    one = begin(until(one_process["fsdp2_replay_lag"], 4), tmp_path / "fsdp2_replay_lag")
    resume(one)
    assert one.step == 3 and len(one.waiting) == 1 and len(one.waiting[0]) == 32
    run(one)
    assert rows(tmp_path / "fsdp2_replay_lag", "update")[-1]["replayed_rows"] > 0


# -- what stops at once ---------------------------------------------------------------------------------------------


def test_a_launcher_that_accelerate_does_not_see_is_refused(monkeypatch):
    """WORLD_SIZE says two, but this process is in no group of two."""
    alone = ranks_of()
    assert alone.size == 1
    monkeypatch.setenv("WORLD_SIZE", "2")
    try:
        with pytest.raises(DistributedError, match="started 2 processes, and accelerate sees 1"):
            ranks_of(DistributedConfig("ddp"), "auto")
    finally:
        AcceleratorState._reset_state()
        PartialState._reset_state()


def test_apples_accelerator_is_left_for_the_cpu(monkeypatch):
    """It has no float64, which sampling draws with: a run there would end at its first token."""
    for name in ("is_available", "is_built"):
        monkeypatch.setattr(f"torch.backends.mps.{name}", lambda: True)
    AcceleratorState._reset_state(True)
    try:
        assert ranks_of().device.type == "cpu"
        AcceleratorState._reset_state(True)
        assert Accelerator().device.type == "mps", "what accelerate takes by itself"
    finally:
        AcceleratorState._reset_state(True)


def test_a_model_that_is_not_sharded_is_refused():
    model = build_tiny(TinyConfig(hidden_size=16, num_layers=2, num_heads=2, num_experts=4), char_tokenizer("ab"))
    with pytest.raises(ShardingError, match=r"fsdp2 was asked for, and the model .* is not sharded"):
        check_sharded(model)


def test_shares_are_checked_before_anything_is_loaded():
    config = replace(CASES["fsdp2"], model=replace(ModelConfig(), lora=None))
    check_shares(config, 2)
    with pytest.raises(DistributedError, match=r"eval\.prompts: 1 cannot be shared by 2"):
        check_shares(replace(config, eval=EvalConfig(prompts=1)), 2)
    check_shares(replace(config, probe=ProbeConfig(every=0, sequences=0)), 2)
    for probe in (ProbeConfig(sequences=0), ProbeConfig(every=0, decompose_every=1, sequences=0)):
        with pytest.raises(DistributedError, match=r"probe\.sequences: 0 cannot be shared by 2"):
            check_shares(replace(config, probe=probe), 2)


def test_shares_are_consecutive_and_cover_everything():
    assert list(ranks_of().share(5)) == [0, 1, 2, 3, 4]
    three = SimpleNamespace(size=3, rank=0)
    assert [list(Group.share(three, 7, rank)) for rank in range(3)] == [[0, 1], [2, 3], [4, 5, 6]]
    with pytest.raises(DistributedError, match="2 rows or prompts cannot be shared by 3"):
        Group.share(three, 2)
    two = SimpleNamespace(size=2, rank=1, share=lambda count, rank: range(count // 2))
    with pytest.raises(DistributedError, match="rank 1 has 3 rows to gather; its share is 2"):
        Group.gather(two, torch.zeros(3), 4)


def test_gathered_routes_know_which_padding_the_mask_hid():
    """Else a replay whose attention mask was forgotten would pass on several ranks alone."""
    ids, tokens = torch.zeros(1, 3, 2, 2, dtype=torch.uint8), torch.tensor([[-2, 5, 6]], dtype=torch.int32)
    own = RoutedExperts._trusted(ids, ("a", "b"), (4, 4), tokens=tokens)
    found = Group.gather_routes(SimpleNamespace(gather=lambda part, count: part), own, 1)
    assert found.attended.tolist() == own.attended.tolist() == [[False, True, True]]
    assert found.tokens.tolist() == [[0, 5, 6]]


def test_a_norm_that_is_not_finite_clips_nothing():
    """Scaled by it, finite gradients would be 0 or NaN, and a message could not name the one that is not."""
    weights = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    for bad, left in ((3.0, 0.4), (math.inf, 4.0), (math.nan, 4.0)):
        weights[0].grad, weights[1].grad = torch.tensor([bad, 0.0]), torch.tensor([4.0, 0.0])
        norm = ranks_of().clip_grad_norm_(weights, 0.5)
        assert torch.isfinite(norm) == math.isfinite(bad) and float(weights[1].grad[0]) == pytest.approx(left)


def test_the_largest_over_ranks_is_nan_if_any_is():
    def largest(*found):
        return Group.largest(SimpleNamespace(exchange=lambda own: list(found)), found[0])

    assert largest(1.0, 3.0, 2.0) == 3.0
    assert math.isnan(largest(math.nan, 1.0)) and math.isnan(largest(1.0, math.nan))
