"""C4: an evicted elector is asked as before, and keeps voting and leading."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from atoll.peer.rounds.conduct import Conduct, Fault
from support.attackers import evict, stay
from support.swarm import Swarm, SwarmPeer, reached, run_swarm

LONG_S = 40.0


def votes(peers: list[SwarmPeer], name: str) -> bool:
    return any(name in {e.peer_id for e in peer.replica.electorate} for peer in peers)


async def decided(swarm: Swarm, peers: list[SwarmPeer]) -> tuple[int, float]:
    """Return the positions of a while, and the longest time of one."""
    began_at, since_s, longest_s = min(p.replica.position for p in peers), swarm.now(), 0.0
    end_s, at = swarm.now() + LONG_S, began_at
    while swarm.now() < end_s:
        await asyncio.sleep(0.25)
        now_at = min(p.replica.position for p in peers)
        longest_s = max(longest_s, swarm.now() - since_s)
        if now_at > at:
            at, since_s = now_at, swarm.now()
    return at - began_at, longest_s


def test_an_evicted_elector_loses_its_vote_with_the_next_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(swarm: Swarm) -> None:
        peers = await swarm.start(4)
        await swarm.until(lambda: reached(peers, 4))
        liar, honest = peers[3], peers[:3]
        before, _ = await decided(swarm, peers)
        evict(monkeypatch, honest, liar)
        stay(monkeypatch, liar, honest[0])
        at = max(peer.replica.position for peer in honest)
        await swarm.until(lambda: reached(honest, at + 2))
        assert not votes(honest, liar.identity.peer_id)
        after, longest_s = await decided(swarm, honest)
        assert after >= 0.9 * before and longest_s < 10.0
        assert swarm.same_bits(honest)

    run_swarm(tmp_path, scenario, codec="int8")


def test_a_peer_that_hears_of_an_eviction_late_agrees_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It votes against dropping an elector that answers it, until it hears why."""

    async def scenario(swarm: Swarm) -> None:
        peers = await swarm.start(4)
        await swarm.until(lambda: reached(peers, 4))
        liar, honest = peers[3], peers[:3]
        evict(monkeypatch, honest[:2], liar)
        stay(monkeypatch, liar, honest[0])
        at = max(peer.replica.position for peer in honest)
        await swarm.until(lambda: reached(honest, at + 3), timeout_s=300.0)
        evict(monkeypatch, honest, liar)
        at = max(peer.replica.position for peer in honest)
        await swarm.until(lambda: reached(honest, at + 2), timeout_s=300.0)
        assert not votes(honest, liar.identity.peer_id)
        assert swarm.same_bits(honest)

    run_swarm(tmp_path, scenario, codec="int8")


def test_who_is_evicted_is_out_until_the_list_says_otherwise() -> None:
    out = {"bad"}
    conduct = Conduct(is_evicted=out.__contains__)
    assert conduct.is_out("bad") and not conduct.is_out("good")
    barred = conduct.barred("bad", 0.0)
    assert barred is not None and barred.why == Fault.EVICTED
    assert "permanently" in str(barred)
    conduct.bar_for_good("bad", Fault.EQUIVOCATION)
    barred = conduct.barred("bad", 0.0)
    assert barred is not None and barred.why == Fault.EQUIVOCATION
    out.clear()
    assert conduct.is_out("bad") and conduct.barred("good", 0.0) is None
