"""Copies of a small run, and its coordinator's directory, for the tests of them."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.coordinator.copies.owners import claim, keep_owner
from atoll.coordinator.copies.sealing import RecoveryKey
from atoll.coordinator.copies.target import Target
from atoll.coordinator.copies.writing import CopiedLog, CopyWriter
from atoll.coordinator.run.keys import RunKeys
from atoll.coordinator.run.spec import RunSpec, run_id
from atoll.coordinator.service.server import LogFiles
from atoll.optim.log.entry import StateRoot, genesis_chain
from atoll.optim.log.module import WHOLE, log_id
from atoll.optim.log.store import LogStore
from support.kit import SPEC, Swarm, net, root_at

ROUNDS = 5  # with a snapshot after 2 and 4


def begun(folder: Path, swarm: Swarm, *, spec: RunSpec = SPEC, rounds: int = ROUNDS) -> str:
    """Make a coordinator's directory of a run; return its invite."""

    async def main() -> str:
        async with net(folder, swarm, spec=spec) as up:
            one, *_ = await up.started()
            roots = dict[int, StateRoot]()
            for _ in range(rounds):
                replica = up.up.coordinator.log.replica
                at = replica.head.position
                roots[at] = root_at(at, replica.state)
                certified = {"state_root": roots[at - 2]} if at and at % 2 == 0 else {}
                up.up.coordinator.log.replica.core._snapshot_due_s = 0.0  # however quick this is
                await up.publish(one, *swarm.entry(up.run_id, replica.head, **certified))
                await up.up.coordinator.log.replica.saved()
            return str(up.up.invite)

    return asyncio.run(asyncio.wait_for(main(), 60))


@contextlib.contextmanager
def opened(state_dir: Path, module: str = WHOLE) -> Iterator[CopiedLog]:
    """Open a log of a directory whose coordinator does not run."""
    spec = RunSpec.from_json((state_dir / "spec.json").read_bytes())
    keys = RunKeys.load_or_create(state_dir / "keys.json")
    identifier = bytes.fromhex(run_id(spec, keys.run_public_key))
    files = LogFiles(state_dir, identifier, module)
    root = bytes.fromhex(files.file("genesis.root").read_text())
    chain = genesis_chain(log_id(identifier, module), root)
    store = LogStore(files.folder, run_id=log_id(identifier, module), genesis_chain=chain)
    try:
        yield CopiedLog(store=store, files=files, is_logged=True)
    finally:
        store.close()


def writer_of(target: Target, state_dir: Path, *logs: CopiedLog) -> CopyWriter:
    """Return what writes the copies of a directory, which becomes the target's newest owner."""
    key, identifier = RecoveryKey.of(state_dir), logs[0].files.run_id.hex()
    keep_owner(state_dir, claim(target, key, run_id=identifier, run_name="test"))
    return CopyWriter(
        target,
        key,
        run_id=identifier,
        run_name="test",
        state_dir=state_dir,
        logs=logs,
    )


class Run:
    """A directory of a run that has ended, and a folder for its copies."""

    def __init__(self, folder: Path, invite: str, swarm: Swarm, tmp_path: Path) -> None:
        self.state_dir = tmp_path / "state"
        shutil.copytree(folder, self.state_dir)
        self.invite, self.swarm = invite, swarm
        self.folder = tmp_path / "copies"
        self.target = Target(self.folder.as_uri())
        self.key = RecoveryKey.of(self.state_dir)


@pytest.fixture(scope="session")
def run_template(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, Swarm]:
    """A directory of a run of five rounds, made once."""
    folder, swarm = tmp_path_factory.mktemp("copied") / "state", Swarm()
    return folder, begun(folder, swarm), swarm


@pytest.fixture
def past(run_template: tuple[Path, str, Swarm], tmp_path: Path) -> Run:
    """A directory of the test's own."""
    return Run(*run_template, tmp_path)
