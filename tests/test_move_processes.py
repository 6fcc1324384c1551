"""Processes as people start them: the coordinator's directory goes on at another address."""

import asyncio
import dataclasses
import socket
import subprocess
from pathlib import Path

import pytest

from atoll.coordinator.run.files import KNOWN_FILE
from atoll.coordinator.run.invite import Invite
from atoll.coordinator.run.status import RunStatus
from atoll.dht.addresses import peer_of
from atoll.peer.lab.children import ATOLL, Child
from support.child_runs import PEER, status_when, until, write_spec
from support.limits import DEADLINE_S

pytestmark = [pytest.mark.exhaustive, pytest.mark.slow, pytest.mark.timeout(480)]

TEXT = "The organiser takes the run to another machine. " * 2000
RUN, ROUND = {"name": "moved", "rounds": 0}, {"snapshot_every": 4}


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"


async def entries(state: Path, coordinator: Child) -> tuple[str, ...]:
    """Return what an invite lists beside the coordinator's node, once that knows the peers."""
    await until((state / KNOWN_FILE).exists, coordinator)
    words = [*ATOLL, "invite", str(state), "--entries", "2"]
    out = await asyncio.to_thread(subprocess.check_output, words, text=True)
    listed = Invite.decode(out).bootstrap
    assert len({peer_of(address) for address in listed}) == 3
    return listed


async def hold(folder: Path, *, by_copies: bool) -> None:
    """Move a run's coordinator under two trainers, restart one, and let others join.

    The last one has never been in the run, and an invite of before the move, which lists a trainer.
    """
    copies, key = folder / "copies", folder / "first" / "recovery.key"
    spec = write_spec(folder, text=TEXT, run=RUN, round=ROUND)
    data = ("--data", folder / "text.txt")
    children: list[Child] = []

    async def start(name: str, *arguments: object) -> Child:
        log = folder / f"{name}.log"
        children.append(await Child.start(name, log, list(map(str, arguments))))
        return children[-1]

    async def coordinator(name: str, *arguments: object) -> tuple[Child, str]:
        addresses = ("--listen", free_address(), "--dht-listen", free_address())
        state, file = folder / name, folder / f"{name}.invite"
        file.unlink(missing_ok=True)
        child = await start(
            f"{name}-coordinator",
            *("coordinator", *arguments, *addresses, "--state-dir", state, "--invite-file", file),
            "--stop-with-stdin",
        )
        await until(file.exists, child)
        return child, file.read_text().strip()

    async def trainer(name: str, invite: str) -> Child:
        named = ("--name", name, "--state-dir", folder / name)
        return await start(name, "peer", invite, *PEER, *data, *named)

    async def seen(invite: str, condition) -> RunStatus:
        """Wait for a status of the run, with all processes there."""
        return await status_when(invite, condition, children, patience_s=DEADLINE_S)

    def online(status: RunStatus) -> dict[str, str]:
        here = [peer for peer in status.peers if peer.state not in ("gone", "left")]
        return {peer.name: peer.incarnation for peer in here}

    async def end(child: Child) -> None:
        await child.stop()
        children.remove(child)

    try:
        first, old = await coordinator("first", spec, "--copies", copies)
        one = await trainer("one", old)
        await trainer("two", old)
        before = await seen(
            old,
            lambda now: len(online(now)) == 2 and now.copies and now.copies.position >= 2,
        )
        with_entries = dataclasses.replace(
            Invite.decode(old), bootstrap=await entries(folder / "first", first)
        )
        await end(first)
        if by_copies:
            _, new = await coordinator("second", "--restore", copies, "--recovery-key", key)
        else:
            (folder / "first").rename(folder / "second")
            _, new = await coordinator("second", spec)
        assert Invite.decode(new).addresses != Invite.decode(old).addresses
        after = await seen(
            new,
            lambda now: now.position > before.position + 2 and online(now) == online(before),
        )
        assert after.epoch == before.epoch
        for name in ("one", "two"):
            told = (folder / f"{name}.log").read_text()
            assert f"the coordinator is at {Invite.decode(new).addresses[0]} now" in told

        await end(one)
        await seen(new, lambda now: "one" not in online(now))
        await trainer("one", old)
        await trainer("three", new)
        await trainer("four", with_entries.encode())
        all_of_them = {"one", "two", "three", "four"}
        await seen(
            new,
            lambda now: now.position > after.position + 2 and online(now).keys() == all_of_them,
        )
        told = (folder / "four.log").read_text()
        assert f"nodes of the run say that it is at {Invite.decode(new).addresses[0]}" in told
    finally:
        for child in reversed(children):
            await child.stop()


@pytest.mark.parametrize("by_copies", [False, True])
def test_peers_follow_a_coordinator_that_moves(tmp_path: Path, by_copies: bool) -> None:
    asyncio.run(hold(tmp_path, by_copies=by_copies))
