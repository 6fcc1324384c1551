"""PowerSGD in rounds: two exchanges under one entry, with faults in both."""

import dataclasses

import pytest
import torch

from atoll.compression import CodecError, Fp32, Int8
from atoll.compression.powersgd import orthonormal
from atoll.dht.testing.virtualtime import run_virtual
from atoll.optim import methods
from atoll.optim.inprocess.rounds import LowRankReduction
from atoll.optim.log.entry import Entry
from atoll.optim.log.replay import Replay
from atoll.optim.reducer import Contribution
from atoll.optim.reduction.cells import pack, unpack
from atoll.optim.reduction.lowrank import Factors, LowRankCells, rank_of, warm_numel
from atoll.optim.state.layout import Layout
from atoll.peer.rounds.allreduce.factors import FactorReceiver, FactorReducer, answers, first_frames
from atoll.peer.rounds.allreduce.reduction import CellRefused, Norms, PartRange, Share
from atoll.peer.rounds.allreduce.sides import ExchangeState
from support.strikes import KINDS, Strike, run_strike
from support.swarm import Swarm

LAYOUT = Layout(
    names=("embed", "bias", "conv", "head", "thin"),
    shapes=((60, 40), (33,), (24, 5, 10), (32, 48), (3, 5)),
)
METHOD = "ddp(codec=powersgd(rank=2))"


def input_of(swarm, peer, entry):
    """What a peer had to give at a position, with what came back of earlier losses; F values."""
    position = entry.position
    numbers = [s.settles for s in peer.settled if s.applied.entry.position == position]
    known = bool(numbers) and numbers[0] is not None
    offer = peer.handed_in[numbers[0] - 1 if known else -1]
    cells = swarm.replay.cells_at(position)
    return torch.cat([cells.decode_sent(i, frame) for i, frame in enumerate(offer.frames)])


def projected(cells, index, frame, mean_C):
    """P P^T M for the P that an entry's cell holds; M itself where there is none."""
    rank = cells.ranks[index]
    if not rank:
        return mean_C
    p = cells.first.decode_sent(index, cells.split(index, frame)[0]).view(-1, rank)
    torch.testing.assert_close(p.T @ p, torch.eye(rank), rtol=0.0, atol=1e-5)
    return (p @ (p.T @ mean_C.view(len(p), -1))).view(-1)


def expect_projections(swarm, witness):
    """Every update is the mean of what its members brought, projected on the P of the entry."""
    store, seen = witness.replica.store, 0
    for record in store.headers(0, witness.replica.position):
        entry = Entry.decode(record.entry)
        if entry.kind == "null":
            continue
        cells = swarm.replay.cells_at(entry.position)
        body = store.body(entry.position)
        update_F = swarm.replay.decode(entry, body)
        frames = unpack(memoryview(body), [cells.max_sent_bytes(i) for i in range(len(cells))])
        brought = {p.ctx.me: input_of(swarm, p, entry) for p in swarm.peers}
        for index, cell in enumerate(cells.fragment.slices):
            sum_C, weight = torch.zeros(cell.stop - cell.start), 0.0
            for member in entry.members:
                included = entry.included_cells(member.peer_id, member.incarnation)
                if member.weight and included is not None and included[index]:
                    sum_C += brought[member.elector][cell] * (member.weight * member.clip)
                    weight += member.weight
            mean_C = sum_C / weight if weight else sum_C
            expected_C = projected(cells, index, frames[index], mean_C)
            torch.testing.assert_close(update_F[cell], expected_C, rtol=1e-4, atol=1e-6)
            seen += 1
    assert seen >= 3 * len(LAYOUT.shapes)


@pytest.mark.parametrize("message", range(3, 80, 16))
def test_a_fault_at_one_of_sixteen_messages(tmp_path, message):
    """Members and owners die, freeze and are cut off, in P and in Q: what counts is who is in Q."""
    kind, end = KINDS[message % len(KINDS)]
    took_s = run_strike(
        tmp_path,
        3,
        lambda swarm: Strike(swarm, kind, message, end),
        expect=expect_projections,
        method=METHOD,
        codec=None,
        layout=LAYOUT,
    )
    assert took_s is not None


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("kind", "end"), KINDS)
def test_a_fault_at_every_message(tmp_path, kind, end):
    struck = 0
    for message in range(1, 140):
        took_s = run_strike(
            tmp_path / str(message),
            3,
            lambda swarm, at=message: Strike(swarm, kind, at, end),
            expect=expect_projections,
            method=METHOD,
            codec=None,
            layout=LAYOUT,
        )
        if took_s is None:
            break
        struck += 1
    assert 60 < struck < 139


@pytest.mark.parametrize(("rank", "peers"), [(1, 3), (2, 4), (4, 2)])
def test_rounds_equal_the_process_within_rounding(tmp_path, rank, peers):
    """Three rounds, of which the later ones begin with a warm Q and what came back."""

    async def scenario():
        swarm = Swarm(
            tmp_path, layout=LAYOUT, method=f"diloco(codec=powersgd(rank={rank}))", codec=None
        )
        members = await swarm.start(peers)
        begun = members[0].replica.state
        await swarm.until(lambda: all(p.replica.position >= 3 for p in members))
        assert swarm.same_bits(members)
        store, method = members[0].replica.store, swarm.replay.method
        (fragment,) = swarm.replay.fragments
        alone = LowRankReduction(method, LAYOUT, fragment, peers)
        state = begun
        for record in store.headers(0, 3):
            entry, body = Entry.decode(record.entry), store.body(record.position)
            update_F = swarm.replay.decode(entry, body)
            contributions = [
                Contribution(
                    window=0, delta=p.offers[entry.position], tokens=1280, steps=10, loss=2.0
                )
                for p in members
            ]
            reduced = alone.reduce(contributions, alone.weights(contributions), state)
            error = (reduced.update_F - update_F).norm() / update_F.norm()
            assert error < 1e-4
            state = swarm.replay.next_state(state, entry, body)
        await swarm.stop()

    run_virtual(scenario())


def test_a_tensor_longer_than_a_message_travels_in_pieces(tmp_path):
    """1.7 MB for the one that is sent whole; a message has at most 1 MiB."""
    large = Layout(names=("whole", "factors"), shapes=((600, 700), (300_000, 3, 4)))

    async def scenario():
        swarm = Swarm(tmp_path, layout=large, method="ddp(codec=powersgd(rank=200))", codec=None)
        cells = swarm.replay.cells_at(0)
        assert cells.ranks == (0, 0)
        assert min(cells.sizes) > 1 << 20
        members = await swarm.start(3)
        await swarm.until(lambda: all(p.replica.position >= 1 for p in members))
        assert swarm.same_bits(members)
        assert all(s.included is not None for p in members for s in p.settled)
        await swarm.stop()

    run_virtual(scenario())


def test_errors_and_updates_add_up_to_what_was_learned(tmp_path):
    async def scenario():
        swarm = Swarm(tmp_path, layout=LAYOUT, method=METHOD, codec=None)
        members = await swarm.start(3)
        await swarm.until(lambda: all(len(p.settled) >= 4 for p in members))
        for peer in members:
            (feedback,) = peer.feedbacks
            weight = peer.handed_in[0].weight
            settled = [s for s in peer.settled if s.included is not None]
            applied_F = torch.stack([s.applied.update_F for s in settled]).sum(dim=0)
            given_F = torch.stack([peer.offers[s.applied.entry.position] for s in settled]).sum(
                dim=0
            )
            torch.testing.assert_close(
                feedback.mass_N / weight, given_F - applied_F, rtol=1e-3, atol=1e-5
            )
        await swarm.stop()

    run_virtual(scenario())


BAD = {
    "nan": lambda frame, shape: nan_frame(shape),
    "wrong shape": lambda frame, shape: Fp32().encode(torch.ones(shape[1], shape[0])),
    "too loud": lambda frame, shape: Fp32().encode(torch.full(shape, 1e6)),
}


@pytest.mark.parametrize(
    ("how", "exchange"),
    [
        ("nan", "my_codes"),
        ("wrong shape", "answers"),
        ("too loud", "my_codes"),
        pytest.param("nan", "answers", marks=pytest.mark.exhaustive),
        pytest.param("wrong shape", "my_codes", marks=pytest.mark.exhaustive),
        pytest.param("too loud", "answers", marks=pytest.mark.exhaustive),
    ],
)
def test_who_sends_a_bad_factor_is_left_out_and_named(tmp_path, monkeypatch, exchange, how):
    """In P or in Q, to all owners; the others' matrices are projected without it."""
    honest = getattr(ExchangeState, exchange)
    shape = (60, 2) if exchange == "my_codes" else (40, 2)

    async def scenario():
        swarm = Swarm(tmp_path, layout=LAYOUT, method=METHOD, codec=None)
        liar = swarm.add()
        others = [swarm.add() for _ in range(3)]

        async def lie(self, part, *given):
            frames = list(await honest(self, part, *given))
            first = self.group.parts[part].start_cell + (given[0] if given else 0)
            if self.ctx is liar.ctx and first == 0:
                frames[0] = BAD[how](frames[0], shape)
            return frames

        monkeypatch.setattr(ExchangeState, exchange, lie)
        await swarm.begin(swarm.peers)
        await swarm.until(lambda: all(p.replica.position >= 3 for p in others))
        first = next(s for s in liar.settled if s.applied.entry.position == 0)
        assert first.included is not None and not first.included[0]
        assert first.included[-1]
        told = [e for p in others for e in p.events if "bad-cell" in e]
        assert told and all(liar.identity.peer_id[-6:] in e for e in told)
        await swarm.until(lambda: len({p.replica.position for p in others}) == 1)
        assert swarm.same_bits(others)
        expect_projections(swarm, others[0])
        await swarm.stop()

    run_virtual(scenario())


# the arithmetic of one part

CELLS = LowRankCells(
    codec=methods.parse(METHOD).codec, fragment=methods.parse(METHOD).fragments(LAYOUT)[0]
)
PART = PartRange(start_cell=0, stop_cell=len(CELLS), cells=CELLS)


def genesis():
    return methods.parse(METHOD).genesis(LAYOUT, torch.zeros(LAYOUT.numel))


def values(seed):
    return torch.randn(LAYOUT.numel, generator=torch.Generator().manual_seed(seed))


def factors_of(seed):
    return Factors(CELLS, genesis(), CELLS.encode(values(seed)))


def reducer(*seeds, norm=None):
    shares = {
        seed: Share(weight=1.0, clip=1.0, norm=float(values(seed).norm()) if norm is None else norm)
        for seed in seeds
    }
    return FactorReducer(part=PART, cells=CELLS, shares=shares, norms=Norms())


def feed_first(owner, *seeds):
    for seed in seeds:
        owner.add_all(seed, first_frames(factors_of(seed), 0, len(CELLS)))
    owner.advance()
    return [frame[4:] for frame in owner.frames[: len(CELLS)]]


def test_what_is_sent_whole_has_no_rank():
    assert [rank_of(dims, 2) for dims in LAYOUT.shapes] == [2, 0, 2, 2, 0]
    assert warm_numel(LAYOUT, 2) == 2 * (40 + 50 + 48)
    assert rank_of((60, 40), 20) == 0


def test_owner_sends_no_q_before_every_p():
    owner = reducer(1, 2)
    feed_first(owner, 1)
    assert owner.frames == []
    p_frames = feed_first(owner, 2)
    assert len(p_frames) == len(CELLS)
    assert owner.waiting_for == {1, 2}
    assert not owner.finished


def test_a_member_that_dies_between_p_and_q_is_in_no_cell():
    owner = reducer(1, 2)
    p_frames = feed_first(owner, 1, 2)
    owner.add_all(1, answers(factors_of(1), 0, p_frames))
    owner.drop(2)
    owner.advance()
    body, done = owner.done(0, 0)
    assert owner.finished
    assert [(p.member, p.cells) for p in done.partial] == [(2, 0)]
    for index, cell in enumerate(CELLS.fragment.slices):
        frame = unpack(memoryview(body), [1 << 20] * len(CELLS))[index]
        expected = projected(CELLS, index, frame, values(1)[cell])
        torch.testing.assert_close(owner.decoded_N[cell], expected, rtol=1e-4, atol=1e-5)


def test_a_receiver_ends_with_the_owners_bytes_and_values():
    owner = reducer(1)
    p_frames = feed_first(owner, 1)
    receiver = FactorReceiver(part=PART, cells=CELLS)
    assert receiver.take(memoryview(b"".join(owner.frames))) == p_frames
    owner.add_all(1, answers(factors_of(1), 0, p_frames))
    owner.advance()
    assert receiver.take(memoryview(b"".join(owner.frames[len(CELLS) :]))) == []
    body, done = owner.done(0, 0)
    assert receiver.finish(done) == body
    assert torch.equal(receiver.decoded_N, owner.decoded_N)


def test_other_bytes_than_the_owner_names_are_refused():
    owner = reducer(1)
    p_frames = feed_first(owner, 1)
    receiver = FactorReceiver(part=PART, cells=CELLS)
    receiver.take(memoryview(b"".join(owner.frames)))
    owner.add_all(1, answers(factors_of(1), 0, p_frames))
    owner.advance()
    _, done = owner.done(0, 0)
    with pytest.raises(CellRefused, match="expected 10 frames, got 5"):
        receiver.finish(done)
    receiver.take(memoryview(b"".join(owner.frames[len(CELLS) :])))
    with pytest.raises(CellRefused, match="owner reported"):
        receiver.finish(done.model_copy(update={"digest": bytes(32)}))


def nan_frame(shape):
    frame = bytearray(Fp32().encode(torch.ones(shape)))
    frame[-4:] = b"\x00\x00\xc0\x7f"
    return bytes(frame)


@pytest.mark.parametrize(
    "frame",
    [
        Fp32().encode(torch.ones(60, 3)),
        Fp32().encode(torch.ones(60, 2))[:-1],
        Int8().encode(torch.ones(60, 2)),
        b"",
        nan_frame((60, 2)),
    ],
    ids=["wrong shape", "cut off", "other codec", "empty", "nan"],
)
def test_a_bad_factor_is_refused(frame):
    with pytest.raises(CodecError):
        reducer(1).add_all(1, [frame])
    with pytest.raises((CodecError, CellRefused)):
        FactorReceiver(part=PART, cells=CELLS).take(memoryview(pack(frame)))


def test_a_second_factor_of_a_wrong_shape_is_refused():
    owner = reducer(1)
    feed_first(owner, 1)
    with pytest.raises(CodecError):
        owner.add_all(1, [CELLS.first.codec.encode(torch.ones(60, 2))])


def test_more_frames_than_a_part_has_are_refused():
    owner = reducer(1)
    q_frames = answers(factors_of(1), 0, feed_first(owner, 1))
    owner.add_all(1, q_frames)
    with pytest.raises(CellRefused, match="one more"):
        owner.add_all(1, q_frames[:1])


def test_norms_are_checked_in_both_exchanges():
    norm = float(values(1).norm())
    owner = reducer(1, norm=norm)
    owner.add_all(1, answers(factors_of(1), 0, feed_first(owner, 1)))
    owner.advance()
    assert owner.finished
    with pytest.raises(CellRefused, match="norm of at most"):
        feed_first(reducer(1, norm=norm / 20), 1)
    late = reducer(1, norm=norm)
    feed_first(late, 1)
    loud = [CELLS.second.codec.encode(torch.full((40, 2), norm))]
    with pytest.raises(CellRefused, match="norm of at most"):
        late.add_all(1, loud)


def test_q_stays_where_nothing_was_learned():
    replay = Replay(methods.parse(METHOD), LAYOUT)
    cells, before = replay.cells_at(0), genesis()
    after = before.next_blank()
    qs = [torch.zeros_like(q) for q in cells.warm(before)]
    qs[1].fill_(3.0)
    cells.put_warm(before, after, qs)
    assert torch.equal(cells.warm(after)[0], cells.warm(before)[0])
    assert bool((cells.warm(after)[1] == 3.0).all())


def test_members_of_the_first_exchange_make_a_basis():
    owner = reducer(1, 2)
    p_frames = feed_first(owner, 1, 2)
    q = orthonormal(CELLS.warm(genesis())[0])
    mean = (values(1) + values(2))[:2400].view(60, 40) / 2
    p = CELLS.first.decode_sent(0, p_frames[0]).view(60, 2)
    torch.testing.assert_close(p @ (p.T @ (mean @ q)), mean @ q, rtol=1e-4, atol=1e-4)


def test_bodies_are_as_long_as_shapes_say():
    assert CELLS.max_body_bytes(3) == CELLS.max_body_bytes(99) < 4 * LAYOUT.numel
    with pytest.raises(CodecError, match="expected factors of"):
        CELLS.split(0, bytes(10))


def test_other_codecs_have_no_factors():
    with pytest.raises(CodecError, match="expected powersgd"):
        dataclasses.replace(CELLS, codec=Int8())
