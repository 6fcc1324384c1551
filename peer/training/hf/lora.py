"""Low-rank adapters (LoRA, arXiv:2106.09685), by the package `peft`.

An adapter adds `alpha / rank * B A x` to a layer's output; `A` begins random, `B` as zeros, so the
model begins as its base. All other parameters are frozen, and frozen parameters are in no layout:
only the adapters travel, and a checkpoint holds nothing else.

Layers of the built-in decoder are fused, so one `A` serves query, key and value, and one serves
gate and up. For the names of `LlamaForCausalLM` the rows of `B` are divided like those of the
matrix, and each part gets the same `A`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from atoll.coordinator.run.sections import LoraSection
from atoll.peer.errors import ModelError
from atoll.peer.extras import extra
from atoll.peer.training.hf import llama
from atoll.peer.training.models import Decoder, ModelConfig

NAME = "default"  # peft's name for the only adapter of a model
PEFT_PREFIX = "base_model.model."  # of all names in an adapter's file


def inject_(model: nn.Module, lora: LoraSection, *, seed: int) -> None:
    """Put adapters into a model and freeze everything else; leave torch's random state unchanged.

    Args:
        model: a whole model.
        lora: rank, scale and targets.
        seed: seed of the matrices `A`.

    Raises:
        ExtraMissing: `peft` is not installed.
        ModelError: a target is the name of no layer, or of one that cannot have an adapter.
    """
    peft = extra("peft", "LoRA (model.lora)")
    if isinstance(model, Decoder):
        layers_of(model.config, lora)
    for target in lora.targets:
        if not any(_fits(target, name) for name, _ in model.named_modules()):
            raise ModelError(
                f"model.lora: no layer is named {target!r}; the names end in {_leaves(model)}"
            )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            config = peft.LoraConfig(
                r=lora.rank,
                lora_alpha=lora.alpha,
                target_modules=list(lora.targets),
                fan_in_fan_out=_is_transposed(model),
            )
            peft.inject_adapter_in_model(config, model, adapter_name=NAME)
        except ValueError as error:
            raise ModelError(f"model.lora: {error}") from error


def layers_of(config: ModelConfig, lora: LoraSection) -> dict[str, tuple[int, int]]:
    """Return the layers of each block of the decoder that get an adapter: inputs and outputs.

    Raises:
        ModelError: a target names something else.
    """
    heads = config.num_heads + 2 * config.kv_heads
    layers = {
        "attention.qkv": (config.dim, heads * config.head_dim),
        "attention.out": (config.dim, config.dim),
        "ffn.gate_up": (config.dim, 2 * config.ffn_dim),
        "ffn.out": (config.ffn_dim, config.dim),
    }
    for target in lora.targets:
        if not any(_fits(target, name) for name in layers):
            raise ModelError(
                f"model.lora: the built-in model has no layer {target!r} for an adapter; expected "
                f"qkv, gate_up, out, or one of {', '.join(layers)}"
            )
    return {
        name: sizes
        for name, sizes in layers.items()
        if any(_fits(target, name) for target in lora.targets)
    }


def num_params(config: ModelConfig, lora: LoraSection) -> int:
    """Return the number of trained parameters of the decoder with adapters; build nothing.

    Raises:
        ModelError: a target names no layer.
    """
    layers = layers_of(config, lora).values()
    return config.num_layers * sum(lora.rank * (inputs + outputs) for inputs, outputs in layers)


def merge_(model: nn.Module) -> None:
    """Add each adapter to the weights beneath it, and remove it.

    Raises:
        ModelError: the weights are not finite afterwards.
    """
    for name, layer in _adapted(model):
        try:
            layer.merge(safe_merge=True)
        except ValueError as error:
            raise ModelError(f"the adapter of {name!r} cannot be merged: {error}") from error
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, layer.get_base_layer())


def adapter_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the adapters of a model by the names that `peft` gives them in a file.

    Those of the decoder are for `LlamaForCausalLM`.
    """
    if isinstance(model, Decoder):
        found = dict(_for_llama(model))
    else:
        found = {
            name.replace(f".{NAME}.", "."): param.detach()
            for name, param in model.named_parameters()
            if f".{NAME}." in name
        }
    return {f"{PEFT_PREFIX}{name}": tensor.contiguous() for name, tensor in found.items()}


def adapter_config(lora: LoraSection, model: nn.Module, base: str) -> dict[str, Any]:
    """Return adapter_config.json of a model's adapters.

    Args:
        lora: the spec's section.
        model: the model with its adapters.
        base: folder or name of the weights beneath them.
    """
    targets = list(lora.targets)
    if isinstance(model, Decoder):
        targets = sorted({_layer_name(name) for name in adapter_of(model)})
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": targets,
        "fan_in_fan_out": _is_transposed(model),
        "inference_mode": True,
    }


def _adapted(model: nn.Module) -> list[tuple[str, Any]]:
    layer = extra("peft.tuners.tuners_utils", "LoRA (model.lora)").BaseTunerLayer
    return [(name, each) for name, each in model.named_modules() if isinstance(each, layer)]


def _for_llama(model: Decoder) -> Iterator[tuple[str, Tensor]]:
    parts_of = dict(llama.parts_of(model.config))
    for ours, layer in _adapted(model):
        a, b = (cast(Mapping[str, nn.Linear], x)[NAME] for x in (layer.lora_A, layer.lora_B))
        for theirs, rows in llama.split(b.weight.detach(), parts_of[ours]):
            yield f"{theirs}.lora_A.weight", a.weight.detach()
            yield f"{theirs}.lora_B.weight", rows


def _is_transposed(model: nn.Module) -> bool:
    """Return whether a model has GPT-2's layers, whose matrices are inputs by outputs."""
    return any(type(layer).__name__ == "Conv1D" for layer in model.modules())


def _layer_name(name: str) -> str:
    return name.split(".lora_")[0].rpartition(".")[2]


def _fits(target: str, name: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _leaves(model: nn.Module) -> str:
    linear = (name for name, each in model.named_modules() if isinstance(each, nn.Linear))
    return ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in linear))
