"""Save a tree of numbers and tensors in one file, atomically and without pickle.

The file is a safetensors file. Its tensors are named `0`, `1`, ... in depth-first order of the
tree. Its metadata holds:

    format      "atoll-saved-1"
    kind        kind of the tree, for example "trainer"
    run         digest of the run that it belongs to
    tree        JSON; {"tensor": i} stands for a tensor, {"bytes": hex} for bytes, {"tuple": list}
                for a tuple, {"map": [[key, value], ...]} for a dict, {"part": [i, runs, shape]} for
                the values of some runs of a larger tensor; lists and scalars stand for themselves
    sha256      digest of kind, run, tree and, for each tensor, its dtype, shape and bytes

A reader MUST compare the digest before it uses a value, and MUST refuse another kind or run.
Errors are `SavedStateError`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import safetensors
import torch
from torch import Tensor

from atoll.compression import staging
from atoll.optim.state.parts import TensorPart
from atoll.peer.errors import SavedStateError

FORMAT = "atoll-saved-1"
NO_DIGEST = "0" * 64  # as long as the digest that takes its place
BUFFER_VALUES = 8 << 20  # of a GPU's, at once
READ_BYTES = 1 << 18  # hashed at once: the pages are in memory already

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names of the dtypes in a safetensors file."""


def save(path: Path, tree: Mapping[str, Any], *, kind: str, run: str) -> None:
    """Write a tree of dicts, lists, numbers, strings, bytes and tensors.

    The old file stays in place until the new one is on disk. Nothing is copied but what lies on
    another device, a tensor at a time: nobody may change the tree meanwhile.

    Args:
        path: file to write; its folder must exist.
        tree: tree to save; tensors may be on any device.
        kind: kind of the tree.
        run: digest of the run that it belongs to.

    Raises:
        TypeError: the tree holds a value of another type.
        OSError: the file cannot be written, for example because the disk is full.
    """
    finish(begin(path, tree, kind=kind, run=run))


@dataclass(frozen=True, kw_only=True)
class Begun:
    """A tree as it was at one moment, in a file that lacks its digest and its name."""

    path: Path
    """the name to come"""
    partial: Path
    metadata: Mapping[str, str]
    tensors: Mapping[str, _InFile]
    """by name"""
    digest_at: int
    """where the digest goes, in bytes from the beginning"""


@dataclass(frozen=True, kw_only=True)
class _InFile:
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """in bytes from the beginning of the file"""
    stop: int


def begin(path: Path, tree: Mapping[str, Any], *, kind: str, run: str) -> Begun:
    """Write a tree as `save` does, but for its digest, which `finish` computes from the file.

    The system takes the bytes as fast as memory does, and writes them to the disk when it wants:
    so a copy of the tree takes none of this process's memory. What raises leaves no file.
    """
    tensors: dict[str, Tensor] = {}
    metadata = {"format": FORMAT, "kind": kind, "run": run}
    metadata["tree"] = json.dumps(_pack(tree, tensors))
    partial = path.with_name(path.name + ".partial")
    with _no_partial(path, partial), partial.open("wb") as file:
        places, digest_at = _write(file, metadata, tensors)
    return Begun(path=path, partial=partial, metadata=metadata, tensors=places, digest_at=digest_at)


def finish(begun: Begun) -> None:
    """Give what `begin` wrote its digest and its name, in any thread; raise OSError as `save`."""
    seal(begun)
    put(begun)


def seal(begun: Begun) -> None:
    """Give what `begin` wrote its digest, and bring it to the disk without its name."""
    with _no_partial(begun.path, begun.partial):
        with begun.partial.open("r+b") as file:
            digest = _digest_of_file(begun.metadata, begun.tensors, file)
            file.seek(begun.digest_at)
            file.write(digest.encode())
            file.flush()
            os.fsync(file.fileno())


def put(begun: Begun) -> None:
    """Give what `seal` left its name, in the place of an older file."""
    with _no_partial(begun.path, begun.partial):
        begun.partial.replace(begun.path)
        _sync(begun.path.parent)  # the folder holds the name


@contextmanager
def _no_partial(path: Path, partial: Path) -> Iterator[None]:
    """Leave no file behind if something fails; name the file that was to be written."""
    try:
        yield
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise type(error)(error.errno, error.strerror, str(path)) from None
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def load(path: Path, *, kind: str, run: str, older: str = "") -> dict[str, Any]:
    """Read a tree that `save` wrote; its tensors are on the CPU.

    Args:
        path: the file.
        kind: kind of the tree.
        run: digest of the run that it belongs to.
        older: the digest by which an earlier version of Atoll named the same run.

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
        if metadata.get(name) not in (expected, older if older and name == "run" else expected):
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


def _write(
    file: BinaryIO, metadata: Mapping[str, str], tensors: Mapping[str, Tensor]
) -> tuple[dict[str, _InFile], int]:
    """Write a safetensors file, a tensor at a time: the library makes bytes of all of them first.

    The widest values come first, so that each tensor is aligned. Return where the tensors lie, and
    where the digest has to be put.
    """
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), int(name)))
    header: dict[str, Any] = {"__metadata__": {**metadata, "sha256": NO_DIGEST}}
    end = 0
    for name in names:
        start, end = end, end + tensors[name].numel() * tensors[name].element_size()
        header[name] = {
            "dtype": DTYPES[tensors[name].dtype],
            "shape": list(tensors[name].shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    length = len(text).to_bytes(8, "little")
    file.write(length + text)
    for name in names:
        for piece in _pieces(tensors[name]):
            file.write(piece)
    before = len(length) + len(text)
    places = {
        name: _InFile(
            dtype=tensors[name].dtype,
            shape=tuple(tensors[name].shape),
            start=before + header[name]["data_offsets"][0],
            stop=before + header[name]["data_offsets"][1],
        )
        for name in names
    }
    # Quotes within the tree are escaped, so this is found nowhere else.
    mark = b'"sha256":"'
    return places, len(length) + text.index(mark + NO_DIGEST.encode()) + len(mark)


def _pieces(tensor: Tensor) -> Iterator[memoryview]:
    """Return the bytes of a tensor, piece by piece; each is there until the next one is asked for.

    Those of a GPU pass through one buffer: a copy of the tensor would be in fresh pages, which take
    longer to get than the bytes.
    """
    if tensor.device.type == "cpu":
        yield _raw(tensor)
        return
    values = tensor.detach().contiguous().view(-1)
    buffer = torch.empty(min(values.numel(), BUFFER_VALUES), dtype=values.dtype)
    for piece in torch.split(values, BUFFER_VALUES):
        on_cpu = buffer[: piece.numel()]
        staging.to_host([(piece, on_cpu)])
        yield _raw(on_cpu)


def _raw(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor; it lies on the CPU in one piece, or is copied there."""
    on_cpu = tensor.detach().cpu().contiguous()
    return on_cpu.reshape(-1).view(torch.uint8).numpy().data


def _digest(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    digest = _digest_begun(metadata)
    for name in sorted(tensors, key=int):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(_raw(tensor))
    return digest.hexdigest()


def _digest_of_file(
    metadata: Mapping[str, str], places: Mapping[str, _InFile], file: BinaryIO
) -> str:
    digest = _digest_begun(metadata)
    for name in sorted(places, key=int):
        place = places[name]
        digest.update(f"{name} {place.dtype} {place.shape}\n".encode())
        file.seek(place.start)
        for at in range(place.start, place.stop, READ_BYTES):
            digest.update(file.read(min(READ_BYTES, place.stop - at)))
    return digest.hexdigest()


def _digest_begun(metadata: Mapping[str, str]) -> hashlib._Hash:
    digest = hashlib.sha256()
    for name in ("kind", "run", "tree"):
        digest.update(f"{name}={metadata.get(name)}\n".encode())
    return digest


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _pack(value: Any, tensors: dict[str, Tensor]) -> Any:  # noqa: ANN401 - a tree of anything
    if isinstance(value, TensorPart):
        name = _pack(value.values, tensors)["tensor"]
        return {"part": [name, [list(run) for run in value.runs], list(value.shape)]}
    if isinstance(value, Tensor):
        if value.dtype not in DTYPES:
            raise TypeError(f"cannot save a tensor of {value.dtype}")
        name = str(len(tensors))
        tensors[name] = value
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
    if name == "part":
        number, runs, shape = content
        found = tuple((start, stop) for start, stop in runs)
        return TensorPart(values=tensors[number], runs=found, shape=tuple(shape))
    if name == "bytes":
        return bytes.fromhex(content)
    if name == "tuple":
        return tuple(_unpack(content, tensors))
    return {key: _unpack(item, tensors) for key, item in content}
