"""A coordinator's directory from a follower's folder: same invite, exact round, and the keys."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from atoll.coordinator.copies.rebuilding import BESIDE_KEYS, FollowerToRestore, is_followers
from atoll.coordinator.copies.target import CopiesError
from atoll.coordinator.recorded import FOLLOWER_FILE, read
from atoll.coordinator.run.keys import KEYS_FILE, RunKeys
from atoll.coordinator.service.server import MANY_EPOCHS
from atoll.coordinator.signing import read_signed
from atoll.optim.log.store import LOG_FILE
from support.copies import ROUNDS, Run, past, run_template
from support.kit import net

__all__ = ["past", "run_template"]


@pytest.fixture
def follower(past: Run) -> Path:
    """The folder of a follower of the run, and its organiser's backup of the keys beside."""
    folder, backup = past.state_dir.with_name("follower"), past.state_dir.with_name("backup")
    shutil.copytree(past.state_dir, folder)
    backup.mkdir()
    (folder / KEYS_FILE).rename(backup / KEYS_FILE)
    for name in BESIDE_KEYS:
        (folder / name).unlink(missing_ok=True)
    (folder / FOLLOWER_FILE).write_text("{}")
    return folder


def test_a_coordinator_goes_on_from_a_followers_folder(past: Run, follower: Path) -> None:
    assert is_followers(str(follower)) and not is_followers(str(past.state_dir))
    place, said = past.state_dir.with_name("new"), list[str]()
    keys = follower.with_name("backup") / KEYS_FILE
    found = FollowerToRestore.found(follower, keys, None, state_dir=place)
    found.restore(found.spec, place, said.append)
    assert f"restored {ROUNDS} rounds" in said[0] or f"round {ROUNDS}" in said[0]
    signed, left = read_signed(place / "epoch.signed")
    assert signed is not None and signed >= MANY_EPOCHS and left is None
    before = read(past.state_dir)
    assert read(follower).status.chain == before.status.chain

    async def main() -> None:
        async with net(place, past.swarm) as after:
            coordinator = after.up.coordinator
            assert coordinator.log.head().chain.hex() == before.status.chain
            assert coordinator.log.head().position == ROUNDS
            assert after.up.invite.token == RunKeys.load_or_create(keys).token
            assert [row.loss for row in coordinator.status().history] == [
                row.loss for row in before.rounds
            ]

    asyncio.run(main())


def test_what_lies_beside_the_keys_comes_along(past: Run, follower: Path) -> None:
    backup, place = follower.with_name("backup"), past.state_dir.with_name("new")
    (backup / "node.key").write_bytes(b"the node's")
    (backup / "notes.txt").write_text("")
    found = FollowerToRestore.found(follower, backup / KEYS_FILE, None, state_dir=place)
    found.restore(found.spec, place, lambda line: None)
    assert (place / "node.key").read_bytes() == b"the node's"
    assert not (place / "notes.txt").exists() and not (place / FOLLOWER_FILE).exists()


def test_keys_of_another_run_are_refused(past: Run, follower: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    RunKeys.load_or_create(other)
    with pytest.raises(CopiesError, match="expected the keys of run"):
        FollowerToRestore.found(follower, other, None, state_dir=None)
    with pytest.raises(CopiesError, match=r"none\.json: no such file"):
        FollowerToRestore.found(follower, tmp_path / "none.json", None, state_dir=None)
    assert not (tmp_path / "none.json").exists()


def test_a_damaged_folder_leaves_nothing(past: Run, follower: Path) -> None:
    place, keys = past.state_dir.with_name("new"), follower.with_name("backup") / KEYS_FILE
    found = FollowerToRestore.found(follower, keys, None, state_dir=place)
    for snapshot in (follower / "log").glob("snapshot-*"):
        snapshot.unlink()
    before = sorted(path.name for path in place.parent.iterdir())
    with pytest.raises(CopiesError, match="take another follower's"):
        found.restore(found.spec, place, lambda line: None)
    assert sorted(path.name for path in place.parent.iterdir()) == before
    (follower / "log" / LOG_FILE).write_bytes(b"no database")
    with pytest.raises(CopiesError, match="take another follower's"):
        FollowerToRestore.found(follower, keys, None, state_dir=place)
