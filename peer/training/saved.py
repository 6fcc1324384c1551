"""Save a tree of numbers and tensors in one file, atomically and without pickle.

The file is a safetensors file. Its tensors are named `0`, `1`, ... in depth-first order of the
tree. Its metadata holds:

    format      "atoll-saved-1"
    kind        kind of the tree, for example "trainer"
    run         digest of the run that it belongs to
    tree        JSON; {"tensor": i} stands for a tensor, {"bytes": hex} for bytes, {"tuple": list}
                for a tuple, {"map": [[key, value], ...]} for a dict; lists and scalars stand for
                themselves
    sha256      digest of kind, run, tree and, for each tensor, its dtype, shape and bytes

A reader MUST compare the digest before it uses a value, and MUST refuse another kind or run.
Errors are `SavedStateError`.
"""

import errno
import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from atoll.peer.errors import SavedStateError

FORMAT = "atoll-saved-1"


def save(path: Path, tree: Mapping[str, Any], *, kind: str, run: str) -> None:
    """Write a tree of dicts, lists, numbers, strings, bytes and tensors.

    The old file stays in place until the new one is on disk.

    Args:
        path: file to write; its folder must exist.
        tree: tree to save; tensors may be on any device.
        kind: kind of the tree.
        run: digest of the run that it belongs to.

    Raises:
        TypeError: the tree holds a value of another type.
        OSError: the file cannot be written, for example because the disk is full.
    """
    write(path, copied(tree), kind=kind, run=run)


@dataclass(frozen=True, kw_only=True)
class Copied:
    """A tree as it was at one moment, for another thread to write."""

    text: str
    """the tree as JSON, without its tensors"""
    tensors: Mapping[str, Tensor]
    """copies on the CPU, by name"""


def copied(tree: Mapping[str, Any]) -> Copied:
    """Copy a tree; raise TypeError if it holds a value of another type than `save` takes."""
    tensors: dict[str, Tensor] = {}
    return Copied(text=json.dumps(_pack(tree, tensors)), tensors=tensors)


def write(path: Path, copy: Copied, *, kind: str, run: str) -> None:
    """Write a copy as `save` does; raise OSError if that is not possible."""
    metadata = {"format": FORMAT, "kind": kind, "run": run, "tree": copy.text}
    metadata["sha256"] = _digest(metadata, copy.tensors)
    partial = path.with_name(path.name + ".partial")
    try:
        safetensors.torch.save_file(dict(copy.tensors), partial, metadata)
        _sync(partial)
        partial.replace(path)
    except safetensors.SafetensorError as error:
        raise _os_error(error, path) from None
    finally:
        partial.unlink(missing_ok=True)
    _sync(path.parent)  # the folder holds the name


def load(path: Path, *, kind: str, run: str) -> dict[str, Any]:
    """Read a tree that `save` wrote; its tensors are on the CPU.

    Raises:
        SavedStateError: the file is missing, damaged, of another kind or of another run.
    """
    metadata, tensors = _read(path)
    if metadata.get("format") != FORMAT:
        raise SavedStateError(
            f"{path} is not a saved state of this version ({FORMAT}); move it away"
        )
    if metadata.get("sha256") != _digest(metadata, tensors):
        raise SavedStateError(f"{path} is damaged: its digest does not match; move it away")
    for name, expected in (("kind", kind), ("run", run)):
        if metadata.get(name) != expected:
            raise SavedStateError(
                f"{path} is of another {name}: expected {expected!r}, got {metadata.get(name)!r}; "
                "use another state directory"
            )
    tree: dict[str, Any] = _unpack(json.loads(metadata["tree"]), tensors)
    return tree


def _read(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}
            return file.metadata() or {}, tensors
    except FileNotFoundError as error:
        raise SavedStateError(f"{path} does not exist") from error
    except (safetensors.SafetensorError, OSError) as error:
        raise SavedStateError(f"{path} is damaged ({error}); move it away") from error


def _os_error(error: safetensors.SafetensorError, path: Path) -> OSError:
    # safetensors reports the system's error number only in its text: '... (os error 28)'.
    found = re.search(r"\(os error (\d+)\)", str(error))
    number = int(found[1]) if found else errno.EIO
    return OSError(number, os.strerror(number) if found else str(error), str(path))


def _digest(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in ("kind", "run", "tree"):
        digest.update(f"{name}={metadata.get(name)}\n".encode())
    for name in sorted(tensors, key=int):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _pack(value: Any, tensors: dict[str, Tensor]) -> Any:  # noqa: ANN401 - a tree of anything
    if isinstance(value, Tensor):
        name = str(len(tensors))
        tensors[name] = value.detach().to("cpu", copy=True).contiguous()
        return {"tensor": name}
    if isinstance(value, bytes | bytearray):
        return {"bytes": value.hex()}
    if isinstance(value, Mapping):
        # Pairs: the keys of a JSON object would all become strings.
        return {"map": [[_key(k), _pack(v, tensors)] for k, v in value.items()]}
    if isinstance(value, tuple):
        return {"tuple": _pack(list(value), tensors)}
    if isinstance(value, list):
        return [_pack(item, tensors) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"cannot save a {type(value).__name__}")


def _key(key: object) -> int | str:
    if type(key) is int or isinstance(key, str):
        return key
    raise TypeError(f"expected int or str as the key of a saved dict, got {key!r}")


def _unpack(value: Any, tensors: Mapping[str, Tensor]) -> Any:  # noqa: ANN401 - a tree of anything
    if isinstance(value, list):
        return [_unpack(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    ((name, content),) = value.items()
    if name == "tensor":
        return tensors[content]
    if name == "bytes":
        return bytes.fromhex(content)
    if name == "tuple":
        return tuple(_unpack(content, tensors))
    return {key: _unpack(item, tensors) for key, item in content}
