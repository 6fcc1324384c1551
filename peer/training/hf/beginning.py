"""The weights and adapters with which a run's model begins.

A spec that names weights (`model.init`) also states what follows from their config.json, as
`model.overrides`, once the run has begun. So a peer without the folder can build the model; the
weights come with the first state, unless some of them are frozen.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn

from atoll.coordinator.run.spec import RunSpec
from atoll.peer.errors import ModelError
from atoll.peer.training.hf import llama, lora
from atoll.peer.training.hf.folder import WeightFolder, expect_weights
from atoll.peer.training.models import Decoder


def with_shape(spec: RunSpec) -> RunSpec:
    """Return a spec whose overrides describe the model in its folder of weights.

    For a spec that this machine's owner wrote: it reads the folder that the spec names. A spec with
    a custom model, or without weights, stays as it is.

    Raises:
        ModelError: the folder cannot be read, the built-in model cannot hold these weights, or the
            spec's own overrides contradict them.
    """
    if spec.model.init is None or spec.model.custom is not None:
        return spec
    found = llama.overrides_of(WeightFolder(spec.model.init).config)
    given, positions = dict(spec.model.overrides), int(found["max_seq_len"])
    for name, value in given.items():
        # A run may give the model fewer positions than it was trained with.
        is_shorter = name == "max_seq_len" and type(value) is int and value <= positions
        if name in found and found[name] != value and not is_shorter:
            raise ModelError(
                f"model.overrides sets {name}={value}, but config.json in {spec.model.init!r} "
                f"states {found[name]}; omit it"
            )
    model = spec.model.model_copy(update={"overrides": {**found, **given}})
    return spec.model_copy(update={"model": model})


def begin_(
    model: nn.Module, spec: RunSpec, *, files: Collection[str] = (), is_first: bool = False
) -> None:
    """Give a model of a run the weights and the adapters that the spec names.

    Args:
        model: the model as drawn from the seed.
        spec: the spec of the run.
        files: names that this machine's owner allows the spec to read.
        is_first: load trained parameters too; otherwise the run gives them, and only frozen ones
            are loaded.

    Raises:
        ModelError: the weights are needed and not allowed, not the run's, or do not fit.
        ExtraMissing: `peft` is needed and not installed.
    """
    init, adapters = spec.model.init, spec.model.lora
    has_frozen = adapters is not None or any(not p.requires_grad for p in model.parameters())
    if init is not None and (is_first or has_frozen):
        expect_init(spec, files)
        expect_weights(init, spec.model.init_sha256)
        with WeightFolder(init) as folder:
            load_(model, folder)
    if adapters is not None:
        lora.inject_(model, adapters, seed=spec.run.seed)


def expect_init(spec: RunSpec, files: Collection[str]) -> None:
    """Check that this machine's owner allows the folder of weights; read nothing.

    Raises:
        ModelError: the spec names one, and it is not allowed.
    """
    if spec.model.init is not None and spec.model.init not in files:
        raise ModelError(
            f"the run begins with the weights {spec.model.init!r}, a folder on this machine, and "
            "reads nothing that this machine's owner has not named; name your copy with --init PATH"
        )


def load_(model: nn.Module, folder: WeightFolder) -> None:
    """Copy the weights of an open folder into a model, whatever their type.

    The built-in decoder takes those of the Llama family. Another model takes tensors with the names
    of its own parameters and buffers, as `save_pretrained` writes those of `transformers`; a prefix
    that such a model gives its own base (`base_model_prefix`) may be absent.

    Raises:
        ModelError: they do not fit.
    """
    if isinstance(model, Decoder):
        llama.load_(model, folder)
        return
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    given, left = folder.names, folder.names
    with torch.no_grad():
        for names, values in _values_of(model):
            choices = [*names, *(name.removeprefix(prefix) for name in names)]
            found = [name for name in choices if name in given]
            name = found[0] if found else names[0]
            values.copy_(folder.tensor(name, tuple(values.shape)))
            left.difference_update(choices)
    llama.expect_none_left(folder, left)


def _values_of(model: nn.Module) -> list[tuple[list[str], torch.Tensor]]:
    """Return each parameter and kept buffer once, with all names that it has."""
    kept = model.state_dict(keep_vars=True)
    names_of: dict[int, list[str]] = {}
    for name, values in kept.items():
        names_of.setdefault(id(values), []).append(name)
    return [(names, kept[names[0]]) for names in names_of.values()]
