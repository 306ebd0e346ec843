"""Run folders in the form that training leaves, with random numbers, for tests of loading, figures and report.

The numbers resemble those of the tiny model (see the study's README), but are no results.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

SITES = [f"model.layers.{i}.mlp.gate" for i in range(4)]
K, LENGTH = 2, 25

ARMS: dict[str, dict[str, Any]] = {
    "grpo": {"label": "GRPO", "method": {"objective": "grpo", "replay": "none", "noise": 0.0}},
    "grpo_replay": {
        "label": "GRPO + Routing Replay",
        "method": {"objective": "grpo", "replay": "R2", "noise": 0.0},
    },
    "gspo": {"label": "GSPO", "method": {"objective": "gspo", "replay": "none", "noise": 0.0}},
    "grpo_noise": {"label": "GRPO", "method": {"objective": "grpo", "replay": "none", "noise": 1.0}},
    "grpo_replay_noise": {
        "label": "GRPO + Routing Replay",
        "note": "Replay ignores selection noise, so this run repeats the natural replay run of its seed.",
        "seeds": [0],
        "method": {"objective": "grpo", "replay": "R2", "noise": 1.0},
    },
    "gspo_noise": {"label": "GSPO", "method": {"objective": "gspo", "replay": "none", "noise": 1.0}},
}
FINAL = {"grpo": 0.82, "grpo_replay": 0.83, "gspo": 0.83, "grpo_noise": 0.45, "gspo_noise": 0.82}


def write_study(
    folder: Path,
    arms: tuple[str, ...] = tuple(ARMS),
    seeds: tuple[int, ...] = (0, 1, 2),
    steps: int = 31,
    minibatches: int = 4,
    sequences: int = 32,
    tokens_every: int = 10,
    unfinished: tuple[tuple[str, int], ...] = (),
    more: Mapping[str, tuple[dict[str, Any], float]] | None = None,
) -> Path:
    """Write a study of random numbers to `folder` and return the folder.

    more: name of a further arm -> its entry in the study file, and its final reward.
    """
    folder.mkdir(parents=True, exist_ok=True)
    every = {**ARMS, **{name: about for name, (about, _) in (more or {}).items()}}
    finals = {**FINAL, **{name: final for name, (_, final) in (more or {}).items()}}
    study = {
        "name": folder.name,
        "question": "Does Routing Replay or GSPO keep a small Mixture-of-Experts model stable?",
        "notes": "Synthetic numbers for tests.",
        "arms": {arm: every[arm] for arm in arms},
        "seeds": list(seeds),
        "base": {"optim": {"learning_rate": 1e-3, "num_minibatches": minibatches, "steps": steps}},
    }
    (folder / "study.yaml").write_text(yaml.safe_dump(study, sort_keys=False))
    for arm in arms:
        method = every[arm]["method"]
        draws = "grpo_replay" if method["replay"] == "R2" else arm  # replay does not see noise: equal numbers
        for seed in [seed for seed in seeds if seed in every[arm].get("seeds", seeds)]:
            done = (arm, seed) not in unfinished
            rng = np.random.default_rng([seed, list(every).index(draws)])
            run = folder / arm / f"seed{seed}"
            _write_run(run, rng, method, finals[draws], seed, steps, minibatches, sequences, tokens_every, done)
    return folder


def read_rows(run: Path) -> list[dict[str, Any]]:
    """Return the rows of a run folder's metrics.jsonl."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def write_rows(run: Path, rows: Iterable[dict[str, Any]], config: dict[str, Any] | None = None) -> None:
    """Write a run folder's rows, in place of earlier ones, and its configuration if one is given."""
    run.mkdir(parents=True, exist_ok=True)
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if config is not None:
        method = {"objective": "grpo", "replay": "none", "noise": 0.0}
        about = {"arm": run.parent.name, "label": run.parent.name, "seed": int(run.name.removeprefix("seed"))}
        (run / "config.yaml").write_text(yaml.safe_dump({**about, "method": method, **config}))


def add_rows(run: Path, *rows: dict[str, Any]) -> None:
    """Append rows to a run folder's metrics.jsonl, as the run itself would."""
    with open(run / "metrics.jsonl", "a") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))


def _write_run(
    folder: Path,
    rng: np.random.Generator,
    method: dict[str, Any],
    final: float,
    seed: int,
    steps: int,
    minibatches: int,
    sequences: int,
    tokens_every: int,
    done: bool,
) -> None:
    noisy, replay, gspo = method["noise"] > 0, method["replay"] == "R2", method["objective"] == "gspo"
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "seed": seed,
        "model": {"family": "qwen3_moe", "num_experts": 16, "num_experts_per_tok": K},
        "method": {**method, "clip_low": 0.003 if gspo else 0.2, "clip_high": 0.004 if gspo else 0.27},
        "rollout": {"prompts": 32, "group_size": 8, "lag": 0},
        "optim": {
            "learning_rate": 1e-3,
            "num_minibatches": minibatches,
            "steps": steps,
            "betas": [0.9, 0.999],
        },
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    environment = {
        "command": "moe-rl study experiments/replay_vs_gspo.yaml",
        "git_commit": "0123456789abcdef0123456789abcdef01234567",
        "git_dirty": False,
        "versions": {"torch": "2.13.0", "transformers": "5.23.0"},
        "python": "3.11.7",
        "platform": "Linux",
        "device": "cpu",
        "cuda": None,
        "cpus": 2,
        "threads": 1,
        "started": "2026-01-01T00:00:00Z",
    }
    (folder / "env.json").write_text(json.dumps(environment, indent=1))
    rows: list[dict[str, Any]] = []
    goal = final + rng.normal(0, 0.02)
    steps_done = steps if done else steps // 2
    for step in range(steps_done):
        rise = 0.38 + (max(goal, 0.62) - 0.38) * (1 - np.exp(-step / 5))
        reward = rise if goal > 0.6 else rise - (rise - goal) * min(1.0, max(0.0, step - 10) / 12)
        reward = float(np.clip(reward + rng.normal(0, 0.025), 0, 1))
        rows.append(
            {
                "kind": "rollout",
                "step": step,
                "reward": reward,
                "reward_n": 256,
                "reward_std": float(np.sqrt(reward * (1 - reward))),
                "response_length": LENGTH + rng.normal(0, 0.1),
                "groups_equal": 0.3,
                "seconds": 1.0,
                "rollout_logp_gap": 2e-6,
                "lag": 0,
            }
        )
        tables = []
        for u in range(1, minibatches + 1):
            rows.append(_update(rng, step, u, noisy, replay, gspo))
            probe, tokens = _probe(rng, step, u, sequences, reward, keep=step % tokens_every == 0)
            rows.append(probe)
            tables += tokens
        if tables:
            (folder / "tokens").mkdir(exist_ok=True)
            pd.concat(tables).to_parquet(folder / "tokens" / f"step_{step:06d}.parquet")
        rows.append({"kind": "step", "step": step, "seconds": 1.5})
        if step % 10 == 0:
            rows.append({"kind": "eval", "step": step, "reward": reward, "reward_n": 128, "greedy": False})
    write_rows(folder, rows)
    if done:
        (folder / "DONE").write_text('{"seconds": 1.0}\n')


def _update(rng: np.random.Generator, step: int, u: int, noisy: bool, replay: bool, gspo: bool) -> dict[str, Any]:
    noise = noisy and not replay
    var = (0.25 if noise else 0.006 if replay else 0.024) * rng.lognormal(0, 0.3) * (1 if noise else (u - 1) / 2)
    clipped = int(rng.poisson(1600 * ((0.18 if gspo else 0.03 if noise else 0.0005) * (u > 1 or noise))))
    return {
        "kind": "update",
        "step": step,
        "update": u,
        "loss": rng.normal(0, 0.01),
        "lr": 1e-3,
        "grad_norm": float((0.55 if noise and not gspo else 0.2) * rng.lognormal(0, 0.25)),
        "clipped_tokens": clipped,
        "tokens": 1600,
        "clipped_sequences": clipped // LENGTH if gspo else min(clipped, 64),
        "sequences": 64,
        "var_token_log_ratio": var,
        "var_sequence_log_ratio": var / LENGTH,
        "k1": var / 2,
        "k3": var / 2 * 0.97,
        "entropy": 0.4 * np.exp(-step / 20),
        "aux_loss": None,
        "replayed_rows": 64 if replay else 0,
        "routed_rows": 64,
        "slots_changed": 0 if replay else 12800 * 45 // 100 if noise else 120 * (u - 1),
        "slots": 12800,
    }


def _probe(
    rng: np.random.Generator, step: int, u: int, sequences: int, reward: float, keep: bool
) -> tuple[dict[str, Any], list[pd.DataFrame]]:
    T, L = sequences * LENGTH, len(SITES)
    token_rate = rng.gamma(0.5, 2.0, T) * 0.012 * u  # flips cluster on tokens, as real ones do
    slots = rng.binomial(K, np.clip(token_rate[:, None] * np.linspace(0.8, 1.3, L), 0, 1))
    flips = (slots > 0).sum(1)
    old = -rng.gamma(0.4, 0.6, T)
    drift = rng.normal(0, 0.04 * np.sqrt(u), T)
    predictor = np.roll(flips.reshape(sequences, LENGTH), 1, axis=1).ravel()  # flips one position to the left
    natural = drift + predictor * rng.normal(0, 0.12, T)
    sequence = natural.reshape(sequences, LENGTH).mean(1)
    table = pd.DataFrame(
        {
            "seq": np.repeat(np.arange(sequences), LENGTH),
            "pos": np.tile(np.arange(LENGTH), sequences),
            "token": rng.integers(0, 28, T),
            "update": u,
            "old_logp": old,
            "logp_natural": np.minimum(old + natural, 0),
            "logp_replayed": np.minimum(old + drift, 0),
            "flips": flips,
            "reward": np.repeat(rng.random(sequences) < reward, LENGTH).astype(float),
        }
    )
    site_rate, mean = (slots > 0).mean(), flips.mean()
    row = {
        "kind": "probe",
        "step": step,
        "update": u,
        "slots_changed": int(slots.sum()),
        "slots": T * L * K,
        "sites_changed": int(flips.sum()),
        "sites": T * L,
        "tokens_changed": int((flips > 0).sum()),
        "tokens": T,
        "site_names": SITES,
        "site_slots_changed": slots.sum(0).tolist(),
        "site_slots": [T * K] * L,
        "flips_histogram": np.bincount(flips, minlength=L + 1).tolist(),
        "deviation_histogram": np.bincount(slots.ravel(), minlength=K + 1).tolist(),
        "overdispersion": float(flips.var() / max(mean * (1 - site_rate), 1e-12)),
        "entropy": 0.4,
        "var_token_natural": natural.var(),
        "var_sequence_natural": sequence.var(),
        "var_token_replayed": drift.var(),
        "var_sequence_replayed": drift.reshape(sequences, LENGTH).mean(1).var(),
        "k1_natural": -natural.mean(),
        "extreme_2_natural": int((np.abs(natural) > np.log(2)).sum()),
        "k3_natural": float(np.mean(np.expm1(natural) - natural)),
        "k3_replayed": float(np.mean(np.expm1(drift) - drift)),
    }
    return row, [table] if keep else []


def floor_row(variant, arm, by_site, flips, deviation, positions, variance):
    """Return a noise floor row as training writes it: 4 sites, K = 2.

    positions: (changed, compared) sites of each position, from position 0.
    """
    tokens = sum(flips)
    return {
        "arm": arm, "seed": 0, "step": 0, "variant": variant,
        "slots_changed": sum(by_site), "slots": 8 * tokens, "sites_changed": sum(deviation[1:]), "sites": 4 * tokens,
        "tokens_changed": sum(flips[1:]), "tokens": tokens, "gap_mean": 1e-7, "gap_max": 1e-6,
        "site_names": SITES, "site_slots_changed": by_site, "site_slots": [2 * tokens] * 4,
        "flips_histogram": flips, "deviation_histogram": deviation,
        "var_token": variance, "var_sequence": variance / 10,
        "position_sites_changed": [c for c, _ in positions], "position_sites": [n for _, n in positions],
    }  # fmt: skip


# Two runs of 100 and 300 tokens; responses of three and of two positions.
FLOORS = [
    floor_row("repeat", "grpo", [0, 0, 0, 0], [100, 0, 0, 0, 0], [400, 0, 0], [(0, 160), (0, 160), (0, 80)], 1e-14),
    floor_row("batch", "grpo", [2, 0, 0, 0], [98, 2, 0, 0, 0], [398, 2, 0], [(2, 160), (0, 160), (0, 80)], 3e-14),
    floor_row("experts", "grpo", [0, 4, 0, 0], [97, 2, 1, 0, 0], [396, 4, 0], [(0, 160), (4, 160), (0, 80)], 2e-14),
    floor_row("bf16", "grpo", [8, 4, 0, 2], [90, 8, 1, 1, 0], [387, 12, 1], [(6, 160), (4, 160), (3, 80)], 1e-4),
    floor_row("repeat", "gspo", [0, 0, 0, 0], [300, 0, 0, 0, 0], [1200, 0, 0], [(0, 600), (0, 600)], 1e-14),
    floor_row("bf16", "gspo", [8, 0, 4, 2], [290, 8, 2, 0, 0], [1188, 10, 2], [(2, 600), (10, 600)], 3e-4),
]
