"""Test meetings that break at any message, and peers that die, freeze, lie or are separated."""

import asyncio
import hashlib
import re
from dataclasses import replace

import msgpack
import pytest
import torch

from atoll.compression import Fp32
from atoll.compression.checksum import Checksum
from atoll.dht.refusals import RefusalCode
from atoll.dht.transport import Refused, TransportError
from atoll.optim.log.entry import MalformedRecord
from atoll.optim.reduction.cells import pack
from atoll.optim.state.layout import CELL
from atoll.peer.gossip import meeting
from atoll.peer.gossip.messages import AHEAD, PROTOCOL, TERMS, Ahead, Terms, tagged
from support.crowd import in_crowd, kept, spread

MESSAGES = 19  # one more than the first meeting of two takes, including keepalives


def struck(how, at, *, victim=0):
    """Run two peers, strike one at the n-th message of their meetings and return the result."""
    came = {}

    async def use(crowd):
        peers = [crowd.add(window_s=5.0) for _ in range(2)]
        inviter = sorted(peers, key=lambda p: p.peer_id)
        seen = [0]

        def on_message(src, dst, method, number):
            if method != "gossip":
                return None
            seen[0] += 1
            if seen[0] == at:
                how(crowd, inviter[victim], {src, dst})
            return None

        for peer in peers:
            await peer.start()
        before, before_N = kept(peers)
        crowd.network.on_message = on_message

        def living():
            return [p for p in peers if p.transport.alive]

        await crowd.until(lambda: all(len(p.settled) >= 1 for p in living()), 300)
        crowd.network.on_message = None
        crowd.network.heal()
        for peer in peers:
            crowd.network.thaw(peer.peer_id)
        await crowd.rounds(4, living())
        after, after_N = kept(living())
        came.update(
            peers=peers,
            living=living(),
            before=before,
            after=after,
            moved=float((after_N - before_N).abs().max()),
            seen=seen[0],
            window=5.0,
            events=[e for p in peers for e in p.events],
        )

    in_crowd(use, work=0.0)
    return came


def reset(crowd, victim, pair):
    crowd.network.reset(*pair)


def kill(crowd, victim, pair):
    if victim.transport.alive:
        victim.kill()


def freeze(crowd, victim, pair):
    crowd.network.freeze(victim.peer_id)


@pytest.mark.parametrize("at", range(1, MESSAGES))
def test_a_connection_that_breaks_at_any_message_loses_nothing(at):
    """A peer in doubt asks, so both sides agree in the end and the mean is kept."""
    came = struck(reset, at)
    assert came["after"] == came["before"] == 2.0
    assert came["moved"] < 1e-5
    assert all(p.met for p in came["peers"])


@pytest.mark.parametrize(("at", "victim"), [(at, at // 3 % 2) for at in range(1, MESSAGES, 3)])
def test_a_peer_that_dies_at_any_message_leaves_the_other_alone(at, victim):
    came = struck(kill, at, victim=victim)
    (survivor,) = came["living"] or [None]
    assert survivor.settled[-1].members == 1
    assert survivor.gossip.mass in (0.0, 1.0)
    assert bool(torch.isfinite(survivor.gossip.state.params_N).all())
    assert (survivor.gossip.mass == 0.0) == any("is gone" in event for event in survivor.events)


@pytest.mark.parametrize(("at", "victim"), [(at, at // 4 % 2) for at in range(1, MESSAGES, 4)])
def test_a_peer_that_freezes_at_any_message_holds_nobody_up(at, victim):
    took = {}

    def strike(crowd, peer, pair):
        crowd.network.freeze(peer.peer_id)
        took["at"] = crowd.now()

    async def use(crowd):
        peers = sorted([crowd.add() for _ in range(2)], key=lambda p: p.peer_id)
        seen = [0]

        def on_message(src, dst, method, number):
            seen[0] += method == "gossip"
            if method == "gossip" and seen[0] == at:
                strike(crowd, peers[victim], ())

        crowd.network.on_message = on_message
        for peer in peers:
            await peer.start()
        other = peers[1 - victim]
        await crowd.until(lambda: "at" in took)
        count = len(other.settled)
        await crowd.until(lambda: len(other.settled) > count)
        # A silence of a stall, or, in doubt, twenty stalls of asking.
        longest = 36.0 if any("is gone" in e for e in other.events) else 8.0
        assert crowd.now() - took["at"] < longest
        before = len(other.settled)
        crowd.network.thaw(peers[victim].peer_id)
        await crowd.until(lambda: len(other.settled) > before + 3)
        await crowd.until(lambda: other.settled[-1].members == 2, 120)
        mass, _ = kept(peers)
        assert mass <= 2.0 + 1e-12

    in_crowd(use, work=0.0)


def test_what_a_window_learned_counts_once_however_meetings_break():
    """Connections break at random; every window is counted or remains in the drift."""

    async def use(crowd):
        peers = await crowd.start(4)
        rng = crowd.network.rng

        def on_message(src, dst, method, number):
            if method == "gossip" and rng.random() < 0.03:
                crowd.network.reset(src, dst)

        crowd.network.on_message = on_message
        mass, _ = kept(peers)
        await crowd.rounds(25)
        for peer in peers:
            torch.testing.assert_close(
                peer.counted_N + peer.drift_N, peer.trained_N, rtol=0, atol=1e-5
            )
        broken = sum(not settled.included for p in peers for settled in p.settled)
        assert broken > 5
        assert kept(peers)[0] == mass

    in_crowd(use)


def test_random_breaks_keep_the_mean():
    async def use(crowd):
        peers = await crowd.start(5)
        rng = crowd.network.rng

        def on_message(src, dst, method, number):
            if method == "gossip" and rng.random() < 0.03:
                crowd.network.reset(src, dst)

        crowd.network.on_message = on_message
        mass, total_N = kept(peers)
        start = spread(peers)
        await crowd.rounds(30)
        await crowd.until(lambda: all(p.gossip._peer.round is None for p in peers))
        after, after_N = kept(peers)
        assert after == mass
        assert (after_N - total_N).abs().max() < 1e-5
        assert spread(peers) < start / 3

    in_crowd(use, work=0.0)


def test_deaths_one_after_another_leave_the_last_one_training():
    async def use(crowd):
        peers = await crowd.start(4)
        await crowd.rounds(3)
        for victim in peers[:3]:
            victim.kill()
            left = [p for p in peers if p.transport.alive]
            await crowd.rounds(3, left)
        (last,) = [p for p in peers if p.transport.alive]
        await crowd.rounds(8, [last])
        assert [settled.members for settled in last.settled[-3:]] == [1, 1, 1]
        assert all(settled.included for settled in last.settled[-3:])

    in_crowd(use)


def test_halves_that_lose_each_other_go_on_and_come_together_again():
    async def use(crowd):
        peers = await crowd.start(4)
        await crowd.rounds(6)
        mass, _ = kept(peers)
        one, two = peers[:2], peers[2:]
        crowd.network.partition([p.peer_id for p in one], [p.peer_id for p in two])
        for peer in one:
            peer.gossip.state.params_N.add_(0.5)  # the halves learn different things
        apart = spread(peers)
        before = {p.peer_id: len(p.met) for p in peers}
        await crowd.rounds(20)  # a third of the draws fall within a half
        assert all(len(p.met) > before[p.peer_id] for p in peers)
        crowd.network.heal()
        await crowd.rounds(12)
        assert spread(peers) < apart / 4
        assert kept(peers)[0] <= mass

    in_crowd(use, work=0.0)


def test_messages_that_are_lost_cost_a_round_at_most():
    """Lose a message of a stream, which stalls it."""

    async def use(crowd):
        peers = await crowd.start(4)
        start = spread(peers)
        crowd.network.default.drop = 0.01
        await crowd.rounds(30)
        assert sum(len(p.met) for p in peers) > 60
        assert spread(peers) < start / 2

    in_crowd(use, work=0.0)


# liars


def with_liar(tamper, *, rounds=6):
    """Run three peers, one of which lies; return the other two after some rounds."""
    came = {}

    async def use(crowd):
        peers = [crowd.add() for _ in range(3)]
        tamper(peers[0])
        for peer in peers:
            await peer.start()
        await crowd.rounds(rounds, peers[1:])
        came.update(honest=peers[1:], events=[e for p in peers[1:] for e in p.events])
        for peer in peers[1:]:
            assert bool(torch.isfinite(peer.gossip.state.params_N).all())

    in_crowd(use)
    return came


def spoil(change):
    """Change a peer's chunks before they are sent."""

    async def compute(function, *args):
        if getattr(function, "__func__", None) is not meeting.OutgoingVectors.encode:
            return function(*args)
        outgoing, frames = function.__self__, []
        while data := function():
            while data:
                end = 4 + int.from_bytes(data[:4], "little")
                frames, data = [*frames, data[:end]], data[end:]
        if not frames:  # all was sent
            return b""
        spoiled = b"".join(change(frames))
        outgoing._hash, outgoing.wire_bytes = hashlib.sha256(spoiled), len(spoiled)
        return spoiled

    return compute


def nan_cells(frames):
    """Return an intact fp32 frame, with its checksum, of a chunk with one NaN."""
    payload = torch.zeros(CELL)
    payload[-1] = torch.nan
    payload = payload.view(torch.uint8)
    head = Fp32()._sealed((CELL,), Checksum(payload))
    return [pack(head + bytes(payload.tolist())), *frames[1:]]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (nan_cells, "got nan"),
        (lambda frames: frames[:-1], "expected 4 chunks"),
        (lambda frames: [*frames, frames[-1]], "expected at most 4 chunks"),
        (lambda frames: [b"\xff\xff\xff\x7f" + frames[0][4:], *frames[1:]], "at most 262152"),
        (lambda frames: [frames[0][:-4], *frames[1:]], "checksum|codec number"),
    ],
    ids=["nan", "too-few", "too-many", "absurd-length", "cut-off"],
)
def test_wrong_cells_are_refused_and_their_sender_is_left_out(change, told):
    def tamper(peer):
        peer.ctx.compute = spoil(change)

    came = with_liar(tamper, rounds=12)
    assert any(re.search(told, event) for event in came["events"]), came["events"]
    assert any("banned for another" in event for event in came["events"])
    honest = came["honest"]
    assert all(any(s.members == 2 and s.included for s in p.settled) for p in honest)


def test_a_weight_that_does_not_follow_from_the_work_is_refused():
    def tamper(peer):
        peer.tamper = lambda window: replace(window, weight=1e12)

    came = with_liar(tamper, rounds=12)
    assert any("expected a weight of 128" in event for event in came["events"])
    assert any("banned for another" in event for event in came["events"])
    assert all(any(s.members == 2 and s.included for s in p.settled) for p in came["honest"])


def terms_of(peer, **changes):
    values = {
        "protocol": PROTOCOL,
        "round": peer.position,
        "exchange": b"x" * 16,
        "incarnation": "a",
        "mass": 1.0,
        "weight": 128.0,
        "tokens": 1280,
        "steps": 10,
        "uplink_mbit_s": 100.0,
        "patience_s": 0.0,
    }
    return Terms(**(values | changes))


def refused(message, *, twice=False):
    """Return a peer's answer to the first message of a stranger."""
    told = []

    async def use(crowd):
        peers = await crowd.start(2)
        stranger = crowd.network.transport("stranger")
        for _ in range(1 + twice):
            data = message(peers[0])
            async with await stranger.open(peers[0].peer_id, "gossip", timeout_s=5) as stream:
                await stream.send(data, timeout_s=5)
                try:
                    while await stream.recv(timeout_s=10) is not None:
                        pass
                except TransportError as error:
                    told.append(error.code if isinstance(error, Refused) else str(error))
        assert peers[0].gossip.mass == 1.0
        await crowd.rounds(2)
        assert all(p.met for p in peers)

    in_crowd(use)
    return told


def test_a_stranger_in_terms_is_refused_by_name():
    assert refused(lambda peer: b"rubbish") == [RefusalCode.BAD_MESSAGE]
    assert refused(lambda peer: tagged(TERMS, terms_of(peer, weight=1e12))) == [
        RefusalCode.BAD_MESSAGE
    ]
    assert refused(lambda peer: tagged(TERMS, terms_of(peer, protocol=99))) == [
        RefusalCode.PROTOCOL
    ]
    mass = tagged(TERMS, terms_of_unchecked(2.0))
    assert refused(lambda peer: mass) == [RefusalCode.BAD_MESSAGE]


def terms_of_unchecked(mass):
    fields = terms_of_fields(mass)
    return Terms.model_construct(**fields)


def terms_of_fields(mass):
    class Somebody:
        position = 0

    return terms_of(Somebody()).model_dump() | {"mass": mass}


def test_a_meeting_is_not_begun_twice():
    """A peer that was not drawn is refused; repeating the same meeting is a replay."""
    told = refused(lambda peer: tagged(TERMS, terms_of(peer)), twice=True)
    assert told[0] in (RefusalCode.TRAINING, RefusalCode.ELSEWHERE, RefusalCode.PAIRED)
    assert told[1] == RefusalCode.REPLAYED


def test_a_peer_that_was_frozen_for_minutes_goes_on_and_counts_once():
    """It adopts the others' count and keeps its weights and its mass."""

    async def use(crowd):
        peers = await crowd.start(4)
        await crowd.rounds(5)
        mass, _ = kept(peers)
        frozen = peers[2]
        await crowd.until(lambda: frozen.gossip._peer.meeting is None)
        crowd.network.freeze(frozen.peer_id)
        before = frozen.position
        await asyncio.sleep(180.0)
        assert min(p.position for p in peers if p is not frozen) > before + 15
        crowd.network.thaw(frozen.peer_id)
        met = len(frozen.met)
        await crowd.until(lambda: len(frozen.met) >= met + 3, 200)
        assert max(p.position for p in peers) - frozen.position <= 2
        assert kept(peers)[0] == pytest.approx(mass)
        torch.testing.assert_close(
            frozen.counted_N + frozen.drift_N, frozen.trained_N, rtol=0, atol=1e-5
        )

    in_crowd(use)


def test_one_invitation_of_a_peer_waits_at_a_time():
    async def use(crowd):
        peers = await crowd.start(2, window_s=30.0)
        stranger = crowd.network.transport("stranger")
        told = []
        streams = []
        for number in range(2):
            stream = await stranger.open(peers[0].peer_id, "gossip", timeout_s=5)
            streams.append(stream)
            terms = terms_of(peers[0], patience_s=60.0, exchange=bytes([number]) * 16)
            await stream.send(tagged(TERMS, terms), timeout_s=5)
        try:
            while await streams[1].recv(timeout_s=10) is not None:
                pass
        except Refused as error:
            told.append(error.code)
        assert told == [RefusalCode.PAIRED]
        for stream in streams:
            await stream.close()

    in_crowd(use)


def test_a_peer_that_is_ahead_names_its_round_in_a_record():
    came = []

    async def use(crowd):
        peers = await crowd.start(2)
        await crowd.until(lambda: peers[0].position >= 4)
        stranger = crowd.network.transport("stranger")
        late = tagged(TERMS, terms_of(peers[0], round=0, patience_s=60.0))
        async with await stranger.open(peers[0].peer_id, "gossip", timeout_s=5) as stream:
            await stream.send(late, timeout_s=5)
            try:
                while (message := await stream.recv(timeout_s=10)) is not None:
                    came.append(message)
            except Refused as error:
                came.append(error.code)

    in_crowd(use)
    records = [Ahead.decode(m[1:]) for m in came[:-1] if m[:1] == AHEAD]
    assert [record.round >= 4 for record in records] == [True]
    assert came[-1] is RefusalCode.AHEAD


@pytest.mark.parametrize("round_", [-1, True, 2**63, "4", 4.5])
def test_a_round_that_is_no_count_is_malformed(round_):
    forged = msgpack.packb({"round": round_})
    with pytest.raises(MalformedRecord):
        Ahead.decode(forged)
