"""Models as users have them: checkpoints in hub format with a tokenizer, own data, and every way to fit them in."""

import json
from dataclasses import replace

import pytest
import torch
from micro import logps
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AfmoeConfig,
    AutoModelForCausalLM,
    DeepseekV3Config,
    GraniteMoeConfig,
    JetMoeConfig,
    OlmoeConfig,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
)

from moe_rl.policy.lora import LoraConfig
from moe_rl.policy.models import ModelConfig
from moe_rl.policy.tiny import ModelError
from moe_rl.rollout import TaskConfig
from moe_rl.training import (
    EvalConfig,
    MethodConfig,
    OptimConfig,
    ProbeConfig,
    RolloutConfig,
    RunConfig,
    begin,
    resume,
    run,
    train,
)
from moe_rl.training.config import DistributedConfig
from moe_rl.training.loop import collect_batch
from moe_rl.training.optimizer import MasterAdamW

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"


def tokenizer(template=CHAT):
    """A byte-level one, as hub models have, without merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(["<s>", "</s>", *alphabet])}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", pad_token="</s>")
    made.chat_template = template
    return made


def config_of(family, vocabulary):
    if family == "qwen3_moe":
        return Qwen3MoeConfig(**SIZES, vocab_size=vocabulary, head_dim=8, num_experts=4, moe_intermediate_size=8)
    if family == "olmoe":
        return OlmoeConfig(**SIZES, vocab_size=vocabulary, num_experts=4)
    return GraniteMoeConfig(**SIZES, vocab_size=vocabulary, num_local_experts=4, tie_word_embeddings=True)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A folder per family; weights in bf16, as hubs keep them."""
    root = tmp_path_factory.mktemp("hub")
    for i, family in enumerate(("qwen3_moe", "olmoe", "granitemoe")):
        torch.manual_seed(i)
        model = AutoModelForCausalLM.from_config(config_of(family, len(tokenizer())), dtype=torch.bfloat16)
        model.save_pretrained(root / family)
        tokenizer().save_pretrained(root / family)
    return root


@pytest.fixture
def questions(tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n} plus one?", "answer": n + 1}) + "\n" for n in range(60)))
    return str(path)


@pytest.fixture
def any_answer_pays(monkeypatch):
    """Random models are never right: here, nearly any two answers are worth something different."""
    from moe_rl.rollout.jsonl_task import JsonLines

    monkeypatch.setattr(JsonLines, "reward", lambda self, problem, text: sum(text.encode()) % 31 / 31)


def run_config(model, questions, *, chat=True, replay="R2", **changes):
    micro = RunConfig(
        model=model,
        task=TaskConfig("jsonl", {"path": questions, "chat": chat, "max_new_tokens": 6}),
        method=MethodConfig(objective="grpo", replay=replay),
        rollout=RolloutConfig(prompts=2, group_size=4),
        optim=OptimConfig(steps=2, num_minibatches=2, micro_batch=2, learning_rate=1e-3, warmup_updates=1),
        eval=EvalConfig(every=0, prompts=2),
        probe=ProbeConfig(sequences=2, tokens_every=0),
        checkpoint_every=2,
    )
    return replace(micro, **changes)


def rows(folder, kind):
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in found if row["kind"] == kind]


def trained(config, folder):
    """The state after the run, and the names of the parameters that moved."""
    state = begin(config, folder)
    before = {name: p.detach().clone() for name, p in state.policy.named_parameters()}
    run(state)
    moved = {name for name, p in state.policy.named_parameters() if not torch.equal(p, before[name])}
    return state, moved


@pytest.mark.parametrize(
    ("family", "model"),
    [
        ("qwen3_moe", {}),
        ("olmoe", {"gradient_checkpointing": True, "attn_implementation": "eager"}),
        ("granitemoe", {"dtype": "bfloat16", "experts_implementation": "megablocks_reference"}),
    ],
)
def test_a_checkpoint_is_trained_end_to_end(checkpoints, questions, any_answer_pays, tmp_path, family, model):
    config = run_config(ModelConfig(path=str(checkpoints / family), **model), questions)
    state, moved = trained(config, tmp_path / "run")
    assert state.step == 2 and state.policy.config.model_type == family
    updates = rows(tmp_path / "run", "update")
    assert len(updates) == 4 and all(r["replayed_rows"] == r["routed_rows"] > 0 == r["slots_changed"] for r in updates)
    assert all(0 < r["grad_norm"] < 1e3 for r in updates)
    # In fp32 scoring and training agree to rounding; in bf16 they do so too, for they are one computation.
    assert updates[0]["k3"] < 1e-3 and updates[0]["clipped_tokens"] == 0
    assert moved == {name for name, _ in state.policy.named_parameters()}
    assert state.policy.dtype == getattr(torch, model.get("dtype", "float32"))
    assert isinstance(state.optimizer.optimizer, MasterAdamW) == ("dtype" in model)
    again = begin(config, tmp_path / "run")
    resume(again)
    assert again.step == 2
    for a, b in zip(state.policy.state_dict().values(), again.policy.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    if "dtype" in model:  # what the updates went to is restored too
        masters = [[t.optimizer.state[p]["master"] for p in t.policy.parameters()] for t in (state, again)]
        assert all(torch.equal(a, b) for a, b in zip(*masters, strict=True))


def test_gradient_checkpointing_changes_no_update(checkpoints, questions, any_answer_pays, tmp_path):
    weights = []
    for on in (False, True):
        model = ModelConfig(path=str(checkpoints / "qwen3_moe"), gradient_checkpointing=on)
        state, _ = trained(run_config(model, questions, checkpoint_every=99), tmp_path / str(on))
        weights.append(state.policy.state_dict())
    for name, weight in weights[0].items():
        torch.testing.assert_close(weight, weights[1][name], rtol=1e-5, atol=1e-6)


def test_lora_trains_the_adapters_against_the_model_without_them(checkpoints, questions, any_answer_pays, tmp_path):
    lora = LoraConfig(rank=2, alpha=4.0, train_router=True)
    model = ModelConfig(path=str(checkpoints / "qwen3_moe"), dtype="bfloat16", lora=lora)
    config = run_config(model, questions, method=MethodConfig(replay="R2", kl_coef=0.1))
    state, moved = trained(config, tmp_path / "run")
    # q, k, v, o of 2 layers, A and B each; the routers' copies
    assert len(moved) == 2 * 4 * 2 + 2 and all("lora" in name or "modules_to_save" in name for name in moved)
    batch = state.waiting[0] if state.waiting else collect_batch(state)
    plain = begin(
        run_config(replace(model, lora=None), questions, method=MethodConfig(kl_coef=0.1)), tmp_path / "plain"
    )
    base = logps(plain, plain.policy.eval(), batch).logps
    reference = logps(state, state.reference, batch).logps
    torch.testing.assert_close(reference, base, rtol=0, atol=0)  # the checkpoint itself, whatever was learned
    assert not torch.equal(logps(state, state.policy.eval(), batch).logps, base)
    trainable = {name for name, p in state.policy.named_parameters() if p.requires_grad}
    assert trainable == moved, "using the reference leaves what is trained as it was"
    again = begin(config, tmp_path / "run")
    resume(again)
    assert torch.equal(logps(again, again.policy.eval(), batch).logps, logps(state, state.policy.eval(), batch).logps)


def test_what_cannot_run_is_refused_before_anything_is_written(checkpoints, questions, tmp_path, monkeypatch):
    path = str(checkpoints / "olmoe")

    def refuse(match, model, error=ModelError, start=train):
        with pytest.raises(error, match=match):
            start(run_config(model, questions), tmp_path / "run")
        written = [file.name for file in (tmp_path / "run").rglob("*") if file.is_file() and file.stat().st_size]
        assert written == []

    refuse(r"model.dtype: expected one of float32, .* got 'fp8'", ModelConfig(path=path, dtype="fp8"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refuse(r"model.device: cuda is not there \(torch", ModelConfig(path=path, device="cuda"))
    refuse("megablocks", ModelConfig(path=path, experts_implementation="megablocks"))
    refuse(r"target_modules: OlmoeForCausalLM has no 'w1'; it has .*k_proj", lora(path, target_modules=("w1",)))
    refuse(r"target_parameters: .* has no 'gate'", lora(path, target_parameters=("gate",)))
    refuse("nothing to adapt", lora(path, target_modules=()))
    refuse("model.lora.rank: expected a whole number of at least 1, got 0", lora(path, rank=0), ValueError)
    refuse("lora.rank: expected a whole number of at least 1, got 0", lora(path, rank=0), start=begin)  # no `validate`
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *_: None)
    refuse(r"the peft package is not installed. pip install '.\[peft\]'", lora(path))


def lora(path, **changes):
    return ModelConfig(path=path, lora=LoraConfig(**changes))


def test_a_family_without_a_load_balancing_loss_is_refused_before_it_samples(questions, tmp_path):
    sizes = {**SIZES, "first_k_dense_replace": 1, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}
    heads = {"q_lora_rank": None, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4}
    config = DeepseekV3Config(**sizes, **heads, vocab_size=len(tokenizer()), moe_intermediate_size=8)
    run = saved(config, questions, tmp_path)
    with pytest.raises(ModelError, match=r"optim.aux_loss_coef: DeepseekV3ForCausalLM has no load-balancing loss"):
        begin(replace(run, optim=replace(run.optim, aux_loss_coef=0.01)), tmp_path / "run")
    begin(run, tmp_path / "without")


def test_a_family_that_makes_no_loss_of_its_router_logits_is_refused_before_it_samples(questions, tmp_path):
    experts = {"num_experts": 4, "num_shared_experts": 0, "num_dense_layers": 0}
    config = AfmoeConfig(**SIZES, **experts, vocab_size=len(tokenizer()), moe_intermediate_size=8, head_dim=8)
    run = saved(config, questions, tmp_path)
    with pytest.raises(ModelError, match=r"optim.aux_loss_coef: AfmoeForCausalLM has no load-balancing loss"):
        begin(replace(run, optim=replace(run.optim, aux_loss_coef=0.01)), tmp_path / "run")
    begin(run, tmp_path / "without")


def test_a_family_that_cannot_go_on_with_fp32_gates_is_refused_before_it_samples(questions, tmp_path):
    config = JetMoeConfig(**SIZES, kv_channels=8, num_local_experts=4, vocab_size=len(tokenizer()))
    run = saved(config, questions, tmp_path)
    low = replace(run, model=replace(run.model, dtype="bfloat16"))
    with pytest.raises(ModelError, match=r"distributed.router_fp32: JetMoeForCausalLM cannot multiply fp32 gates"):
        begin(replace(low, distributed=DistributedConfig(router_fp32=True)), tmp_path / "run")
    begin(low, tmp_path / "without")
    begin(replace(run, distributed=DistributedConfig(router_fp32=True)), tmp_path / "in_fp32")


def saved(config, questions, folder):
    """The configuration of a run of a model with random weights."""
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    tokenizer().save_pretrained(folder / "model")
    return run_config(ModelConfig(path=str(folder / "model")), questions)


def test_messages_need_a_chat_template(checkpoints, questions, tmp_path):
    folder = tmp_path / "base"
    AutoModelForCausalLM.from_pretrained(checkpoints / "olmoe").save_pretrained(folder)
    tokenizer(template=None).save_pretrained(folder)
    with pytest.raises(ModelError, match="has no chat template, and the task jsonl gives messages"):
        train(run_config(ModelConfig(path=str(folder)), questions), tmp_path / "run")
    collect_batch(begin(run_config(ModelConfig(path=str(folder)), questions, chat=False), tmp_path / "text"))


def test_expert_weights_can_carry_adapters(checkpoints, questions, any_answer_pays, tmp_path):
    model = lora(
        str(checkpoints / "qwen3_moe"), rank=2, target_modules=(), target_parameters=("mlp.experts.down_proj",)
    )
    _, moved = trained(run_config(model, questions, checkpoint_every=99), tmp_path / "run")
    assert len(moved) == 4 and all("experts" in name for name in moved)


def test_a_policy_that_can_end_no_response_is_refused(questions, tmp_path):
    run = saved(config_of("olmoe", len(tokenizer())), questions, tmp_path)
    endless = tokenizer()
    endless.eos_token = None
    endless.save_pretrained(run.model.path)
    begin(run, tmp_path / "by_the_model_s_own")
    for name in ("config.json", "generation_config.json"):
        file = tmp_path / "model" / name
        file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": None}))
    with pytest.raises(ValueError, match=r"model.path: neither the tokenizer of .*model nor its generation config"):
        begin(run, tmp_path / "run")
