"""Copies as `atoll coordinator` keeps them beside a run, and restores one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from atoll.coordinator.checkpoints import after_rounds
from atoll.coordinator.copies.keeping import Copies
from atoll.coordinator.copies.owners import expect_target, read_owner
from atoll.coordinator.copies.restoring import FoundCopy, expect_new, find, restore
from atoll.coordinator.copies.sealing import RECOVERY_FILE, RecoveryKey
from atoll.coordinator.copies.target import ANSWER_S, CopiesError, Target, TargetFailed, within
from atoll.coordinator.copies.writing import CopiedLog, CopyWriter
from atoll.coordinator.run.files import known_peers
from atoll.coordinator.run.spec import RunSpec, template
from atoll.coordinator.service.server import LogFiles, Running

RUN_FILE = "RUN.toml"  # of a restored directory, which may be on a machine without any


def open_target(
    url: str, state_dir: Path, say: Callable[[str], None] = lambda line: None
) -> Target:
    """Open the target of a directory's copies, and check that it can be written.

    A coordinator whose directory was copied before starts without it: the run needs it more than
    copies. `say` gets why they wait.

    Raises:
        CopiesError: it cannot, or holds others' copies.
    """
    target = Target(url)
    try:
        within(ANSWER_S, partial(expect_target, target, state_dir))
    except TargetFailed as error:
        if not read_owner(state_dir):
            raise
        say(f"copies wait until their target can be reached: {error}")
    return target


@dataclass(frozen=True, kw_only=True)
class CopyToRestore:
    """A copy that becomes a state directory."""

    spec: RunSpec
    """The coordinator shall start with this one; its copies go on in the same target."""
    target: Target
    key: RecoveryKey
    copy: FoundCopy

    @classmethod
    def found(
        cls,
        url: str,
        key_file: Path,
        spec_file: Path | None,
        *,
        state_dir: Path | None,
        older: bool,
    ) -> CopyToRestore:
        """Find a copy; nothing is written.

        Args:
            url: of the target.
            key_file: the recovery key.
            spec_file: RUN.toml with other settings of the coordinator; by default the copy's.
            state_dir: into which it will be restored, if that is known.
            older: take the copy before the newest one.

        Raises:
            CopiesError: there is none, or it is not to be read; or it is of another run.
            SpecError: RUN.toml is wrong.
        """
        if state_dir is not None:
            expect_new(state_dir)
        key, target = RecoveryKey.read(key_file), Target(url)
        copy = within(ANSWER_S, partial(find, target, key, older=older))
        spec = spec_to_start_with(copy.spec, spec_file, url)
        told = spec.model_dump(mode="json")
        told["coordinator"]["copies"] = spec.coordinator.copies or url
        return cls(spec=RunSpec.from_dict(told), target=target, key=key, copy=copy)

    def restore(self, spec: RunSpec, state_dir: Path, say: Callable[[str], None]) -> None:
        """Make the directory, with a RUN.toml for its next start; `say` gets what people need."""
        self.target.expect_writable()
        restore(self.target, self.key, self.copy, state_dir)
        tell_restored(spec, self.copy.positions, state_dir, say)


def spec_to_start_with(kept: RunSpec, spec_file: Path | None, source: str) -> RunSpec:
    """Return the spec of a restored run: as it was kept, or as RUN.toml changes [coordinator].

    Raises:
        CopiesError: RUN.toml describes another run than the `source` holds.
        SpecError: RUN.toml is wrong.
    """
    spec = kept if spec_file is None else RunSpec.load(spec_file)
    if differences := kept.differences(spec):
        raise CopiesError(
            f"{source}: it holds another run than {spec_file} describes, which differs in "
            f"{'; '.join(differences[:5])}; change only [coordinator], or omit {spec_file}"
        )
    return spec


def tell_restored(
    spec: RunSpec, positions: Sequence[int], state_dir: Path, say: Callable[[str], None]
) -> None:
    """Write a RUN.toml for the next start of a restored directory, and say what was done."""
    (state_dir / RUN_FILE).write_text(template(spec), encoding="utf-8")
    rounds = after_rounds(tuple(positions))
    say(f"restored {rounds} into {state_dir}; what was decided since comes from the peers")
    if not known_peers(state_dir):
        say(
            "it names no peers, so they cannot be told a new address: start it at its former one, "
            "or start them again with the new invite"
        )
    again = f"atoll coordinator {state_dir / RUN_FILE} --state-dir {state_dir}"
    say(f"start it again with `{again}`, without --restore")


@asynccontextmanager
async def copying(
    up: Running, target: Target | None, say: Callable[[str], None] = lambda line: None
) -> AsyncIterator[Copies | None]:
    """Prepare the copies of a coordinator, and write a last one when the block ends.

    `say` gets what its owner has to do. The target may be out of reach: it is tried again.
    """
    if target is None:
        yield None
        return
    copies = Copies(_writer(up, target), up.coordinator.report)
    up.coordinator.copies = lambda: copies.status
    say(
        f"copies go to {target.url}; keep {up.state_dir / RECOVERY_FILE} in another place: "
        "`atoll coordinator --restore` needs it"
    )
    try:
        yield copies
    finally:
        await copies.close()


def _writer(up: Running, target: Target) -> CopyWriter:
    spec, run_id = up.coordinator.spec, up.coordinator.run_id
    is_logged = spec.method().reduction != "pairs"
    logs = [
        CopiedLog(
            store=log.replica.store,
            files=LogFiles(up.state_dir, run_id, log.name),
            is_logged=is_logged,
        )
        for log in up.coordinator.logs.values()
    ]
    return CopyWriter(
        target,
        RecoveryKey.of(up.state_dir),
        run_id=run_id.hex(),
        run_name=spec.run.name,
        state_dir=up.state_dir,
        logs=logs,
    )
