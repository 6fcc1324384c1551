"""A trained model as one safetensors file, written stage after stage.

    tensors    each trained parameter under its name, such as `slices.3.attention.qkv.weight`
    metadata   format "pt", as programs expect it; spec (canonical JSON) and position

No model is built, so no code of a custom model runs, and of a pipeline one stage at a time is in
memory. The file is written under another name and renamed, so it is whole or absent.

Exceptions:

    SetupError (ValueError)
      ExportError     the file or folder exists, or the model has no form of this format
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from atoll.coordinator.checkpoint_sets import CheckpointSet
from atoll.peer.errors import SetupError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

CODES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
"""Of safetensors."""

ALIGNED = 8  # bytes: the length of safetensors' header is a multiple of it


class ExportError(SetupError):
    """The model cannot be written in this format, or there."""


def export_parameters(found: CheckpointSet, path: Path, *, dtype: str = "float32") -> None:
    """Write the parameters of a run as one safetensors file.

    Args:
        found: the checkpoints of the run.
        path: a new file.
        dtype: number format of the values, a key of `DTYPES`.

    Raises:
        ExportError: the file exists.
        CheckpointError: a checkpoint is damaged.
        OSError: the file cannot be written.
    """
    expect_new(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        write_tensors(
            partial,
            {
                name: shape
                for header in found.headers
                for name, shape in zip(header.layout.names, header.layout.shapes, strict=True)
            },
            found.params(),
            dtype=dtype,
            metadata={
                "format": "pt",
                "spec": found.spec.canonical().decode(),
                "position": str(found.position),
            },
        )
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def expect_new(path: Path) -> None:
    """Refuse a file or folder that exists; raise ExportError."""
    if path.exists():
        raise ExportError(f"{path} exists and was not changed; choose another name")


def write_tensors(
    path: Path,
    shapes: Mapping[str, Sequence[int]],
    tensors: Iterable[tuple[str, Tensor]],
    *,
    dtype: str,
    metadata: Mapping[str, str],
) -> None:
    """Write a safetensors file, one tensor after another as they come.

    The library takes all tensors at once, and none that share memory.

    Args:
        path: of the file.
        shapes: of all tensors by name, in their order.
        tensors: each with its name, in that order.
        dtype: number format of the values, a key of `DTYPES`.
        metadata: texts by name.

    Raises:
        ValueError: the tensors are not those of the shapes.
        OSError: the file cannot be written.
    """
    with path.open("wb") as file:
        file.write(_header(shapes, dtype, metadata))
        for (name, shape), (given, tensor) in zip(shapes.items(), tensors, strict=True):
            if (given, tuple(tensor.shape)) != (name, tuple(shape)):
                raise ValueError(f"expected {name} {shape}, got {given} {tuple(tensor.shape)}")
            values = tensor.detach().to("cpu", DTYPES[dtype]).contiguous().reshape(-1)
            file.write(values.view(torch.uint8).numpy().data)  # numpy knows no bfloat16
        file.flush()
        os.fsync(file.fileno())


def _header(shapes: Mapping[str, Sequence[int]], dtype: str, metadata: Mapping[str, str]) -> bytes:
    fields: dict[str, object] = {"__metadata__": dict(metadata)}
    at = 0
    for name, shape in shapes.items():
        stop = at + torch.Size(shape).numel() * DTYPES[dtype].itemsize
        fields[name] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [at, stop]}
        at = stop
    raw = json.dumps(fields, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % ALIGNED)
    return struct.pack("<Q", len(raw)) + raw
