"""One fault at each message of a pipeline of three stages, in memory and in virtual time.

Whichever message it is, every microbatch ends by its deadline and counts at most once at a peer,
and nobody is left with something in work.
"""

import asyncio

import pytest

from atoll.dht.tasks import KeptTasks
from atoll.dht.testing.memory import MemoryNetwork
from atoll.dht.testing.virtualtime import run_virtual
from atoll.peer.pipeline.carrier import NOTE_S, TICK_S
from support.carried import LIFETIME_S, Member, record, shape_of

ORIGIN = "a0"
NAMES = (ORIGIN, "b0", "b1", "c0", "c1")
STAGES = 3
LATENCY_S, JOB_S = 0.02, 0.05
SEEN_S = 4.0  # after which the others know that a peer is gone
FROZEN_S = 8.0


def drop(network, src, dst):
    return False


def reset(network, src, dst):
    network.reset(src, dst)


def kill(network, src, dst):
    network.kill(dst if src == ORIGIN else src)  # whoever is not the origin


def kill_origin(network, src, dst):
    network.kill(ORIGIN)


def freeze(network, src, dst):
    victim = dst if src == ORIGIN else src
    network.freeze(victim)
    asyncio.get_running_loop().call_later(FROZEN_S, network.thaw, victim)


async def flowed(fault, at):
    """Let microbatches flow with a fault at one message; return the peers and how many there were.

    Ends when nothing is in work at the living, which is checked to be soon enough.
    """
    counts = []
    loop = asyncio.get_running_loop()

    def strike(src, dst, method, n):
        counts.append(n)
        return fault(network, src, dst) if len(counts) == at else None

    network = MemoryNetwork(latency_s=LATENCY_S, on_message=strike)
    async with KeptTasks(lambda text: None) as tasks:
        members = {
            name: Member(
                network, tasks, name, "abc".index(name[0]), shape_of(), stages=STAGES, job_s=JOB_S
            )
            for name in NAMES
        }
        origin, seen_s = members[ORIGIN], {}

        def look():
            for name in NAMES:
                seen_s[name] = loop.time() if name in network.peers else seen_s.get(name, 0.0)
            for each in members.values():
                following = [m for m in members.values() if m.stage == each.stage + 1]
                here = [m for m in following if loop.time() - seen_s[m.name] < SEEN_S]
                each.carrier.look([record(m) for m in here])

        def is_quiet():
            living = [members[name] for name in network.peers]
            busy = [m for m in living if m.hop.statistics().in_flight]
            return not busy and (ORIGIN not in network.peers or len(origin.ends) == origin.most)

        limit_s = 2 * LIFETIME_S + FROZEN_S + NOTE_S
        while not is_quiet():
            look()
            assert loop.time() < limit_s, "something is in work for ever"
            await asyncio.sleep(0.1)
        assert network.errors == []
        return {name: members[name] for name in network.peers}, members, len(counts)


def check(living, members):
    origin = members[ORIGIN]
    if ORIGIN in living:
        assert origin.ended_s.keys() == origin.began_s.keys()
    for name, ended_s in origin.ended_s.items():
        assert ended_s - origin.began_s[name] <= LIFETIME_S + 2 * TICK_S
    for member in members.values():
        assert max(member.counted.values(), default=0) <= 1
        assert not member.held
    # What came back has counted at one peer of each stage at least.
    done = {end.microbatch for end in origin.ends if end.omission is None}
    for stage in range(STAGES):
        at_stage = [m.counted for m in members.values() if m.stage == stage]
        assert done <= {name for counted in at_stage for name in counted}
    return done


def total_messages():
    living, members, total = run_virtual(flowed(drop, 0))
    assert len(check(living, members)) == members[ORIGIN].most
    return total


# A lost message or connection, and a dead or frozen peer, cost no microbatch: another one is there.
@pytest.mark.parametrize(
    "fault",
    [pytest.param(each, marks=pytest.mark.exhaustive) for each in (kill, drop, reset, freeze)],
)
def test_a_fault_at_any_message_loses_no_microbatch(fault):
    for at in range(1, total_messages() + 1):
        living, members, _ = run_virtual(flowed(fault, at))
        assert len(check(living, members)) == members[ORIGIN].most, at


def test_what_a_dead_origin_began_ends_everywhere():
    for at in range(1, total_messages() + 1):
        living, members, _ = run_virtual(flowed(kill_origin, at))
        assert ORIGIN not in living
        check(living, members)
