"""Processes as people start them: followers, and a coordinator that is rebuilt from one."""

import asyncio
import contextlib
import io
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from test_restore_processes import Lab, chain_of

from atoll.coordinator.run.invite import Invite
from atoll.coordinator.run.spec import RunSpec, template
from atoll.peer.cli.main import main
from atoll.peer.lab.children import BAD_INPUT
from support.child_runs import until

# In one process: tests/peer/daemon/test_follow_run.py and tests/coordinator/copies.
pytestmark = [pytest.mark.exhaustive, pytest.mark.slow, pytest.mark.timeout(600)]

FOLLOW = ("--listen", "/ip4/127.0.0.1/tcp/0", "--stop-with-stdin")


def printed(*command: object) -> dict:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main([*map(str, command)]) == 0
    return json.loads(out.getvalue())


async def hold(folder: Path) -> None:
    lab = Lab(folder)
    fields = RunSpec.load(lab.spec).model_dump(mode="json")
    fields["coordinator"]["copies"] = None
    lab.spec.write_text(template(RunSpec.from_dict(fields)))

    async def follow(name: str):
        every = ("--checkpoint-every", "4", "--export-every", "4", "--keep-exports", "1")
        return await lab.start(name, "follow", invite, "--dir", folder / name, *every, *FOLLOW)

    try:
        first, invite = await lab.coordinator("first", lab.spec)
        peers = [await lab.peer(name, invite) for name in ("one", "two")]
        await lab.seen(invite, lambda now: now.position >= 4, first, *peers)
        left, right = await follow("left"), await follow("right")
        everybody = (first, *peers, left, right)
        await lab.seen(
            invite,
            lambda now: [p.role for p in now.peers if p.position > 8].count("follower") == 2,
            *everybody,
        )

        # A restart goes on.
        await right.stop()
        assert right.exit_code == 0
        lab.children.remove(right)
        right = await follow("right")

        (folder / "backup").mkdir()
        shutil.copy(folder / "first" / "keys.json", folder / "backup")  # and no node.key
        await lab.lose(first)
        shutil.rmtree(folder / "first")
        at = len(chain_of(folder / "left"))
        await until(lambda: len(chain_of(folder / "left")) > at + 4, *peers, left, right)
        await until(lambda: len(chain_of(folder / "right")) > at + 4, *peers, left, right)

        # All trainers end; one comes back without its log. Only followers can give it a state.
        await lab.lose(*peers)
        shutil.rmtree(folder / "two" / "log")
        peers = [await lab.peer("two", invite)]
        log = folder / "two.log"
        await until(lambda: "recovered from position" in log.read_text(), *peers, left, right)

        keys = folder / "backup" / "keys.json"
        again = ("--restore", folder / "left", "--keys", keys)
        second, new = await lab.coordinator("second", *again)
        old, now = Invite.decode(invite), Invite.decode(new)
        assert replace(old, bootstrap=()) == replace(now, bootstrap=()) and old != now
        start = await lab.seen(invite, lambda now: True, second)
        peers.append(await lab.peer("one", invite))
        await lab.seen(
            invite,
            lambda now: (
                now.position > start.position + 2
                and [p.role for p in now.peers if p.position > start.position].count("follower")
                == 2
            ),
            *(second, *peers, left, right),
        )

        # The first invite is good for a new peer, which has never met anybody.
        peers.append(await lab.peer("new", invite))
        await lab.seen(
            invite,
            lambda now: next((p.rounds_counted > 1 for p in now.peers if p.name == "new"), False),
            *(second, *peers, left, right),
        )
        exports = folder / "left" / "exports"
        await until(lambda: list(exports.glob("kept-*/model.safetensors")), second, left, right)
        await second.stop()
        chains = [chain_of(folder / name) for name in ("second", "left", "right")]
        shared = min(map(len, chains))
        assert shared > start.position + 2
        assert chains[0][:shared] == chains[1][:shared] == chains[2][:shared]
        for name in ("left", "right"):
            told = (folder / f"{name}.log").read_text()
            assert "following run kept" in told and " error " not in told
            assert list((folder / name / "checkpoints").glob("kept-*.safetensors"))
            await asyncio.to_thread(printed, "status", folder / name, "--json")

        # A peer's folder is none for a follower.
        wrong = await lab.start("wrong", "follow", invite, "--dir", folder / "one", *FOLLOW)
        await until(lambda: not wrong.running)
        assert wrong.exit_code == BAD_INPUT
    finally:
        for child in reversed(lab.children):
            await child.stop()


def test_a_coordinator_is_rebuilt_from_a_follower(tmp_path):
    asyncio.run(hold(tmp_path))
