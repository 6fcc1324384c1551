"""Processes as people start them: followers of a pipeline, and a coordinator rebuilt from one."""

import asyncio
import shutil
from pathlib import Path

import pytest
from test_follow_processes import FOLLOW
from test_restore_processes import Lab, chain_of

from atoll.coordinator.checkpoint_sets import find
from atoll.coordinator.run.spec import RunSpec, template
from atoll.peer.lab.children import BAD_INPUT
from support.child_runs import until

# In one process: tests/peer/daemon/test_followed.py and tests/coordinator/copies.
pytestmark = [pytest.mark.exhaustive, pytest.mark.slow, pytest.mark.timeout(600)]

STAGES = ("stage-1", "stage-2")


def pipeline(folder: Path) -> Lab:
    lab = Lab(folder)
    fields = RunSpec.load(lab.spec).model_dump(mode="json")
    fields["coordinator"]["copies"] = None
    fields["topology"] = {"stages": len(STAGES)}
    fields["model"]["overrides"]["num_layers"] = 2
    fields["inner"]["grad_accumulation"] = 2
    lab.spec.write_text(template(RunSpec.from_dict(fields)))
    return lab


def lengths(folder: Path) -> list[int]:
    return [len(chain_of(folder, stage)) for stage in STAGES]


async def hold(folder: Path) -> None:
    lab = pipeline(folder)

    async def follow(name: str, *more: str):
        every = ("--checkpoint-every", "2", *more)
        return await lab.start(name, "follow", invite, "--dir", folder / name, *every, *FOLLOW)

    async def grows(name: str, *children) -> None:
        before = lengths(folder / name)
        await until(
            lambda: all(
                now > at + 1 for now, at in zip(lengths(folder / name), before, strict=True)
            ),
            *children,
        )

    try:
        first, invite = await lab.coordinator("first", lab.spec)
        peers = [await lab.peer(name, invite) for name in ("one", "two", "three")]
        await lab.seen(invite, lambda now: now.position >= 2, first, *peers)
        exports = ("--export-every", "2", "--export-format", "safetensors", "--keep-exports", "2")
        whole = await follow("whole", *exports)
        part = await follow("part", "--stages", "2")
        await lab.seen(
            invite,
            lambda now: (
                sorted(p.module for p in now.peers if p.role == "follower")
                == ["stage-1", "stage-2", "stage-2"]
            ),
            *(first, *peers, whole, part),
        )
        await until(lambda: (folder / "whole" / "peers" / "stage-2" / "run.json").exists(), whole)
        await until(lambda: list((folder / "whole").glob("stage-2/log.sqlite")), whole)

        # A restart goes on.
        await whole.stop()
        assert whole.exit_code == 0
        lab.children.remove(whole)
        whole = await follow("whole", *exports)

        shutil.copytree(folder / "first", folder / "backup")
        await lab.lose(first)
        shutil.rmtree(folder / "first")
        await grows("whole", *peers, whole, part)

        # All trainers end; they come back without their logs. Only followers can give a state.
        await lab.lose(*peers)
        names = ("one", "two", "three")
        for log in [each for name in names for each in (folder / name).glob("stage-?")]:
            shutil.rmtree(log)
        peers = [await lab.peer(name, invite) for name in names]
        await until(
            lambda: all(
                "recovered from position" in (folder / f"{name}.log").read_text() for name in names
            ),
            *(*peers, whole, part),
        )

        keys = ("--keys", folder / "backup" / "keys.json")
        refused = await lab.start(
            "refused",
            "coordinator",
            "--restore",
            folder / "part",
            *keys,
            "--state-dir",
            folder / "never",
        )
        await until(lambda: not refused.running)
        assert refused.exit_code == BAD_INPUT
        assert "lacks stage-1" in (folder / "refused.log").read_text()
        lab.children.remove(refused)

        second, new = await lab.coordinator("second", "--restore", folder / "whole", *keys)
        assert new == invite
        start = await lab.seen(invite, lambda now: True, second)
        assert [each.position > 2 for each in start.modules] == [True, True]
        await lab.seen(
            invite, lambda now: now.position > start.position + 2, second, *peers, whole, part
        )
        found = (folder / "whole" / "exports").glob
        await until(lambda: list(found("kept-*.safetensors")), second, *peers, whole, part)
        await second.stop()
        for stage in STAGES:
            chains = [chain_of(folder / name, stage) for name in ("second", "whole")]
            shared = min(map(len, chains))
            assert chains[0][:shared] == chains[1][:shared]
        assert len(find(folder / "whole" / "checkpoints").headers) == 2
        for name in ("whole", "part"):
            assert " error " not in (folder / f"{name}.log").read_text()
        await part.stop()
        assert not (folder / "part" / "stage-1").exists()
    finally:
        for child in reversed(lab.children):
            await child.stop()


def test_a_coordinator_of_stages_is_rebuilt_from_a_follower(tmp_path):
    asyncio.run(hold(tmp_path))
