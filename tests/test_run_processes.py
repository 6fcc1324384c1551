"""Orders to a run of processes as people start them: a coordinator and two trainers."""

import asyncio
import contextlib
import io
import json
import sqlite3
from pathlib import Path

import pytest

from atoll.coordinator.run.invite import Invite
from atoll.coordinator.run.status import RunStatus
from atoll.optim.log.entry import Entry
from atoll.optim.log.store import LOG_FILE
from atoll.peer.cli.main import main
from atoll.peer.cli.run import patiently
from atoll.peer.cli.watching import asking
from atoll.peer.lab.children import Child
from support.child_runs import PEER, start_child, until, write_spec
from support.limits import DEADLINE_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TEXT = "The organiser orders, and everybody switches. " * 2000
RUN, ROUND = {"name": "ordered", "rounds": 0}, {"snapshot_every": 4}


def ordered(*command: object) -> list[dict]:
    """Give an order in this process; return the JSON that the command prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(["run", *map(str, command), "--json"]) == 0
    return [json.loads(line) for line in out.getvalue().splitlines()]


def rotated(invite: Path, state: Path) -> dict:
    """Change the organiser's key; return the JSON that the command prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(["keys", "rotate", str(invite), "--key", str(state), "--json"]) == 0
    return json.loads(out.getvalue())


async def hold(folder: Path) -> list[Entry]:
    """Order a run about from its beginning to its end; return its log."""
    state, invite = folder / "state", folder / "invite"
    spec = write_spec(folder, text=TEXT, run=RUN, round=ROUND)
    children: list[Child] = []

    async def start(name: str, *arguments: object) -> Child:
        children.append(await start_child(name, folder / f"{name}.log", arguments))
        return children[-1]

    async def order(action: str, *arguments: object) -> list[dict]:
        told = await asyncio.to_thread(ordered, action, invite, *arguments, "--key", state)
        assert all(each["decided"] for each in told), told
        return told

    async def status() -> RunStatus:
        async with asking(Invite.decode(invite.read_text())) as client:
            # All processes have one address here, and the trainers' rounds use up its calls.
            return await patiently(client.status)

    async def seen(condition) -> RunStatus:
        """Wait for a status of the run, with all processes there."""
        async with asyncio.timeout(DEADLINE_S):
            while not condition(now := await status()):
                for child in children:
                    assert child.running, child.failure()
                await asyncio.sleep(0.2)
        return now

    try:
        coordinator = await start(
            "coordinator",
            *("coordinator", spec, "--state-dir", state, "--invite-file", invite),
            "--stop-with-stdin",
        )
        await until(invite.exists, coordinator)
        data = ("--data", folder / "text.txt")
        two = folder / "two"
        for name in ("one", "two"):
            named = ("--name", name, "--state-dir", folder / name)
            await start(name, "peer", invite, *PEER, *data, *named)
        await seen(lambda now: now.position >= 2)

        told = await order("set", "inner_steps=6", "outer_lr=0.25", "inner_scale=0.5")
        assert [each["number"] for each in told] == [1, 2, 3]
        now = await seen(lambda now: now.settings.get("inner_scale") == 0.5)
        assert (now.inner_steps, now.settings["outer_lr"]) == (6, 0.25)
        await seen(lambda later: later.position >= now.position + 2)

        await order("pause")
        now = await seen(lambda now: now.state == "paused")
        await asyncio.sleep(3.0)
        assert (await status()).position == now.position
        await order("resume")
        await seen(lambda later: later.position >= now.position + 3)

        told = await asyncio.to_thread(rotated, invite, state)
        assert told["decided"] and told["number"] == 6 and told["removed"] is None
        again = await asyncio.to_thread(rotated, invite, state)
        assert again["decided"] and again["removed"] == told["file"]
        assert not Path(told["file"]).exists() and Path(again["file"]).exists()

        now = await seen(lambda now: sum(peer.state == "training" for peer in now.peers) == 2)
        out = next(peer for peer in now.peers if peer.name == "two")
        await order("evict", out.peer_id, "--reason", "noise")
        evicted = children.pop()
        await until(lambda: not evicted.running, coordinator)
        assert evicted.exit_code == 2
        told = (folder / "two.log").read_text()
        assert "the organiser has evicted this peer: noise; ask the organiser to readmit it" in told
        assert (await status()).evicted == [out.peer_id]
        await order("readmit", "two")
        now = await status()
        await start("two", "peer", invite, *PEER, *data, "--name", "two", "--state-dir", two)
        await seen(lambda later: later.position >= now.position + 2)

        await order("stop")
        peers = children[1:]
        await until(lambda: not any(peer.running for peer in peers), coordinator)
        assert [peer.exit_code for peer in peers] == [0, 0]
        assert (await status()).state == "finished"
        return read_log(state / "log")
    finally:
        for child in reversed(children):
            await child.stop()


def read_log(folder: Path) -> list[Entry]:
    with contextlib.closing(sqlite3.connect(f"file:{folder / LOG_FILE}?mode=ro", uri=True)) as log:
        rows = log.execute("SELECT entry FROM entries ORDER BY position").fetchall()
    return [Entry.decode(row[0]) for row in rows]


def test_a_run_is_changed_paused_resumed_and_stopped(tmp_path: Path) -> None:
    log = asyncio.run(hold(tmp_path))
    orders = [entry.position for entry in log if entry.kind == "control"]
    assert len(orders) == 10
    first, _, last, paused, resumed, _, _, evicted, readmitted, stopped = (
        orders  # updates may come between the first three
    )
    assert resumed == paused + 1 and stopped == len(log) - 1
    assert all(len(entry.members) < 2 for entry in log[evicted:readmitted])
    before = [entry for entry in log[:first] if entry.kind == "update"]
    after = [entry for entry in log[last + 1 : paused] if entry.kind == "update"]
    assert {entry.lr for entry in after} == {0.25} != {entry.lr for entry in before}
    assert {member.steps for entry in before for member in entry.members} == {4}
    assert 6 in {member.steps for entry in after for member in entry.members}
