"""Checkpoints: one safetensors file with parameters, outer memory, spec and chain.

    tensors    "params/NAME", fp32, and "momentum/NAME", fp32 or bf16, for every trainable
               parameter; "memory", in the format of the momentum, if the method keeps more than
               that (`atoll.optim.state.outer_state`)
    metadata   format "atoll checkpoint 2", spec (canonical JSON), layout (JSON: the order of the
               names), position, epoch, chain, run_id and root (hex); of a pipeline also
               moment (JSON: by name, the positions at that moment of all modules, or of those
               that a follower keeps)

`root` is the state root (`atoll.optim.state.outer_state`) over all numbers, so a reader can verify
what was written. A file is written under another name, synced and renamed; the checkpoint of
another run is never replaced.

Exceptions:

    ValueError
      CheckpointError     gives what was expected, what was found and the remedy
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import safetensors
import torch
from torch import Tensor

from atoll.coordinator.run.spec import RunSpec
from atoll.coordinator.run.spec_problems import SpecError
from atoll.optim.state.layout import Layout, LayoutError
from atoll.optim.state.outer_state import OuterState, StateError

FORMAT = "atoll checkpoint 2"
MEMORY = "memory"
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16"}  # of an outer state, in safetensors
TOLD = {"F32": "fp32", "BF16": "bf16"}
ALIGNED = 8  # bytes: the length of safetensors' header is a multiple of it


class CheckpointError(ValueError):
    """A checkpoint cannot be read or written."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The state of a run at one position."""

    spec: RunSpec
    run_id: bytes
    epoch: int
    position: int
    """Number of entries applied."""
    chain: bytes
    """The chain at that position."""
    state: OuterState
    moment: Mapping[str, int] = field(default_factory=dict)
    """Positions of all modules when the states of a pipeline were taken; empty of a dense run."""

    @property
    def layout(self) -> Layout:
        """Names and shapes of the parameters."""
        return self.state.layout

    @property
    def params_N(self) -> Tensor:  # noqa: N802
        """Parameters, fp32, in the order of the layout."""
        return self.state.params_N

    @property
    def momentum_N(self) -> Tensor:  # noqa: N802
        """Outer momentum, fp32 or bf16."""
        return self.state.momentum_N

    @cached_property
    def params(self) -> dict[str, Tensor]:
        """Parameters by name, in their shapes; views of `params_N`."""
        return dict(zip(self.layout.names, self.layout.split(self.params_N), strict=True))


@dataclass(frozen=True, kw_only=True)
class Header:
    """Hold what a checkpoint says of itself, without its numbers."""

    path: Path
    spec: RunSpec
    run_id: bytes
    """It names the log: the run's own id, or in a pipeline the module's."""
    epoch: int
    position: int
    chain: bytes
    layout: Layout
    """The file has these tensors: parameters as fp32, momentum as fp32 or bf16."""
    moment: Mapping[str, int]
    """Positions of the run's modules at that moment, in order; a follower may know some alone."""


def after_rounds(positions: Sequence[int]) -> str:
    """Return in words after which round each module is, once if all are after the same one."""
    first, *others = positions
    if set(others) <= {first}:
        return f"after round {first}"
    *earlier, last = map(str, positions)
    return f"after rounds {', '.join(earlier)} and {last}"


def save_checkpoint(
    path: Path, checkpoint: Checkpoint, *, on_read: Callable[[], None] = lambda: None
) -> None:
    """Write a checkpoint, whole or not at all.

    `on_read` is called when its state is no longer needed, and perhaps not on the disk yet.

    Raises:
        CheckpointError: the file holds a checkpoint of another run, or cannot be written.
    """
    _expect_own(path, checkpoint.run_id)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            _write(file, _tensors(checkpoint.state), _metadata(checkpoint))
            file.flush()
            on_read()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written: {error}") from None
    finally:
        partial.unlink(missing_ok=True)


def delete_checkpoint(path: Path, run_id: bytes) -> None:
    """Remove a checkpoint of this run.

    Raises:
        CheckpointError: the file is of another run, or cannot be removed.
    """
    _expect_own(path, run_id)
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be removed: {error.strerror}") from None


def load_checkpoint(path: str | Path) -> Checkpoint:
    """Read a checkpoint and verify it.

    Raises:
        CheckpointError: it is absent, damaged, or of another kind or version.
    """
    path = Path(path)
    with _opened(path) as (metadata, file):
        state = _read_state(path, metadata, file)
    header = _header(path, metadata)
    return Checkpoint(
        spec=header.spec,
        run_id=header.run_id,
        epoch=header.epoch,
        position=state.position,
        chain=header.chain,
        state=state,
        moment=header.moment if len(header.spec.modules) > 1 else {},
    )


def read_header(path: Path) -> Header:
    """Read what a checkpoint says of itself, and check that it has the tensors of its layout.

    Raises:
        CheckpointError: it is absent, damaged, or of another kind or version.
    """
    with _opened(path) as (metadata, file):
        header = _header(path, metadata)
        _expect_tensors(path, header.layout, file)
    return header


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Mapping[str, str], Any]]:
    """Open a checkpoint; yield its metadata, all there, and its tensors."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            yield _checked_format(path, file.metadata() or {}), file
    except OSError as error:
        reason = error.strerror or str(error).removesuffix(f": {path}")
        raise CheckpointError(
            f"{path}: cannot be read: {reason}; name a file of the folder checkpoints in the "
            "coordinator's state directory"
        ) from None
    except safetensors.SafetensorError as error:
        raise CheckpointError(
            f"{path}: not an intact safetensors file ({error}); use an earlier checkpoint"
        ) from None


def _write(file: IO[bytes], tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write tensors as safetensors does, each from its own memory.

    The library refuses tensors that share memory, and views of one vector do: it would need a copy
    of the state.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    for name, tensor in sorted(tensors.items()):
        stop = at + tensor.nbytes
        dtype = DTYPES[tensor.dtype]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [at, stop]}
        at = stop
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % ALIGNED)
    file.write(struct.pack("<Q", len(raw)) + raw)
    for _, tensor in sorted(tensors.items()):
        if tensor.numel():
            file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)


def _tensors(state: OuterState) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint, views of the state."""
    parts = (("params", state.params_N), ("momentum", state.momentum_N))
    tensors = {
        f"{kind}/{name}": piece
        for kind, vector_N in parts
        for name, piece in zip(state.layout.names, state.layout.split(vector_N), strict=True)
    }
    more = _beyond_momentum(state)
    return tensors | ({MEMORY: more} if more.numel() else {})


def _beyond_momentum(state: OuterState) -> Tensor:
    return state.memory_M[state.layout.numel :]


def _metadata(checkpoint: Checkpoint) -> dict[str, str]:
    return {
        "format": FORMAT,
        "spec": checkpoint.spec.canonical().decode(),
        "layout": checkpoint.layout.to_json(),
        "run_id": checkpoint.run_id.hex(),
        "epoch": str(checkpoint.epoch),
        "position": str(checkpoint.position),
        "chain": checkpoint.chain.hex(),
        "root": checkpoint.state.root().hex(),
    } | ({"moment": json.dumps(dict(checkpoint.moment))} if checkpoint.moment else {})


def _expect_own(path: Path, run_id: bytes) -> None:
    if not path.exists():
        return
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            found = (file.metadata() or {}).get("run_id", "")
    except (OSError, safetensors.SafetensorError):
        found = "unknown"
    if found != run_id.hex():
        raise CheckpointError(
            f"{path}: expected no file or a checkpoint of run {run_id.hex()[:12]}, got one of run "
            f"{found[:12] or 'unknown'}; move it away or choose another folder"
        )


def _checked_format(path: Path, metadata: Mapping[str, str]) -> Mapping[str, str]:
    found = metadata.get("format", "none")
    if found != FORMAT:
        raise CheckpointError(
            f"{path}: expected the format '{FORMAT}', got {found[:40]!r}; the version of Atoll "
            "that wrote a checkpoint can read it"
        )
    missing = {"spec", "layout", "run_id", "epoch", "position", "chain", "root"} - set(metadata)
    if missing:
        names = ", ".join(sorted(missing))
        raise CheckpointError(f"{path}: damaged: it lacks {names}; use an earlier checkpoint")
    return metadata


def _read_state(path: Path, metadata: Mapping[str, str], file: Any) -> OuterState:  # noqa: ANN401
    try:
        layout = Layout.from_json(metadata["layout"])
        dtype = _expect_tensors(path, layout, file)
        more = file.get_tensor(MEMORY) if MEMORY in file.keys() else torch.empty(0, dtype=dtype)
        memory_numel = layout.numel + more.numel()
        state = OuterState.blank(layout, int(metadata["position"]), memory_numel, dtype)
        _beyond_momentum(state).copy_(more)
        for kind, vector_N in (("params", state.params_N), ("momentum", state.momentum_N)):
            for name, piece in zip(layout.names, layout.split(vector_N), strict=True):
                piece.copy_(file.get_tensor(f"{kind}/{name}"))
        root = state.root().hex()
    except CheckpointError:
        raise
    except (LayoutError, StateError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{path}: damaged: {error}; use an earlier checkpoint") from None
    if root != metadata["root"]:
        raise CheckpointError(
            f"{path}: damaged: expected the state root {metadata['root'][:12]}, got {root[:12]}; "
            "use an earlier checkpoint"
        )
    return state


def _expect_tensors(path: Path, layout: Layout, file: Any) -> torch.dtype:  # noqa: ANN401
    """Check names, shapes and formats of the tensors; return the format of the momentum."""
    expected = {
        f"{kind}/{name}": list(shape)
        for kind in ("params", "momentum")
        for name, shape in zip(layout.names, layout.shapes, strict=True)
    }
    if set(file.keys()) - {MEMORY} != set(expected):
        raise CheckpointError(f"{path}: damaged: its tensors do not match its layout")
    found = file.get_slice(f"momentum/{layout.names[0]}").get_dtype()
    dtype = next((known for known, name in DTYPES.items() if name == found), torch.float32)
    for name, shape in expected.items():
        piece = file.get_slice(name)
        wanted = DTYPES[dtype if name.startswith("momentum/") else torch.float32]
        if piece.get_shape() != shape or piece.get_dtype() != wanted:
            raise CheckpointError(
                f"{path}: damaged: expected {name} as {TOLD[wanted]} {shape}, "
                f"got {piece.get_dtype()} {piece.get_shape()}"
            )
    return dtype


def _header(path: Path, metadata: Mapping[str, str]) -> Header:
    try:
        spec, position = RunSpec.from_json(metadata["spec"].encode()), int(metadata["position"])
        return Header(
            path=path,
            spec=spec,
            run_id=bytes.fromhex(metadata["run_id"]),
            epoch=int(metadata["epoch"]),
            position=position,
            chain=bytes.fromhex(metadata["chain"]),
            layout=Layout.from_json(metadata["layout"]),
            moment=_moment(spec.modules, metadata.get("moment"), position),
        )
    except SpecError as error:
        raise CheckpointError(
            f"{path}: this version of Atoll cannot read its spec: {error}"
        ) from None
    except ValueError as error:
        raise CheckpointError(f"{path}: damaged: {error}; use an earlier checkpoint") from None


def _moment(modules: Sequence[str], told: str | None, position: int) -> dict[str, int]:
    """Return the positions of a run's modules; a file that tells none is of one position.

    A follower of some stages knows those of these stages alone.
    """
    if told is None:
        return dict.fromkeys(modules, position)
    found: object = json.loads(told)
    if not isinstance(found, dict) or not found or not set(found) <= set(modules):
        raise ValueError(f"expected the moment of {len(modules)} modules, got {told[:80]!r}")
    if not all(isinstance(at, int) and at >= 0 for at in found.values()):
        raise ValueError(f"expected positions from 0 on, got {told[:80]!r}")
    return {module: found[module] for module in modules if module in found}
