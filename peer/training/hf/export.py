"""Write a trained model as a folder that `transformers` loads.

    config.json, model.safetensors          the built-in decoder, as `LlamaForCausalLM`; a model of
                                            a class of `transformers`, as its `save_pretrained`
                                            writes it. Adapters are merged
    adapter_config.json,                    with `adapter=True`: the adapters alone, for
    adapter_model.safetensors               `peft.PeftModel.from_pretrained` on the same base
    tokenizer.json, tokenizer_config.json   the run's tokenizer

The folder is written under another name and renamed, so it is whole or absent.

Exceptions:

    SetupError (ValueError)
      ExportError     the folder exists, or the model has no form that `transformers` knows
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from atoll.peer.errors import SetupError
from atoll.peer.extras import extra
from atoll.peer.training.hf import llama, lora
from atoll.peer.training.hf.tokenizer import files_of
from atoll.peer.training.models import Decoder
from atoll.peer.training.trained import Trained

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class ExportError(SetupError):
    """The model cannot be written as a folder of Hugging Face."""


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
    if folder.exists():
        raise ExportError(f"{folder} exists and was not changed; choose another folder")
    partial = folder.with_name(f".{folder.name}.{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        if adapter:
            _write_adapter(trained, partial, dtype)
        else:
            _write_model(trained, partial, dtype)
        spec = trained.spec
        tokenizer = files_of(spec.data.tokenizer, trained.tokenizer, context=spec.data.seq_len)
        for name, text in tokenizer.items():
            (partial / name).write_text(text, encoding="utf-8")
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_model(trained: Trained, folder: Path, dtype: str) -> None:
    model = trained.model
    if not isinstance(model, Decoder):
        _expect_known(model)
    if trained.spec.model.lora is not None:
        lora.merge_(model)
    if not isinstance(model, Decoder):
        model.to(DTYPES[dtype])
        model.save_pretrained(folder, safe_serialization=True)  # type: ignore[operator]
        return
    _write_tensors(folder / "model.safetensors", llama.state_dict_of(model), dtype)
    config = llama.config_of(model.config) | {"dtype": dtype}
    end = trained.tokenizer.end_token
    _write_json(folder / "config.json", config | ({} if end is None else {"eos_token_id": end}))


def _write_adapter(trained: Trained, folder: Path, dtype: str) -> None:
    section, model = trained.spec.model.lora, trained.model
    if section is None:
        raise ExportError("the run trained no adapters; export the model, without --adapter")
    base = str(Path(trained.spec.model.init or "").expanduser().resolve())
    _write_tensors(folder / "adapter_model.safetensors", lora.adapter_of(model), dtype)
    _write_json(folder / "adapter_config.json", lora.adapter_config(section, model, base))


def _expect_known(model: nn.Module) -> None:
    known = extra("transformers", "the export of a custom model").PreTrainedModel
    if not isinstance(model, known):
        raise ExportError(
            f"{type(model).__name__} is no model of `transformers`, which could not load it; get "
            "the module with load_checkpoint (docs/library.md) and save its state_dict"
        )


def _write_tensors(path: Path, tensors: dict[str, Tensor], dtype: str) -> None:
    written = {name: each.to(DTYPES[dtype]).contiguous() for name, each in tensors.items()}
    owners: set[int] = set()
    for name, each in written.items():
        if each.untyped_storage().data_ptr() in owners:  # safetensors refuses shared memory
            written[name] = each.clone()
        owners.add(written[name].untyped_storage().data_ptr())
    save_file(written, path, metadata={"format": "pt"})


def _write_json(path: Path, fields: dict[str, Any]) -> None:
    path.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", encoding="utf-8")
