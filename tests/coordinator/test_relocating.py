"""A coordinator signs where it is, and hears of another one of its run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atoll.coordinator.relocating import (
    ELSEWHERE_FILE,
    RELOCATION_FILE,
    OwnPlace,
    keep_restore,
    own_record,
)
from atoll.coordinator.rpc.client_errors import CoordinatorUnreachable
from atoll.coordinator.run.invite import Invite
from atoll.coordinator.run.keys import RunKeys
from atoll.coordinator.run.relocation import MAX_SERIAL, Relocation, RelocationInvalid, serial_at

KEYS = RunKeys.generate()
HERE = Invite(
    addresses=("here:7700",),
    run_id=b"\x07" * 32,
    run_key=KEYS.run_public_key,
    tls_sha256=KEYS.tls_sha256,
)
THERE = replace(HERE, addresses=("there:7700",))


def started(folder: Path, invite: Invite = HERE, now_s: float = 1000.0) -> Relocation:
    record = own_record(folder, invite, KEYS.sign, now_s)
    assert (folder / RELOCATION_FILE).read_bytes() == record
    return Relocation.open(record, HERE.run_key, HERE.run_id)


def signed(serial: int, *addresses: str) -> bytes:
    return Relocation(serial=serial, addresses=addresses).sign(HERE.run_id, KEYS.sign)


def test_a_restart_at_the_same_address_signs_nothing(tmp_path: Path) -> None:
    assert started(tmp_path) == started(tmp_path, now_s=2000.0)
    assert (tmp_path / RELOCATION_FILE).stat().st_mode & 0o777 == 0o600


def test_each_move_counts_more_than_the_one_before(tmp_path: Path) -> None:
    serials = [
        started(tmp_path).serial,
        started(tmp_path, THERE, now_s=2000.0).serial,
        started(tmp_path, HERE, now_s=1500.0).serial,  # on a machine whose clock is behind
    ]
    assert serials == [1000, 2000, 2001]


def test_a_directory_that_has_lost_the_last_record_signs_a_newer_one(tmp_path: Path) -> None:
    started(tmp_path)
    for spoil in (Path.unlink, lambda path: path.write_bytes(b"rot")):
        spoil(tmp_path / RELOCATION_FILE)
        assert started(tmp_path, THERE, now_s=3000.0).serial == 3000


def test_whoever_is_restored_later_counts_more_whatever_the_clocks_say(tmp_path: Path) -> None:
    """A coordinator that is slow to start may sign after the one that has replaced it has."""
    folders = [tmp_path / name for name in ("lost", "second", "third")]
    for number, folder in enumerate(folders, 1):
        folder.mkdir()
        if number > 1:
            keep_restore(folder, number)
    # The third is restored within the same second, and the lost machine moves an hour later.
    serials = [
        started(folder, THERE, now_s).serial
        for folder, now_s in zip(folders, (5e9, 1000.0, 1000.0), strict=True)
    ]
    assert serials == sorted(set(serials)) and serials[0] < 1 << 32
    assert started(folders[2], HERE, now_s=900.0).serial == serials[2] + 1
    assert serials[2] < MAX_SERIAL >> 1 and serials[2] >> 32 == 3


def test_whoever_rules_another_one_out_signs_the_next_record(tmp_path: Path) -> None:
    """Its clock may be far ahead, and it may be a later restore."""
    own = own_record(tmp_path, HERE, KEYS.sign, 1000.0)
    ahead = signed(serial_at(9e9, restores=7), "there:7700")
    OwnPlace(tmp_path, HERE, own, lambda *event: None).take(ahead)
    assert started(tmp_path).serial == 1000  # nothing follows of itself
    (tmp_path / ELSEWHERE_FILE).rename(tmp_path / RELOCATION_FILE)
    assert started(tmp_path).serial == serial_at(9e9, restores=7) + 1


def test_another_nodes_address_is_a_move_too(tmp_path: Path) -> None:
    node = ("/ip4/192.0.2.2/tcp/7701/p2p/12D3KooW",)
    started(tmp_path)
    assert started(tmp_path, replace(HERE, bootstrap=node)).bootstrap == node


def test_a_coordinator_follows_nobody_but_reports_another_one_once(tmp_path: Path) -> None:
    told: list[tuple[str, str]] = []
    place = OwnPlace(tmp_path, HERE, signed(5, "here:7700"), lambda *event: told.append(event))
    assert not place.take(place.record)
    assert not place.take(signed(4, "before:7700")) and not told
    for _ in range(3):
        assert not place.take(signed(6, "there:7700"))
    assert place.record == signed(5, "here:7700")
    ((level, text),) = told
    assert level == "error" and "at there:7700" in text and "Stop this one" in text
    with pytest.raises(RelocationInvalid):
        place.take(b"forged")


def test_a_record_of_the_same_serial_is_another_coordinators(tmp_path: Path) -> None:
    """Two that were rebuilt in one second: peers follow the one that they hear first."""
    told: list[tuple[str, str]] = []
    place = OwnPlace(tmp_path, HERE, signed(5, "here:7700"), lambda *event: told.append(event))
    for _ in range(2):
        place.take(signed(5, "there:7700"))
    assert len(told) == 1


def test_a_client_with_the_old_invite_follows_a_restart_at_another_port(
    kit: Any, tmp_path: Path
) -> None:
    async def main() -> None:
        folder = tmp_path / "run"
        async with kit.net(folder) as net:
            old, swarm = net.up.invite, net.swarm
            client = net.client()
            await client.join()
            kept = client.whereabouts.record
            assert client.whereabouts.relocation is not None
            assert client.whereabouts.relocation.addresses == old.addresses
        (folder / "port").unlink()  # else it takes the same one
        async with kit.net(folder, swarm) as net:
            assert net.up.invite.addresses != old.addresses
            record = net.up.coordinator.relocation
            net.up = replace(net.up, invite=old)
            lost = net.client()
            lost.recall_relocation(kept)
            lost.recall_relocation(b"rot")
            with pytest.raises(CoordinatorUnreachable):
                await lost.join()
            assert not lost.is_reached
            assert lost.whereabouts.take(record)
            await lost.follow()
            assert (await lost.join()).spec == net.up.coordinator.spec
            assert lost.is_reached
            await lost.heartbeat(swarm.status(0))

    kit.run(main())


def test_a_session_leaves_an_old_coordinator_that_still_answers(kit: Any, tmp_path: Path) -> None:
    async def main() -> None:
        async with kit.net(tmp_path / "run") as net:
            here, keys = net.up.invite.addresses, net.up.coordinator.keys
            client = net.client()
            await client.join()

            def moved(serial: int, *addresses: str) -> bytes:
                there = Relocation(serial=serial, addresses=addresses)
                return there.sign(net.run_id, keys.sign)

            later = int(net.up.coordinator.now_s()) + 100
            assert client.whereabouts.take(moved(later, *here, "127.0.0.1:9"))
            await client.follow()
            assert client._channel is not None  # it is there
            assert client.whereabouts.take(moved(later + 1, "127.0.0.1:9"))
            await client.follow()
            assert client._channel is None
            await client.heartbeat(net.swarm.status(0))  # nobody is there yet: the invite counts
            assert client._dialed == here[0]

    kit.run(main())


def test_an_answer_brings_the_record_once(kit: Any, tmp_path: Path) -> None:
    async def main() -> None:
        async with kit.net(tmp_path / "run") as net:
            client = net.client()
            await client.join()
            client.whereabouts.record, client.whereabouts.relocation = b"", None
            await client.heartbeat(net.swarm.status(0))
            assert client.whereabouts.record == net.up.coordinator.relocation
            net.up.coordinator.relocation = b"not asked for again"
            client.whereabouts.record = net.up.coordinator.relocation
            await client.heartbeat(net.swarm.status(0))

    kit.run(main())
