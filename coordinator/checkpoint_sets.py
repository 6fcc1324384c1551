"""The checkpoints of a run at one moment: one file for each of its modules.

    checkpoints/NAME-POSITION.safetensors            a dense run
    checkpoints/stage-1/NAME-POSITION.safetensors    a pipeline; stage-2 and so on beside it

Each stage has a log of its own, so at one moment the stages are at different positions, and parts
of one position may never have worked together. A file says where the others were (`Header.moment`).
The id in a file is that of its log, which follows from the run's and cannot be traced back to it.
So files belong together if their specs, positions and slices do; two runs of one and the same spec
are not told apart.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from atoll.coordinator.checkpoints import (
    Checkpoint,
    CheckpointError,
    Header,
    after_rounds,
    load_checkpoint,
    read_header,
)
from atoll.coordinator.run.spec import RunSpec

FILES = "*.safetensors"
_NAME = re.compile(r"(?P<run>.+)-(?P<position>[0-9]{8,})\.safetensors", re.ASCII)
_SLICE = re.compile(r"slices\.([0-9]{1,6})\..+", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class CheckpointSet:
    """Hold what a run has trained up to one moment, in one file or several."""

    headers: tuple[Header, ...]
    """There is one for each module, in the order of `RunSpec.modules`."""

    @property
    def spec(self) -> RunSpec:
        """Return the run's spec."""
        return self.headers[0].spec

    @property
    def positions(self) -> tuple[int, ...]:
        """Return how many rounds each module has committed."""
        return tuple(header.position for header in self.headers)

    @property
    def position(self) -> int:
        """Return how many rounds the run has committed; of a pipeline, its last stage."""
        return self.positions[-1]

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
            a pipeline the newest moment of which all stages have one.

    Raises:
        CheckpointError: there is none, a stage has none of that moment, or a file is damaged, of
            another run, position or stage.
    """
    path = Path(path)
    given = read_header(_newest(path) if path.is_dir() else path)
    if given.spec.topology.num_stages == 1:
        return CheckpointSet(headers=(given,))
    as_of, paths = _beside(given, is_newest=path.is_dir())
    headers = tuple(map(read_header, paths))
    _expect_one_run(headers, as_of=as_of)
    _expect_stages(headers)
    return CheckpointSet(headers=headers)


def _newest(folder: Path) -> Path:
    """Return the file that was written last in a folder, or in those of its stages."""
    files = [*folder.glob(FILES), *folder.glob(f"stage-*/{FILES}")]
    if not files:
        raise CheckpointError(f"expected a checkpoint ({FILES}) in {folder}, got none")
    return max(files, key=lambda file: file.stat().st_mtime_ns)


def _beside(given: Header, *, is_newest: bool) -> tuple[Header, list[Path]]:
    """Return the files of all stages, and the header that names their positions.

    Args:
        given: of a file of the run.
        is_newest: take the newest moment of which all are there, not that of this file.
    """
    modules, stage = given.spec.modules, given.path.absolute().parent
    if stage.name not in modules:
        raise CheckpointError(
            f"{given.path}: it holds one of {len(modules)} stages; expected it in a folder "
            f"{modules[0]} to {modules[-1]}, beside the folders of the others"
        )
    folders = {module: stage.parent / module for module in modules}
    as_of = (_newest_complete(given, folders) if is_newest else None) or given
    if set(as_of.moment) != set(modules):
        raise CheckpointError(
            f"{given.path}: it is of {', '.join(as_of.moment)} alone, as a follower of these "
            f"stages keeps; expected all {len(modules)} stages: take a checkpoint of the "
            "coordinator, or of a follower of all"
        )
    paths = _paths(as_of, folders)
    if not all(path.exists() for path in paths):
        raise _incomplete(as_of, paths, _newest_complete(given, folders))
    return as_of, paths


def _paths(as_of: Header, folders: Mapping[str, Path]) -> list[Path]:
    """Return where the files of a moment should be; the file that names it is there."""
    own = as_of.path.absolute().parent.name
    return [
        as_of.path if module == own else folders[module] / _name(as_of, position)
        for module, position in as_of.moment.items()
    ]


def _name(as_of: Header, position: int) -> str:
    """Return the name of a file at another position of the same run."""
    found = _NAME.fullmatch(as_of.path.name)
    return f"{found['run'] if found else as_of.spec.run.name}-{position:08d}.safetensors"


def _newest_complete(given: Header, folders: Mapping[str, Path]) -> Header | None:
    """Return the header of the newest file of the last stage beside which all others are."""
    *_, last = folders.values()
    wanted = _NAME.fullmatch(given.path.name)
    files = {path: _NAME.fullmatch(path.name) for path in last.glob(FILES)}
    of_run = {
        path: int(found["position"])
        for path, found in files.items()
        if found and wanted and found["run"] == wanted["run"]
    }
    for path in sorted(of_run, key=of_run.__getitem__, reverse=True):
        header = read_header(path)
        is_of_run = set(header.moment) == set(folders)
        if is_of_run and all(each.exists() for each in _paths(header, folders)):
            return header
    return None


def _incomplete(as_of: Header, paths: Sequence[Path], complete: Header | None) -> CheckpointError:
    remedy = "wait for the next checkpoint of all stages"
    if complete is not None:
        remedy = (
            "the newest checkpoint of all stages is that "
            f"{after_rounds(tuple(complete.moment.values()))}, {complete.path.name} of "
            f"{complete.path.absolute().parent.name}"
        )
    lacking = [f"{path.parent.name} has no {path.name}" for path in paths if not path.exists()]
    return CheckpointError(f"{as_of.path}: {' and '.join(lacking)}, which belongs to it; {remedy}")


def _expect_one_run(headers: Sequence[Header], *, as_of: Header) -> None:
    for each, position in zip(headers, as_of.moment.values(), strict=True):
        expected = _of(as_of, position)
        if _of(each, each.position) != expected:
            raise CheckpointError(
                f"{each.path}: expected a checkpoint {expected}, as {as_of.path} says, got one "
                f"{_of(each, each.position)}; put the file of that run and round there"
            )


def _of(header: Header, position: int) -> str:
    """Return the run of a checkpoint, and a position of it, in words."""
    name, digest = header.spec.run.name, header.spec.digest()
    return f"of run {name} with spec {digest}, after round {position}"


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
