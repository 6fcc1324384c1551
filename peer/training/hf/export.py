"""Write a trained model as a folder that `transformers` loads.

    config.json, model.safetensors          the built-in decoder, also in slices, as
                                            `LlamaForCausalLM`; a model of a class of
                                            `transformers`, as its `save_pretrained` writes it.
                                            Adapters are merged
    adapter_config.json,                    with `adapter=True`: the adapters alone, for
    adapter_model.safetensors               `peft.PeftModel.from_pretrained` on the same base
    tokenizer.json, tokenizer_config.json   the run's tokenizer

The folder is written under another name and renamed, so it is whole or absent. The stages of a
pipeline are read and written one after another, without building the model.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from atoll.coordinator.checkpoint_sets import CheckpointSet
from atoll.coordinator.run.spec import RunSpec
from atoll.optim.state.layout import Layout
from atoll.peer.extras import extra
from atoll.peer.training import models
from atoll.peer.training.data.tokens import Tokenizer
from atoll.peer.training.hf import llama, lora
from atoll.peer.training.hf.tokenizer import files_of
from atoll.peer.training.models import Decoder, ModelConfig
from atoll.peer.training.one_file import DTYPES, ExportError, expect_new, write_tensors
from atoll.peer.training.opening import open_tokenizer, slices_of
from atoll.peer.training.permission import Allowed, with_own_files
from atoll.peer.training.stages import StageModel
from atoll.peer.training.trained import Trained, expect_stages


def export(
    trained: Trained, folder: Path, *, dtype: str = "float32", adapter: bool = False
) -> None:
    """Write a model, or its adapters, with its tokenizer.

    Args:
        trained: a model of a checkpoint. Its adapters are merged into it, unless they are exported.
        folder: a new folder.
        dtype: number format of the weights, a key of `DTYPES`.
        adapter: write the adapters alone.

    Raises:
        ExportError: the folder exists, the model has no adapters, or `transformers` does not know
            its class.
        ModelError: the adapters cannot be merged.
        OSError: the folder cannot be written.
    """
    with _new(folder) as partial:
        if adapter:
            _write_adapter(trained, partial, dtype)
        else:
            _write_model(trained, partial, dtype)
        _write_tokenizer(trained.spec, trained.tokenizer, partial)


def export_stages(
    found: CheckpointSet, folder: Path, *, dtype: str = "float32", tokenizer: str | None = None
) -> None:
    """Write the built-in model of a pipeline, with its tokenizer; hold one stage at a time.

    Args:
        found: the checkpoints of its stages.
        folder: a new folder.
        dtype: number format of the weights, a key of `DTYPES`.
        tokenizer: the tokenizer's file on this machine; one that the checkpoint names is not read.

    Raises:
        ExportError: the folder exists, or the model is a custom one.
        CheckpointError: a checkpoint is damaged.
        SetupError: the tokenizer is not allowed, or a stage has other parameters than the model's.
        OSError: the folder cannot be written.
    """
    spec = with_own_files(found.spec, data=None, tokenizer=tokenizer)
    _expect_built_in(spec)
    allowed = Allowed(files=frozenset() if tokenizer is None else frozenset({tokenizer}))
    opened = open_tokenizer(spec, allowed)
    expect_stages(spec, found, slices_of(spec, opened.vocab_size, allowed))
    with _new(folder) as partial:
        layouts = [header.layout for header in found.headers]
        _write_slices(spec, opened, layouts, found.params(), partial, dtype)
        _write_tokenizer(spec, opened, partial)


@contextmanager
def _new(folder: Path) -> Iterator[Path]:
    """Yield a folder that gets the name of a new one when all is written."""
    expect_new(folder)
    partial = folder.with_name(f".{folder.name}.{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        yield partial
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_model(trained: Trained, folder: Path, dtype: str) -> None:
    model = trained.model
    if isinstance(model, StageModel):
        _expect_built_in(trained.spec)
        params, layouts = model.named_parameters(), [Layout.of(model)]
        _write_slices(trained.spec, trained.tokenizer, layouts, params, folder, dtype)
        return
    if not isinstance(model, Decoder):
        _expect_known(model)
    if trained.spec.model.lora is not None:
        lora.merge_(model)
    if not isinstance(model, Decoder):
        model.to(DTYPES[dtype])
        model.save_pretrained(folder, safe_serialization=True)  # type: ignore[operator]
        return
    _write_tensors(folder / "model.safetensors", llama.state_dict_of(model), dtype)
    _write_config(folder, model.config, trained.tokenizer, dtype)


def _write_slices(
    spec: RunSpec,
    tokenizer: Tokenizer,
    layouts: Iterable[Layout],
    params: Iterable[tuple[str, Tensor]],
    folder: Path,
    dtype: str,
) -> None:
    """Write the built-in decoder, given its slices' parameters in the order of their layouts."""
    section = spec.model
    config = models.preset(
        section.preset,
        section.overrides,
        vocab_size=tokenizer.vocab_size,
        seq_len=spec.data.seq_len,
    )
    config = replace(config, tied=False)  # as slices are (`atoll.peer.training.stages`)
    parts_of = dict(llama.parts_of(config))
    shapes = {
        f"{part.name}.weight": (part.rows, *shape[1:])
        for layout in layouts
        for name, shape in zip(layout.names, layout.shapes, strict=True)
        for part in parts_of[_decoder_name(name, config)]
    }
    tensors = (
        (f"{theirs}.weight", rows)
        for name, param in params
        for theirs, rows in llama.split(param.detach(), parts_of[_decoder_name(name, config)])
    )
    path = folder / "model.safetensors"
    write_tensors(path, shapes, tensors, dtype=dtype, metadata={"format": "pt"})
    _write_config(folder, config, tokenizer, dtype)


def _decoder_name(name: str, config: ModelConfig) -> str:
    """Return the name in `Decoder`, without `.weight`, of a parameter of its slices."""
    _, index, inside = name.removesuffix(".weight").split(".", 2)
    is_block = 1 <= int(index) <= config.num_layers
    return f"blocks.{int(index) - 1}.{inside}" if is_block else inside


def _write_config(folder: Path, config: ModelConfig, tokenizer: Tokenizer, dtype: str) -> None:
    fields = llama.config_of(config) | {"dtype": dtype}
    end = tokenizer.end_token
    _write_json(folder / "config.json", fields | ({} if end is None else {"eos_token_id": end}))


def _write_tokenizer(spec: RunSpec, tokenizer: Tokenizer, folder: Path) -> None:
    files = files_of(spec.data.tokenizer, tokenizer, context=spec.data.seq_len)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")


def _write_adapter(trained: Trained, folder: Path, dtype: str) -> None:
    section, model = trained.spec.model.lora, trained.model
    if section is None:
        raise ExportError("the run trained no adapters; export the model, without --adapter")
    base = str(Path(trained.spec.model.init or "").expanduser().resolve())
    _write_tensors(folder / "adapter_model.safetensors", lora.adapter_of(model), dtype)
    _write_json(folder / "adapter_config.json", lora.adapter_config(section, model, base))


def _expect_built_in(spec: RunSpec) -> None:
    if spec.model.custom is not None:
        raise ExportError(
            f"the slices of {spec.model.custom!r} are no model of `transformers`, which could not "
            "load them; write their parameters with --format safetensors, or get the module with "
            "load_checkpoint (docs/library.md)"
        )


def _expect_known(model: nn.Module) -> None:
    known = extra("transformers", "the export of a custom model").PreTrainedModel
    if not isinstance(model, known):
        raise ExportError(
            f"{type(model).__name__} is no model of `transformers`, which could not load it; get "
            "the module with load_checkpoint (docs/library.md) and save its state_dict"
        )


def _write_tensors(path: Path, tensors: Mapping[str, Tensor], dtype: str) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    write_tensors(path, shapes, tensors.items(), dtype=dtype, metadata={"format": "pt"})


def _write_json(path: Path, fields: dict[str, Any]) -> None:
    path.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", encoding="utf-8")
