"""A coordinator's directory from a follower's folder: same invite, exact round, and the keys."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest

from atoll.coordinator.copies.rebuilding import BESIDE_KEYS, FollowerToRestore, is_followers
from atoll.coordinator.copies.target import CopiesError
from atoll.coordinator.recorded import FOLLOWER_FILE, NoRecord, read
from atoll.coordinator.run.files import known_peers
from atoll.coordinator.run.keys import KEYS_FILE, RunKeys
from atoll.coordinator.run.relocation import Relocation, serial_at
from atoll.coordinator.run.spec import RunSpec
from atoll.coordinator.run.spec import run_id as spec_run_id
from atoll.coordinator.service.server import MANY_EPOCHS
from atoll.coordinator.signing import EpochSigner, read_signed
from atoll.optim.log.module import log_id
from atoll.optim.log.store import LOG_FILE, StoreHead
from support.copies import ROUNDS, Run, past, run_template
from support.kit import SPEC, Swarm, net

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


def test_the_next_place_counts_more_than_the_one_that_the_follower_knew(
    past: Run, follower: Path
) -> None:
    """The lost coordinator may have been a restored one."""
    keys, place = follower.with_name("backup") / KEYS_FILE, past.state_dir.with_name("new")
    run_keys = RunKeys.load_or_create(keys)
    run_id = bytes.fromhex(spec_run_id(SPEC, run_keys.run_public_key))
    known = Relocation(serial=serial_at(2e9, restores=3), addresses=("lost:7700",))
    record = known.sign(run_id, run_keys.sign)
    (follower / FOLLOWER_FILE).write_text(json.dumps({"relocation": record.hex()}))
    found = FollowerToRestore.found(follower, keys, None, state_dir=place)
    found.restore(found.spec, place, lambda line: None)

    async def main() -> None:
        async with net(place, past.swarm) as after:
            told = after.up.coordinator.relocation
            now = Relocation.open(told, run_keys.run_public_key, run_id)
            assert now.serial == known.serial + 1

    asyncio.run(main())


@pytest.mark.parametrize(
    ("kept", "names"),
    [
        ({"bootstrap": ["/ip4/10.0.0.2/tcp/1/p2p/a", 7]}, ("/ip4/10.0.0.2/tcp/1/p2p/a",)),
        ({"bootstrap": []}, ()),
        ({"bootstrap": None}, ()),
        ([], ()),
    ],
)
def test_peers_of_a_follower_hear_of_a_new_address(
    kept: object, names: tuple[str, ...], past: Run, follower: Path
) -> None:
    """The rebuilt coordinator calls those whom the follower knew, or says that nobody hears it."""
    (follower / FOLLOWER_FILE).write_text(json.dumps(kept))
    place, said = past.state_dir.with_name("new"), list[str]()
    keys = follower.with_name("backup") / KEYS_FILE
    found = FollowerToRestore.found(follower, keys, None, state_dir=place)
    found.restore(found.spec, place, said.append)
    assert known_peers(place) == names
    assert any("names no peers" in line for line in said) == (not names)


def test_keys_of_another_run_are_refused(past: Run, follower: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    RunKeys.load_or_create(other)
    with pytest.raises(CopiesError, match="expected the keys of the run that"):
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


STAGED = RunSpec.from_dict(
    SPEC.model_dump(mode="json") | {"topology": {"stages": 2}, "round": {"min_peers": 2}}
)


def test_a_pipeline_is_rebuilt_from_a_follower_of_all_stages_alone(tmp_path: Path) -> None:
    old, folder, place = tmp_path / "old", tmp_path / "follower", tmp_path / "new"

    async def decide(count: int) -> tuple[list[StoreHead], Swarm]:
        async with net(old, spec=STAGED) as up:
            for number, log in enumerate(up.up.coordinator.logs.values()):
                signer = EpochSigner(tmp_path / f"{number}.signed", up.up.coordinator.keys.sign)
                await log.replica.open_epoch(up.swarm.electors(), signer.sign)
                for _ in range(count + number):
                    entry, body = up.swarm.entry(log_id(up.run_id, log.name), log.head())
                    await log.replica.accept(entry, up.swarm.certify(entry), body)
            return [log.head() for log in up.up.coordinator.logs.values()], up.swarm

    heads, swarm = asyncio.run(decide(2))
    shutil.copytree(old, folder)
    keys = (folder / KEYS_FILE).rename(tmp_path / KEYS_FILE)
    (folder / FOLLOWER_FILE).write_text("{}")
    found = FollowerToRestore.found(folder, keys, None, state_dir=place)
    said = list[str]()
    found.restore(found.spec, place, said.append)
    assert "after rounds 2 and 3" in said[0]
    for stage in STAGED.modules:
        signed, _ = read_signed(place / f"{stage}.epoch.signed")
        assert signed is not None and signed >= MANY_EPOCHS

    async def again() -> None:
        async with net(place, swarm, spec=STAGED) as after:
            assert [log.head() for log in after.up.coordinator.logs.values()] == heads

    asyncio.run(again())
    shutil.rmtree(folder / "stage-1")
    with pytest.raises(CopiesError, match="followed some stages alone and lacks stage-1"):
        FollowerToRestore.found(folder, keys, None, state_dir=None)
    with pytest.raises(NoRecord, match="it holds stage-2 of 2 stages alone"):
        read(folder)
