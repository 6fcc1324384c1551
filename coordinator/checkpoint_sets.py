"""The checkpoints of a run at one position: one file for each of its modules.

    checkpoints/NAME-POSITION.safetensors            a dense run
    checkpoints/stage-1/NAME-POSITION.safetensors    a pipeline; stage-2 and so on beside it

Each stage has a log of its own, so the newest files of two stages may be of different positions.
The id in a file is that of its log, which follows from the run's and cannot be traced back to it.
So files belong together if their specs, positions and slices do; two runs of one and the same spec
are not told apart.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from atoll.coordinator.checkpoints import (
    Checkpoint,
    CheckpointError,
    Header,
    load_checkpoint,
    read_header,
)
from atoll.coordinator.run.spec import RunSpec

FILES = "*.safetensors"
_NAME = re.compile(r"(?P<run>.+)-(?P<position>[0-9]{8,})\.safetensors", re.ASCII)
_SLICE = re.compile(r"slices\.([0-9]{1,6})\..+", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class CheckpointSet:
    """Hold what a run has trained up to one position, in one file or several."""

    headers: tuple[Header, ...]
    """There is one for each module, in the order of `RunSpec.modules`."""

    @property
    def spec(self) -> RunSpec:
        """Return the run's spec."""
        return self.headers[0].spec

    @property
    def position(self) -> int:
        """Return how many rounds each module has committed."""
        return self.headers[0].position

    @property
    def is_pipeline(self) -> bool:
        """Return whether each file holds a stage of the model."""
        return len(self.headers) > 1

    def read(self, header: Header) -> Checkpoint:
        """Read and verify one of the files.

        Raises:
            CheckpointError: it is damaged, or was replaced since its header was read.
        """
        checkpoint = load_checkpoint(header.path)
        if (checkpoint.chain, checkpoint.layout) != (header.chain, header.layout):
            raise CheckpointError(f"{header.path}: it was replaced meanwhile; try again")
        return checkpoint

    def params(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all parameters with their names; one file is in memory at a time.

        Raises:
            CheckpointError: a file is damaged, or was replaced since its header was read.
        """
        for header in self.headers:
            yield from self._params_in(header)

    def _params_in(self, header: Header) -> Iterator[tuple[str, Tensor]]:
        for name, piece in self.read(header).params.items():
            yield name, piece.clone()  # a view that the caller still has would keep the whole file


def find(path: str | Path) -> CheckpointSet:
    """Find the checkpoints that make up a model, and check that they belong together.

    Args:
        path: a file, of a pipeline that of any stage; or a folder: the newest checkpoint in it, of
            a pipeline the newest position of which all stages have one.

    Raises:
        CheckpointError: there is none, a stage has none at that position, or a file is damaged, of
            another run, position or stage.
    """
    path = Path(path)
    given = read_header(_newest(path) if path.is_dir() else path)
    if given.spec.topology.num_stages == 1:
        return CheckpointSet(headers=(given,))
    headers = tuple(read_header(each) for each in _beside(given, is_newest=path.is_dir()))
    stage = given.path.absolute().parent.name
    _expect_one_run(headers, as_of=headers[given.spec.modules.index(stage)])
    _expect_stages(headers)
    return CheckpointSet(headers=headers)


def _newest(folder: Path) -> Path:
    """Return the file that was written last in a folder, or in those of its stages."""
    files = [*folder.glob(FILES), *folder.glob(f"stage-*/{FILES}")]
    if not files:
        raise CheckpointError(f"expected a checkpoint ({FILES}) in {folder}, got none")
    return max(files, key=lambda file: file.stat().st_mtime_ns)


def _beside(given: Header, *, is_newest: bool) -> list[Path]:
    """Return the files of all stages: those of the given position, or of the newest one."""
    modules, stage = given.spec.modules, given.path.absolute().parent
    if stage.name not in modules:
        raise CheckpointError(
            f"{given.path}: it holds one of {len(modules)} stages; expected it in a folder "
            f"{modules[0]} to {modules[-1]}, beside the folders of the others"
        )
    folders = [stage.parent / module for module in modules]
    names = [{file.name for file in folder.glob(FILES)} for folder in folders]
    complete = sorted(_same_name(set.intersection(*names), given.path.name), key=_position)
    name = given.path.name
    if is_newest and complete:
        name = complete[-1]
    lacking = [module for module, have in zip(modules, names, strict=True) if name not in have]
    if lacking:
        raise _incomplete(given, lacking, complete)
    return [folder / name for folder in folders]


def _same_name(names: set[str], given: str) -> list[str]:
    """Return the names of the same run's checkpoints; positions alone differ."""
    wanted = _NAME.fullmatch(given)
    if wanted is None:
        return []
    found = ((name, _NAME.fullmatch(name)) for name in names)
    return [name for name, match in found if match and match["run"] == wanted["run"]]


def _position(name: str) -> int:
    match = _NAME.fullmatch(name)
    return int(match["position"]) if match else -1


def _incomplete(given: Header, lacking: Sequence[str], complete: Sequence[str]) -> CheckpointError:
    remedy = "wait for the next checkpoint of all stages"
    if complete:
        remedy = (
            f"the newest checkpoint of all stages is that after round {_position(complete[-1])}, "
            f"{complete[-1]}"
        )
    return CheckpointError(
        f"{given.path}: {' and '.join(lacking)} {'has' if len(lacking) == 1 else 'have'} no "
        f"checkpoint of this name, after round {given.position}; {remedy}"
    )


def _expect_one_run(headers: Sequence[Header], *, as_of: Header) -> None:
    for each in headers:
        if _of(each) != _of(as_of):
            raise CheckpointError(
                f"{each.path}: expected a checkpoint {_of(as_of)}, as {as_of.path} is, got one "
                f"{_of(each)}; put the file of that run and round there"
            )


def _of(header: Header) -> str:
    """Return the run and position of a checkpoint in words."""
    name, digest = header.spec.run.name, header.spec.digest()
    return f"of run {name} with spec {digest}, after round {header.position}"


def _expect_stages(headers: Sequence[Header]) -> None:
    """Check that each file continues the one before it, so that none is there twice."""
    begin = 0
    for header in headers:
        found = [_SLICE.fullmatch(name) for name in header.layout.names]
        indices = {int(match[1]) if match else -1 for match in found}
        if indices != set(range(begin, begin + len(indices))):
            raise CheckpointError(
                f"{header.path}: expected the slices of the model from {begin} on, got "
                f"{header.layout.names[0][:80]!r}; put the file of this stage there"
            )
        begin += len(indices)
