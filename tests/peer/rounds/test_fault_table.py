"""The rest of the faults that a round survives; kills, freezes and cuts are in ``test_strikes.py``.

What comes in from strangers is in ``test_engine_hostile.py``, lost and rewound histories in
``test_swarm.py``.
"""

import asyncio
import struct
from dataclasses import replace
from functools import partial

import pytest
import torch

from atoll.compression import parse
from atoll.compression.base import HEADER_BYTES
from atoll.dht.transport import PeerUnreachable
from atoll.optim.log.entry import Entry
from atoll.optim.reduction.robust import median
from atoll.optim.state.layout import CELL, Layout
from atoll.peer.rounds.allreduce.sides import CODES, ExchangeState, Owner
from atoll.peer.rounds.conduct import FIRST_BAR_S
from atoll.peer.rounds.pacing import Link
from support.strikes import expect_no_work_lost, expect_sums, passed, settled_down
from support.swarm import SETTINGS, SMALL, Swarm, run_swarm

WIDE = Layout(names=("w",), shapes=((7 * CELL + 1_000,),))
FP32 = parse("fp32")


run = partial(run_swarm, layout=SMALL)


def entries(peer):
    return [Entry.decode(r.entry) for r in peer.replica.store.headers(0, peer.replica.position)]


async def end_equal(swarm, peers, rounds=2):
    """Go on for some rounds; then all hold the same bits, and nothing was lost or counted twice."""
    most = max(p.replica.position for p in peers)
    await swarm.until(lambda: passed(peers, most + rounds))
    await swarm.until(lambda: settled_down(peers))
    assert swarm.same_bits(peers)
    for peer in peers:
        expect_no_work_lost(peer)
    expect_sums(swarm, peers[0])


def test_a_pair_that_is_cut_goes_on_at_one_end_and_the_other_catches_up(tmp_path):
    async def scenario(swarm):
        peers = await swarm.start(2)
        await swarm.until(lambda: passed(peers, 1))
        first = peers[0].replica.electorate[0]
        goes_on = next(p for p in peers if p.ctx.me == first)
        waits = next(p for p in peers if p is not goes_on)
        swarm.network.cut(*(p.identity.peer_id for p in peers))
        held, moved = waits.replica.position, goes_on.replica.position
        await swarm.until(lambda: goes_on.replica.position >= moved + 3)
        assert waits.replica.position <= held + 1
        swarm.network.heal()
        await end_equal(swarm, peers)
        assert waits.resets == 0
        assert waits.ctx.me in {m.elector for m in entries(goes_on)[-1].members}

    run(tmp_path, scenario)


def test_two_and_two_go_on_at_one_side_and_lose_no_work(tmp_path):
    async def scenario(swarm):
        peers = await swarm.start(4)
        await swarm.until(lambda: passed(peers, 1))
        names = [p.identity.peer_id for p in peers]
        swarm.network.partition(names[:2], names[2:])
        moved = max(p.replica.position for p in peers)
        await swarm.until(lambda: max(p.replica.position for p in peers) >= moved + 3)
        ahead = [p.replica.position >= moved + 2 for p in peers]
        assert ahead in ([True, True, False, False], [False, False, True, True])
        swarm.network.heal()
        await end_equal(swarm, peers)
        assert all(p.resets == 0 for p in peers)

    run(tmp_path, scenario)


def test_a_peer_that_was_frozen_for_minutes_is_not_counted_twice(tmp_path):
    async def scenario(swarm):
        peers = await swarm.start(3, window_s=20.0)
        await swarm.until(lambda: passed(peers, 0))
        frozen = peers[1]
        await swarm.until(lambda: frozen.rounds.statistics().phase == "reduce")
        swarm.network.freeze(frozen.identity.peer_id)
        others = [p for p in peers if p is not frozen]
        await asyncio.sleep(180.0)
        assert passed(others, 6)
        swarm.network.thaw(frozen.identity.peer_id)
        await end_equal(swarm, peers, rounds=3)
        assert frozen.resets == 1
        weights = [
            m.weight
            for e in entries(peers[0])
            for m in e.members
            if m.elector == frozen.ctx.me and e.position > 6
        ]
        assert weights[0] == 0.0
        assert all(weights[1:])

    run(tmp_path, scenario)


def test_a_slow_peer_that_says_so_gets_a_smaller_part(tmp_path):
    async def scenario(swarm):
        peers = [swarm.add(link_mbit_s=100.0, declared_mbit_s=100.0) for _ in range(3)]
        slow = swarm.add(link_mbit_s=5.0, declared_mbit_s=5.0)
        await swarm.begin([*peers, slow])
        await swarm.until(lambda: passed(swarm.peers, 0))
        entry = entries(slow)[0]
        assert slow.ctx.me in {m.elector for m in entry.complete_members()}
        cells = {m.elector: 0 for m in entry.members}
        for part in entry.parts:
            cells[entry.members[part.owner].elector] += part.stop_cell - part.start_cell
        assert cells[slow.ctx.me] <= 1
        assert min(cells[p.ctx.me] for p in peers) >= 2

    run(tmp_path, scenario, codec="int8", layout=WIDE)


def test_a_slow_peer_that_does_not_say_so_is_left_out_and_told(tmp_path):
    async def scenario(swarm):
        peers = [swarm.add(link_mbit_s=20.0, declared_mbit_s=20.0) for _ in range(3)]
        slow = swarm.add(link_mbit_s=1.0, declared_mbit_s=20.0)
        await swarm.begin([*peers, slow])
        await swarm.until(lambda: passed(peers, 0), timeout_s=100.0)
        entry = entries(peers[0])[0]
        assert all(p.ctx.me in {m.elector for m in entry.complete_members()} for p in peers)
        assert slow.ctx.me not in {m.elector for m in entry.complete_members()}
        await swarm.until(lambda: passed([slow], 0))
        assert any("the rest stays in its next contribution" in e for e in slow.events)
        traces = [s.trace for p in peers for s in p.settled if s.applied.entry.position == 0]
        reasons = {t.left_out.get(slow.identity.peer_id) for t in traces if t is not None}
        assert reasons - {None}
        expect_no_work_lost(slow)

    run(tmp_path, scenario, codec="int8", layout=WIDE)


def patched(frame, value):
    """An fp32 frame with one value replaced, and a checksum that fits."""
    numel = (len(frame) - HEADER_BYTES) // 4
    bad = bytearray(frame)
    bad[HEADER_BYTES : HEADER_BYTES + 4] = struct.pack("<f", value)
    bad[:HEADER_BYTES] = FP32._header((numel,), bad, len(bad))
    return bytes(bad)


TAMPERINGS = {
    "NaN": lambda frame: patched(frame, float("nan")),
    "infinity": lambda frame: patched(frame, float("-inf")),
    "wrong length": lambda frame: frame[:-4],
    "wrong shape": lambda frame: FP32.encode(torch.zeros(7)),
    "wrong codec": lambda frame: parse("int8").encode(
        torch.zeros((len(frame) - HEADER_BYTES) // 4)
    ),
    "a flipped bit": lambda frame: frame[:-1] + bytes([frame[-1] ^ 1]),
    "a norm above the declared": lambda frame: patched(frame, 1e12),
}


async def send_bad_cells(swarm, attack):
    """Three peers of which the first sends them until it is barred; when that was."""
    peers = await swarm.start(3)
    bad, good = peers[0], peers[1:]
    name, tampering = bad.identity.peer_id, TAMPERINGS[attack]
    bad.tamper = lambda offer: replace(offer, frames=tuple(map(tampering, offer.frames)))
    await swarm.until(lambda: any(p.ctx.conduct.barred(name, swarm.now()) for p in good))
    for entry in entries(good[0]):
        assert bad.ctx.me not in {m.elector for m in entry.complete_members()}
    assert any(t.left_out.get(name, "").startswith("bad-cell") for t in told(good))
    return peers, swarm.now()


@pytest.mark.parametrize(
    "attack",
    [
        "NaN",
        "wrong length",
        "wrong codec",
        *(
            pytest.param(attack, marks=pytest.mark.exhaustive)
            for attack in ("infinity", "wrong shape")
        ),
    ],
)  # a flipped bit: in the next test
def test_a_sender_of_bad_cells_is_named_left_out_and_then_barred(tmp_path, attack):
    run(tmp_path, lambda swarm: send_bad_cells(swarm, attack))


def test_a_sender_of_bad_cells_comes_back_after_its_bar(tmp_path):
    async def scenario(swarm):
        peers, barred_at = await send_bad_cells(swarm, "a flipped bit")
        bad, good = peers[0], peers[1:]
        bad.tamper = lambda offer: offer
        await swarm.until(
            lambda: bad.ctx.me in {m.elector for m in entries(good[0])[-1].complete_members()}
        )
        assert swarm.now() - barred_at > FIRST_BAR_S / 2
        assert any("banned" in t.left_out.values() for t in told(good)) or any(
            "banned for another" in e for e in bad.events
        )
        assert all(e.kind == "update" for e in entries(good[0]))
        await end_equal(swarm, peers)

    run(tmp_path, scenario)


def told(peers):
    return [s.trace for p in peers for s in p.settled if s.trace is not None]


def test_an_owner_that_lives_but_never_finishes_loses_its_part(tmp_path, monkeypatch):
    await_senders = Owner.await_senders

    async def never(owner, owned):
        if owner._state.ctx.me == lazy and owner._state.group.position == 0:
            await asyncio.Event().wait()
        await await_senders(owner, owned)

    async def scenario(swarm):
        peers = await swarm.start(3)
        await swarm.until(lambda: passed(peers, 0))
        entry = entries(peers[0])[0]
        assert entry.kind == "update"
        assert any(part.generation > 0 for part in entry.parts)
        assert all(entry.members[part.owner].elector != lazy for part in entry.parts)
        assert len(entry.complete_members()) == 3
        await end_equal(swarm, peers)

    lazy = Swarm(tmp_path / "names").add().ctx.me
    monkeypatch.setattr(Owner, "await_senders", never)
    run(tmp_path, scenario)


def test_a_dial_that_fails_at_once_is_tried_again(tmp_path):
    async def scenario(swarm):
        peers = await swarm.start(2)
        dial, failures = peers[0].transport.open, [PeerUnreachable("no dial within 5 s")] * 3

        async def flaky(peer, method, *, timeout_s):
            if method == "reduce" and failures:
                raise failures.pop()
            return await dial(peer, method, timeout_s=timeout_s)

        peers[0].transport.open = flaky
        await swarm.until(lambda: peers[0].windows == 1)
        began_s = swarm.now()
        await swarm.until(lambda: passed(peers, 0))
        assert not failures
        assert swarm.now() - began_s < SETTINGS.stall_s
        assert len(entries(peers[0])[0].complete_members()) == 2
        assert not any("left out" in e or "reassigned to" in e for p in peers for e in p.events)

    run(tmp_path, scenario)


def teach(peer, work_N):
    """Let every window of a peer learn the same."""

    def train():
        peer.work_N += work_N
        peer.drift_N += work_N
        return peer.drift_N.clone()

    peer.train = train


def test_a_robust_reducer_keeps_a_liar_out_and_counts_what_it_took(tmp_path):
    async def scenario(swarm):
        peers = await swarm.start(4)
        common_N = torch.randn(SMALL.numel, generator=torch.Generator().manual_seed(9))
        for peer in peers:
            teach(peer, -common_N if peer is peers[0] else common_N)
        await swarm.until(lambda: passed(peers, 0))
        store, entry = peers[1].replica.store, entries(peers[1])[0]
        update_N = swarm.replay.decode(entry, store.body(0))
        assert len(entry.complete_members()) == 4
        assert torch.allclose(update_N, common_N, atol=1e-5)
        owners = {entry.members[part.owner].peer_id for part in entry.parts}
        for peer in peers:
            assert (peer.settled[0].trace.rejected > 0) == (peer.identity.peer_id in owners)

    run(tmp_path, scenario, rule=median)


def test_a_lone_survivor_gives_its_state_to_joiners(tmp_path):
    async def scenario(swarm):
        peers = await swarm.start(3)
        alive = list(peers)
        while len(alive) > 1:
            start = max(p.replica.position for p in alive)
            await swarm.until(lambda s=start: passed(alive, s + 1))
            victim = next(p for p in alive if p.ctx.me != alive[0].replica.electorate[0])
            victim.kill()
            alive.remove(victim)
        (survivor,) = alive
        last = survivor.replica.position
        await swarm.until(lambda: survivor.replica.position > last + 1)
        joiner = swarm.add()
        await joiner.start()
        await swarm.until(lambda: joiner.ctx.me in entries(survivor)[-1].electorate)
        await end_equal(swarm, [survivor, joiner])

    run(tmp_path, scenario)


def test_a_sender_whose_results_cannot_be_sent_is_waited_for_no_longer(tmp_path, monkeypatch):
    """Its death may show first where the owner sends to it, while its own stream is only silent."""
    send_results, silent = Owner.send_results, []

    async def broken(self, owned, head, stream):
        if stream.remote in silent:
            raise PeerUnreachable("the stream broke", peer=stream.remote)
        await send_results(self, owned, head, stream)

    async def scenario(swarm):
        peers = await swarm.start(3)
        victim, others = peers[0], peers[1:]
        await swarm.until(lambda: passed(peers, 0))
        silent.append(victim.identity.peer_id)
        monkeypatch.setattr(Owner, "send_results", broken)
        monkeypatch.setattr(ExchangeState, "send_paced", quiet_of(victim))
        began_s = max(p.ready_at for p in others)
        await swarm.until(lambda: passed(others, 1))
        assert swarm.now() - began_s < SETTINGS.stall_s

    run(tmp_path, scenario)


def test_a_round_in_which_somebody_died_says_nothing_of_the_link(tmp_path, monkeypatch):
    """What was sent to the dead is never confirmed: taken for a slow link it would pace others."""
    learnt = []
    monkeypatch.setattr(Link, "learn", lambda link, samples: learnt.append(link))

    async def scenario(swarm):
        peers = await swarm.start(3)
        await swarm.until(lambda: passed(peers, 0))
        assert {peer.ctx.link for peer in peers} == set(learnt)
        victim, others = peers[0], peers[1:]
        struck = []

        def strike(peer, phase, position):
            if peer is victim and phase == "reduce" and not struck:
                struck.append(position)
                learnt.clear()
                victim.kill()

        swarm.on_phase = strike
        await swarm.until(lambda: bool(struck) and passed(others, struck[0]))
        assert not set(learnt) & {peer.ctx.link for peer in others}

    run(tmp_path, scenario)


def quiet_of(victim):
    """`ExchangeState.send_paced`, by which one peer sends no codes."""
    send_paced = ExchangeState.send_paced

    async def send(self, stream, messages, first, leg):
        if self.ctx is victim.ctx and leg == CODES:
            await asyncio.Event().wait()
        return await send_paced(self, stream, messages, first, leg)

    return send
