"""A run of processes as people start them: a coordinator that keeps, a keeper, and two trainers."""

import asyncio
import contextlib
import io
import json
from pathlib import Path

import pytest

from atoll.peer.cli.main import main
from atoll.peer.lab.children import Child
from support.child_runs import PEER, until, write_spec

# Five processes that import torch. In one process, with real sockets: peer/daemon/test_keeping.py.
pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(600)]

TEXT = "Keepers lead and vote, and trainers train. " * 2000
RUN, ROUND = {"name": "kept", "rounds": 4}, {"electors": "keepers"}


def printed(*command: object) -> dict:
    """Run a command in this process; return the JSON that it prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main([*map(str, command)]) == 0
    return json.loads(out.getvalue())


async def hold(folder: Path) -> dict:
    """Run it to its end; return the last status."""
    state, invite = folder / "state", folder / "invite"
    spec = write_spec(folder, text=TEXT, run=RUN, round=ROUND)
    children: list[Child] = []

    async def start(name: str, *arguments: object, **options) -> Child:
        log = folder / f"{name}.log"
        children.append(await Child.start(name, log, list(map(str, arguments)), **options))
        return children[-1]

    try:
        coordinator = await start(
            "coordinator",
            *("coordinator", spec, "--state-dir", state, "--invite-file", invite),
            *("--keep", "--stop-with-stdin"),
        )
        await until(invite.exists, coordinator)
        invited = await asyncio.to_thread(printed, "invite", state, "--role", "keeper", "--json")
        (folder / "for-keepers").write_text(invited["invite"])
        data = ("--data", folder / "text.txt")
        peers = [
            await start("right", "peer", folder / "for-keepers", *PEER, "--state-dir", "right"),
            await start("one", "peer", invite, *PEER, *data, "--state-dir", folder / "one"),
            await start("two", "peer", invite, *PEER, *data, "--state-dir", folder / "two"),
        ]
        await until(lambda: not any(peer.running for peer in peers), coordinator)
        assert [peer.exit_code for peer in peers] == [0, 0, 0]
        return await asyncio.to_thread(printed, "status", invite, "--json")
    finally:
        for child in reversed(children):
            await child.stop()


def test_a_coordinator_that_keeps_a_keeper_and_two_trainers_make_rounds(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status = asyncio.run(hold(tmp_path))
    assert (status["state"], status["position"], status["epoch"]) == ("finished", 4, 0)
    roles = sorted((peer["role"], peer["position"]) for peer in status["peers"])
    assert roles == [("keeper", 4), ("keeper", 4), ("trainer", 4), ("trainer", 4)]
    assert all(row["members"] <= 2 for row in status["history"])
