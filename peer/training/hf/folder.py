"""A folder of weights, as Hugging Face models have: config.json and safetensors files.

The tensors are those of `model.safetensors`, else those of the files that
`model.safetensors.index.json` names, else those of the only safetensors file. Pickled weights
(`pytorch_model.bin`) are never read.

The digest is the SHA-256 over `length u64 | name | length u64 | type and shape | length u64 |
bytes` of each tensor in the order of the names; type and shape are written as in `F32[2,3]`, the
bytes are those of the file: row-major, little-endian. It does not depend on the files in which the
tensors lie.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import cached_property, lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import safetensors
import torch
from torch import Tensor

from atoll.peer.errors import ModelError

MAX_JSON_BYTES = 16 << 20  # an index of 100,000 tensors has 10 MB
READ_TYPES = {"F64", "F32", "F16", "BF16"}
WHOLE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
SAY_BYTES = 4 << 30  # from here on hashing takes longer than some seconds

Say = Callable[[str], None]


class WeightFolder:
    """The tensors of a folder by name; a context manager that holds its files open."""

    def __init__(self, path: str | Path) -> None:
        """Find the files; read nothing but the index.

        Raises:
            ModelError: there is no such folder, or it holds no weights as safetensors.
        """
        self.path = Path(path).expanduser()
        self.files = _files_of(self.path)
        self._stack = ExitStack()
        self._file_of: dict[str, Any] = {}

    def __enter__(self) -> Self:
        """Open the files.

        Raises:
            ModelError: a file is damaged, or two hold a tensor of one name.
        """
        with ExitStack() as opening:
            for path in self.files:
                try:
                    file = opening.enter_context(safetensors.safe_open(path, framework="pt"))
                except (OSError, safetensors.SafetensorError) as error:
                    raise ModelError(
                        f"{path}: not an intact safetensors file ({error}); copy the folder anew"
                    ) from None
                for name in file.keys():
                    if name in self._file_of:
                        raise ModelError(f"{self.path}: two files hold the tensor {name!r}")
                    self._file_of[name] = file
            self._stack = opening.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the files."""
        self._file_of.clear()
        self._stack.close()

    @cached_property
    def config(self) -> dict[str, Any]:
        """The fields of config.json.

        Raises:
            ModelError: there is none, or it is not a JSON object.
        """
        return read_json(self.path / CONFIG)

    @property
    def names(self) -> set[str]:
        """Names of the tensors."""
        return set(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor without reading it."""
        return tuple(self._file_of[name].get_slice(name).get_shape())

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Read a tensor in the type of the file.

        Raises:
            ModelError: there is none of this name, shape or a type that can be read.
        """
        if name not in self._file_of:
            raise ModelError(f"the weights in {self.path} lack {name!r}, which the model needs")
        found = self._file_of[name].get_slice(name)
        if found.get_dtype() not in READ_TYPES:
            raise ModelError(
                f"the weights in {self.path} hold {name!r} as {found.get_dtype()}, but training "
                "needs weights that are not quantised: F32, BF16 or F16"
            )
        if self.shape(name) != shape:
            raise ModelError(
                f"the weights in {self.path} do not fit the model: expected {name!r} of shape "
                f"{shape}, got {self.shape(name)}"
            )
        read: Tensor = self._file_of[name].get_tensor(name)
        return read

    def _raw(self, name: str) -> tuple[str, memoryview]:
        found = self._file_of[name].get_slice(name)
        kind = f"{found.get_dtype()}[{','.join(map(str, found.get_shape()))}]"
        values = self._file_of[name].get_tensor(name)
        return kind, memoryview(values.reshape(-1).view(torch.uint8).numpy())

    def digest(self) -> str:
        """Return the digest of the open folder, in hex."""
        total = hashlib.sha256()
        for name in sorted(self._file_of):
            kind, raw = self._raw(name)
            for part in (name.encode(), kind.encode(), raw):
                total.update(len(part).to_bytes(8, "big"))
                total.update(part)
        return total.hexdigest()


def weights_digest(path: str | Path, say: Say = lambda line: None) -> str:
    """Return the digest of a folder's tensors, in hex; read each folder once in a process.

    Args:
        path: the folder.
        say: takes a line before an unusually long read.

    Raises:
        ModelError: the folder holds no weights, or they are damaged.
    """
    folder = WeightFolder(path)
    stats = [file.stat() for file in folder.files]
    size = sum(stat.st_size for stat in stats)
    if size >= SAY_BYTES:
        say(f"reading {size / 1e9:,.0f} GB of weights in {folder.path} for their digest")
    return _digest_of(folder.path, tuple((stat.st_size, stat.st_mtime_ns) for stat in stats))


@lru_cache(maxsize=8)
def _digest_of(path: Path, stamps: tuple[tuple[int, int], ...]) -> str:
    with WeightFolder(path) as folder:
        return folder.digest()


def expect_weights(path: str | Path, sha256: str | None) -> None:
    """Check the weights of a folder against the run's digest, if the run states one.

    Raises:
        ModelError: they are others, or there are none.
    """
    if sha256 is None:
        return
    found = weights_digest(path)
    if found != sha256:
        raise ModelError(
            f"the weights in {str(path)!r} are not the run's: expected the SHA-256 {sha256[:12]}, "
            f"got {found[:12]}; take the organiser's folder, of the same revision and type"
        )


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        ModelError: the file is missing, too large, or holds something else.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_JSON_BYTES + 1)
        fields = json.loads(raw) if len(raw) <= MAX_JSON_BYTES else None
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise ModelError(f"{path}: expected a JSON object of at most {MAX_JSON_BYTES >> 20} MiB")
    return fields


def _files_of(path: Path) -> list[Path]:
    if not path.is_dir():
        raise ModelError(
            f"{str(path)!r} is not a folder; expected one with config.json and safetensors files"
        )
    if (path / WHOLE).is_file():
        return [path / WHOLE]
    if (path / INDEX).is_file():
        return _indexed(path, read_json(path / INDEX).get("weight_map"))
    found = sorted(path.glob("*.safetensors"))
    if len(found) == 1:
        return found
    pickled = any(path.glob("*.bin")) or any(path.glob("*.pt*"))
    raise ModelError(
        f"{path}: expected {WHOLE}, {INDEX} or one safetensors file, got {len(found)} files"
        + (
            "; pickled weights are not read, because they can run code: load the model with "
            "`transformers` and write it with save_pretrained"
        )
        * pickled
    )


def _indexed(path: Path, weight_map: object) -> list[Path]:
    names = set(weight_map.values()) if isinstance(weight_map, Mapping) else set()
    if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise ModelError(f"{path / INDEX}: expected a weight_map to names of files beside it")
    missing = [name for name in sorted(names) if not (path / name).is_file()]
    if missing:
        raise ModelError(
            f"{path}: {missing[0]} is missing, and {len(missing) - 1} more files of {INDEX}; "
            "finish the download"
        )
    return [path / name for name in sorted(names)]
