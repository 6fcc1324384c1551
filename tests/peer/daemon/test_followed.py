"""What a follower follows: which logs, on which ports, and contexts that end at once."""

import asyncio
import threading
from contextlib import asynccontextmanager, closing
from functools import partial

import pytest

from atoll.coordinator.run.spec import RunSpec
from atoll.peer.daemon.follow_exports import ExportOptions
from atoll.peer.daemon.followed import (
    CannotFollow,
    FollowOptions,
    _KeptOpen,
    followed_modules,
    port_after,
)
from atoll.peer.daemon.following import Follower
from atoll.peer.daemon.options import PeerOptions
from support.organiser import LOOPBACK, tiny_spec

THREE = RunSpec.from_dict({"topology": {"stages": 3}})


@pytest.mark.parametrize(
    ("given", "followed"),
    [
        ((), ("stage-1", "stage-2", "stage-3")),
        (("3", "1"), ("stage-1", "stage-3")),
        (("stage-2", "2"), ("stage-2",)),
    ],
)
def test_all_stages_are_followed_or_those_that_are_named(given, followed):
    assert followed_modules(THREE, given) == followed


@pytest.mark.parametrize(
    ("spec", "stages", "why"),
    [
        (RunSpec.from_dict({"outer": {"method": "noloco"}}), (), "has no log"),
        (RunSpec(), ("1",), "has one log; omit it"),
        (THREE, ("0",), "expected stages of stage-1, stage-2, stage-3, or their numbers"),
        (THREE, ("1", "stage-4"), "got 'stage-4'"),
    ],
)
def test_what_cannot_be_followed_is_refused(spec, stages, why):
    with pytest.raises(CannotFollow, match=why):
        followed_modules(spec, stages)


def test_each_stage_has_a_port_of_its_own():
    assert [port_after("/ip4/0.0.0.0/tcp/4001", n) for n in (0, 2)] == [
        "/ip4/0.0.0.0/tcp/4001",
        "/ip4/0.0.0.0/tcp/4003",
    ]
    assert port_after(LOOPBACK[0], 2) == LOOPBACK[0]
    with pytest.raises(CannotFollow, match="so name a lower one"):
        port_after("/ip6/::/tcp/65535", 1)


def test_contexts_end_at_once_and_the_next_opens_after_the_last():
    """A peer that leaves may wait for seconds: several must not add up."""
    seen = []

    @asynccontextmanager
    async def context(name, wait):
        seen.append(name)
        yield name
        await wait()

    async def main():
        barrier = asyncio.Barrier(2)  # passed only if both leave together
        held = [await _KeptOpen.open(context(name, barrier.wait)) for name in "ab"]
        assert [each.value for each in held] == seen == ["a", "b"]
        async with asyncio.timeout(5):
            await asyncio.gather(*(each.close() for each in held))

    asyncio.run(main())


def test_a_context_that_cannot_be_entered_says_why():
    @asynccontextmanager
    async def broken():
        raise CannotFollow("no log")
        yield

    async def main():
        with pytest.raises(CannotFollow, match="no log"):
            await _KeptOpen.open(broken())

    asyncio.run(main())


@pytest.mark.exhaustive  # a coordinator and a join; what is refused is tested above
@pytest.mark.parametrize(
    ("sections", "options", "why"),
    [
        ({"outer": {"method": "noloco"}}, {}, "has no log"),
        ({}, {"stages": ("1",)}, "has one log; omit it"),
        ({}, {"exports": ExportOptions(every=1, form="hf")}, None),
    ],
)
def test_nothing_is_followed_that_is_refused(organise, tmp_path, sections, options, why):
    invite = organise(tiny_spec(**sections)).invite
    folder = tmp_path / "follower"
    peer = PeerOptions(invite=invite, state_dir=folder, listen=LOOPBACK, role="follower")
    following = partial(Follower, FollowOptions(peer=peer, **options), print, threading.Event())
    if why is None:
        with closing(following()) as follower:
            assert follower.place.positions == (0,) and follower.place.modules == ("",)
        assert (folder / "log").is_dir()
    else:
        with pytest.raises(CannotFollow, match=why):
            following()
        assert not (folder / "log").exists() and not (folder / "history.db").exists()
