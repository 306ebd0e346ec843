"""Constructors `from_*` of RoutedExperts, which read what other programs return or write."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
)

from moe_rl.routing.arrays import decode_sglang, ids_from_engine, ids_from_padded, layers_of, pad_left_aligned
from moe_rl.routing.errors import RoutingError, UnsupportedModelError
from moe_rl.routing.packing import as_mask, as_tensor
from moe_rl.routing.sites import canonical_site, find_sites
from moe_rl.routing.traces import read_flame, read_megatron, read_slime, slime_samples

Made = TypeVar("Made", bound="FromOthers")
NumExperts = int | Sequence[int] | None
Described = PreTrainedConfig | nn.Module | str | os.PathLike[str] | Sequence[str]
"""A model's configuration, the model, a folder or hub id that has the configuration, or the names of its sites."""
_WIDTHS = ("num_router_classes", "n_routed_experts", "num_experts")
"""Attributes of routers that say how many experts they rank, the widest first: some count skip or zero experts too."""


class FromOthers:
    """Mixin of `RoutedExperts`: the constructors `from_*`.

    `config_or_sites` names the sites. A model's configuration (or a folder or hub id that has the configuration, or the
    model) also gives their numbers of experts, without loading weights; with a list of names, pass
    `num_experts`. Its default is the largest id plus one (`from_flame`: 64).
    """

    @classmethod
    def from_padded(
        cls: type[Made],
        array: Tensor | np.ndarray,
        mask: Tensor | np.ndarray,
        config_or_sites: Described,
        num_experts: NumExperts = None,
        *,
        layers: Sequence[int] | None = None,
        tokens: Tensor | None = None,
        meta: Mapping[str, Any] | None = None,
    ) -> Made:
        """Make routes of a padded integer array `[B,T,layers,K]`, as trainers carry it.

        mask: `[B,T]`, True where a sequence has a token, prompt included. Values elsewhere are ignored, and so is a
            zero row of a sequence's last token (it was sampled and never fed back).
        layers: index of each site along the array's layer axis. Default: in order if there are L layers, else the
            layer number in each site's name, dense layers being zero rows.

        Raises RoutingError: shapes, mask or ids that do not fit, layers without routes, tokens without routes inside a
        sequence.

        >>> from moe_rl.routing import RoutedExperts
        >>> array = torch.tensor([[[[3, 1]], [[2, 0]], [[0, 0]], [[0, 0]]]])  # three tokens, the last never fed back
        >>> mask = torch.tensor([[True, True, True, False]])
        >>> RoutedExperts.from_padded(array, mask, ["gate"], 4).ids.tolist()
        [[[[3, 1]], [[2, 0]], [[-1, -1]], [[-1, -1]]]]
        """
        names, experts = sites_of(config_or_sites)
        ids = ids_from_padded(array, mask, names, layers)
        return _made(cls, ids, names, num_experts, experts, tokens, meta)

    @classmethod
    def from_verl(
        cls: type[Made],
        batch: Any,
        config_or_sites: Described,
        num_experts: NumExperts = None,
        *,
        layers: Sequence[int] | None = None,
        meta: Mapping[str, Any] | None = None,
    ) -> Made:
        """Make routes of a batch of verl: a DataProto, or its `batch`, with `routed_experts` and `attention_mask`.

        `routed_experts` is `[B,P+R,layers,K]`, prompts padded left and responses right with zeros, or a nested tensor
        of `[tokens,layers,K]`; `input_ids`, if present, become `tokens`.

        Raises RoutingError: a key is missing, or as in `from_padded`.
        """
        content = getattr(batch, "batch", batch)
        keys = [key for key in ("routed_experts", "attention_mask", "input_ids") if key in content.keys()]  # noqa: SIM118 (a TensorDict iterates over rows)
        held = {key: as_tensor(content[key], key) for key in keys}
        if "routed_experts" not in held:
            raise RoutingError(
                f"no routed_experts in the batch, but {', '.join(map(str, content.keys()))}: is "
                "actor.router_replay.mode set, and rollout.enable_rollout_routing_replay for R3?"
            )
        experts, mask, tokens = held["routed_experts"], held.get("attention_mask"), held.get("input_ids")
        shapes = [list(x.shape) for x in (tokens, mask) if x is not None and not x.is_nested]
        if shapes[1:] and shapes[0] != shapes[1]:
            raise RoutingError(f"input_ids {shapes[0]} and attention_mask {shapes[1]} differ")
        padded = None
        if experts.is_nested:
            padded = None if mask is None or mask.is_nested else as_mask(mask, "attention_mask")
            experts, mask, tokens = _left_aligned(experts, tokens, padded)
        elif mask is None:
            raise RoutingError("no attention_mask in the batch: zeros of the padding cannot be told from expert 0")
        elif tokens is not None:
            tokens = tokens.masked_fill(~as_mask(mask, "attention_mask"), -1)
        routes: Any = cls.from_padded(
            experts, mask, config_or_sites, num_experts, layers=layers, tokens=tokens, meta=meta
        )
        return routes if padded is None else routes.realign(mask, padded)

    @classmethod
    def from_slime(
        cls: type[Made],
        samples: Any,
        config_or_sites: Described,
        num_experts: NumExperts = None,
        *,
        layers: Sequence[int] | None = None,
        meta: Mapping[str, Any] | None = None,
    ) -> Made:
        """Make routes of slime's samples, or of a file of `--save-debug-rollout-data`.

        A sample is an object or mapping with `tokens` and `rollout_routed_experts` `[tokens - 1, layers, K]`; samples
        come in the nesting of a rollout. Sequences are aligned left; their tokens become `tokens`.

        Raises RoutingError: a sample lacks one of the two, or has a number of rows that its tokens do not allow; no
        sample has tokens; a file that holds more than values and tensors (it is a pickle, and read as data only).
        """
        given = read_slime(samples) if isinstance(samples, str | os.PathLike) else samples
        found = slime_samples(given)
        tokens = [as_tensor(x, f"tokens of sample {i}").cpu().reshape(-1) for i, (_, x, _) in enumerate(found)]
        if not any(map(len, tokens)):
            raise RoutingError(f"none of {len(tokens)} samples has a token")
        for i, row in enumerate(tokens):
            if len(row) and row.is_floating_point():  # of no token torch makes float32
                raise RoutingError(f"tokens of sample {i}: expected whole numbers, got {row.dtype}")
        arrays = [as_tensor(ids, f"routes of sample {i}").cpu().numpy() for i, (*_, ids) in enumerate(found)]
        padded = pad_left_aligned([row.long() for row in tokens], -1)
        return cls.from_vllm(
            arrays, config_or_sites, num_experts, layers=layers, mask=padded >= 0, tokens=padded, meta=meta
        )

    @classmethod
    def from_megatron_jsonl(
        cls: type[Made],
        path: str | os.PathLike[str],
        config_or_sites: Described | None = None,
        num_experts: NumExperts = None,
        *,
        step: int = 0,
        sequences: int = 1,
        micro_batches: int = 1,
        layers: Sequence[int] | None = None,
        meta: Mapping[str, Any] | None = None,
    ) -> Made:
        """Make routes of one step of a trace of Megatron-LM's `--moe-routing-trace-path`: `router_trace_rank*.jsonl`.

        config_or_sites: default: Megatron's names, `decoder.layers.N.mlp.router`; N counts from the first layer of the
            rank's pipeline stage.
        sequences: number of sequences in a micro-batch; 1 if they are packed. Micro-batches follow each other along B.
        micro_batches: number of micro-batches in a step on this rank: how often each layer occurs.
        layers: each site's layer number in the trace. Default: all in order if there are L, else the number in
            each site's name.

        If Megatron passes on a map of tokens to experts, ids are in ascending order, not in the router's. Layers of
        multi-token prediction are left out. Traces of virtual pipelines, and those made while activations were
        recomputed, are not read: in both, layers are repeated.

        Raises RoutingError naming file and line; also if a layer occurs more or less often than `micro_batches` says,
        or if every micro-batch has an equal one.
        """
        if sequences < 1 or step < 0:
            raise RoutingError(f"sequences {sequences}, step {step}: expected at least 1 and 0")
        ids, found = read_megatron(path, step, sequences, micro_batches)
        default = [f"decoder.layers.{layer}.mlp.router" for layer in found]
        names, experts = sites_of(default if config_or_sites is None else config_or_sites)
        if layers is not None or len(names) != len(found):
            layers = layers_of(names, max(found) + 1, layers)
            if not set(layers) <= set(found):
                raise RoutingError(f"the sites are of layers {layers}, {path} has {list(found)}: pass layers=")
            ids = ids[:, :, [found.index(layer) for layer in layers]]
        return _made(cls, ids, names, num_experts, experts, None, meta)

    @classmethod
    def from_flame(
        cls: type[Made],
        folder: str | os.PathLike[str],
        samples: str | os.PathLike[str] | None = None,
        *,
        start: int = 0,
        count: int = 1 << 16,
        config_or_sites: Described | None = None,
        num_experts: NumExperts = 64,
        meta: Mapping[str, Any] | None = None,
    ) -> Made:
        """Make routes `[1,count,L,K]` of one checkpoint (`actives/iter_NNNN`) of CMU-FLAME/FLAME-MoE-Traces. Needs
        pyarrow.

        The traces are one row of tokens, the same at every checkpoint, so that two checkpoints compare at once:
        `slot_change(RoutedExperts.from_flame(a), RoutedExperts.from_flame(b))`. Where sequences begin is not recorded.

        samples: the folder `samples` of the same model; its token ids become `tokens`.
        start, count: the first row, and the number of rows.
        config_or_sites: default: the names of the files, `layer_02`, ...

        Raises RoutingError naming the file.
        """
        ids, stems, tokens = read_flame(folder, start, count, samples)
        names, experts = sites_of(list(stems) if config_or_sites is None else config_or_sites)
        if len(names) != len(stems):
            raise RoutingError(f"{len(names)} sites, but {folder} has {len(stems)} layers: {stems[0]} to {stems[-1]}")
        return _made(cls, ids, names, num_experts if experts is None else None, experts, tokens, meta)

    @classmethod
    def from_vllm(
        cls: type[Made],
        arrays: Sequence[np.ndarray | str | bytes],
        sites: Described,
        num_experts: NumExperts = None,
        *,
        layers: Sequence[int] | None = None,
        mask: Tensor | None = None,
        tokens: Tensor | None = None,
        meta: Mapping[str, Any] | None = None,
    ) -> Made:
        """Make routes of vLLM's `CompletionOutput.routed_experts`: per sequence `[P+G-1, num_layers, K]` integers. The
        text in which vLLM's server sends them is read, too.

        sites: as `config_or_sites` of the other constructors.
        layers: index of each site along the engine's layer axis, which counts dense layers too (zero rows).
            Default: all layers in order if there are L of them, else the layer number in each site's name.
        mask: `[B,T]`, where each sequence's P+G (or P+G-1) tokens are. Default: packed to the left, T the
            longest array.

        Raises RoutingError if the arrays do not fit sites or mask, or if a routed layer is all zeros: then
        the engine captured nothing (see `ids_from_engine`).
        """
        names, experts = sites_of(sites)
        ids = ids_from_engine(arrays, names, layers, mask)
        return _made(cls, ids, names, num_experts, experts, tokens, meta)

    @classmethod
    def from_sglang(
        cls: type[Made],
        payloads: Sequence[str | bytes],
        sites: Described,
        num_experts: NumExperts = None,
        *,
        num_layers: int,
        num_experts_per_tok: int,
        layers: Sequence[int] | None = None,
        mask: Tensor | None = None,
        tokens: Tensor | None = None,
        meta: Mapping[str, Any] | None = None,
    ) -> Made:
        """Make routes of SGLang's `meta_info["routed_experts"]`: base64 of int32 `[P+G-1, num_layers, K]` each.

        The bytes do not say their shape: num_layers counts all hidden layers. The rest is as in `from_vllm`.
        """
        arrays = [decode_sglang(payload, num_layers, num_experts_per_tok) for payload in payloads]
        return cls.from_vllm(arrays, sites, num_experts, layers=layers, mask=mask, tokens=tokens, meta=meta)


def _left_aligned(
    experts: Tensor, tokens: Tensor | None, padded: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return nested routes `[tokens,layers,K]` padded on the right, a mask of their positions, and their tokens. The
    given tokens are nested, or padded as `padded` says."""
    parts = experts.unbind()
    lengths = torch.tensor([len(part) for part in parts], device="cpu")
    here = torch.arange(int(lengths.max()), device="cpu") < lengths[:, None]
    rows: Sequence[Tensor] | None = None
    if tokens is not None and tokens.is_nested:
        rows = tokens.unbind()
    elif tokens is not None and padded is not None:
        rows = [row[mask] for row, mask in zip(tokens, padded, strict=True)]
    return pad_left_aligned(parts, 0), here, None if rows is None else pad_left_aligned(rows, -1)


def _made(
    cls: Any,
    ids: Tensor,
    names: tuple[str, ...],
    given: NumExperts,
    known: tuple[int, ...] | None,
    tokens: Tensor | None,
    meta: Mapping[str, Any] | None,
) -> Any:
    """Return the routes. Their sites have `given` experts, else the number `known` from the configuration, else the
    largest id plus one."""
    experts = given if given is not None else known if known is not None else max(1, int(ids.max()) + 1)
    return cls(ids, names, experts, tokens=tokens, meta=meta)


def sites_of(model: Described) -> tuple[tuple[str, ...], tuple[int, ...] | None]:
    """Return the L qualified names of the routing sites, and their numbers of experts (None if only names are given).

    A configuration becomes a model on torch's meta device, where tensors have no memory: nothing is loaded. It is a
    causal language model or, where the family has none, the model that also takes images.

    Raises UnsupportedModelError for a model without routers; RoutingError for a configuration that cannot be read.

    >>> from transformers import Qwen3MoeConfig
    >>> sites_of(Qwen3MoeConfig(num_hidden_layers=2, num_experts=16, mlp_only_layers=[0]))
    (('model.layers.1.mlp.gate',), (16,))
    """
    described: Any = model
    if isinstance(model, str | os.PathLike):
        try:
            if not Path(model).exists() and (silence := out_of_reach(str(model))):
                raise silence
            described = AutoConfig.from_pretrained(model)
        except Exception as error:  # hub and configuration errors share no base class
            raise RoutingError(
                f"{model}: no configuration of a model there ({error}); expected a folder in hub format, a hub id, or "
                "a list of site names"
            ) from error
    if isinstance(described, PreTrainedConfig):
        described = _unloaded(described)
    if isinstance(described, nn.Module):
        found = find_sites(described)
        return tuple(site.name for site in found), tuple(ranked_experts(site.module, site.name) for site in found)
    names = tuple(canonical_site(name) for name in described)
    if not names:
        raise RoutingError("no sites were named: routes need at least one")
    return names, None


def _unloaded(config: PreTrainedConfig) -> nn.Module:
    """Return the model of a configuration, on the meta device. Raises RoutingError if transformers makes none."""
    text_alone = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or type(config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    kind = AutoModelForCausalLM if text_alone else AutoModelForImageTextToText
    try:
        with torch.device("meta"):
            return kind.from_config(config)
    except ValueError as error:  # the first line is followed by the names of all classes that transformers knows
        raise RoutingError(
            f"transformers makes no language model of a {type(config).__name__}: {str(error).splitlines()[0]} Give the "
            "model itself, or a list of site names"
        ) from error


def out_of_reach(name: str) -> Exception | None:
    """Return the error why no hub answers about a model that was never downloaded, or None if loading will tell. Asked
    beforehand, because transformers would repeat each of its requests for 23 seconds before it raises the error."""
    try:
        if not try_to_load_from_cache(name, "config.json"):
            get_hf_file_metadata(hf_hub_url(name, "config.json"))
    except (HfHubHTTPError, HFValidationError):
        return None  # the hub answered, or is not asked: this is no name of its models
    except Exception as error:  # what connections raise depends on the version of huggingface_hub
        return error
    return None


def ranked_experts(router: nn.Module, name: str) -> int:
    """Return how many experts a router ranks."""
    for attribute in _WIDTHS:
        value = getattr(router, attribute, None)
        if isinstance(value, int):
            return value
    tables = [p for p in router.parameters() if p.ndim == 2]
    if len(tables) == 1:
        return int(tables[0].shape[0])
    raise UnsupportedModelError(f"site {name} ({type(router).__name__}) does not say how many experts it ranks")
