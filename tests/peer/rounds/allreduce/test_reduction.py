"""An owner's arithmetic: prefixes, weights, clipping, and what it refuses."""

import math
import struct
import threading

import pytest
import torch

from atoll.compression import CodecError, parse
from atoll.optim.log.entry import MalformedRecord, Member
from atoll.optim.reduction.cells import LENGTH, Cells, body_of, pack, unpack
from atoll.optim.reduction.robust import REDUCERS, rule_of
from atoll.optim.state.layout import CELL
from atoll.peer.rounds.allreduce.reduction import (
    CellRefused,
    FrameBuffer,
    Norms,
    PartRange,
    PartReducer,
    Share,
    batches,
    split_frames,
)
from atoll.peer.rounds.messages import PACED_BYTES, PIECE_BYTES, Group
from support.swarm import identity_of

CODEC = parse("int8")
NUMEL = 3 * CELL + 100
CELLS = Cells.of_vector(CODEC, NUMEL)
PART = PartRange(start_cell=1, stop_cell=4, cells=CELLS)
PEER = identity_of(0).peer_id
LIMITS = [PART.max_sent_bytes(i) for i in range(PART.num_cells)]


def vector(seed, scale=1.0):
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed)) * scale


def frames_of(x_N, part=PART):
    return part.cells.encode(x_N)[part.start_cell : part.stop_cell]


def decoded(frames, part=PART):
    cells = enumerate(frames, part.start_cell)
    return torch.cat([part.cells.decode_sent(i, frame) for i, frame in cells])


def sent(owner):
    """What the owner's packed frames decode to."""
    return decoded(unpack(memoryview(b"".join(owner.frames)), LIMITS))


def share(weight=1.0, clip=1.0, norm=1e6):
    return Share(weight=weight, clip=clip, norm=norm)


def reducer(**shares):
    return PartReducer(part=PART, shares={int(name[1:]): s for name, s in shares.items()})


def test_the_weighted_mean_is_encoded_once_and_its_loss_is_credited():
    owner = reducer(m0=share(1.0), m1=share(3.0, clip=0.5))
    inputs = [frames_of(vector(0)), frames_of(vector(1))]
    for index in range(PART.num_cells):
        owner.add(0, inputs[0][index])
        assert owner.advance() == (index > 0)
        owner.add(1, inputs[1][index])
        owner.advance()
        assert len(owner.frames) == index + 1
    mean_N = (decoded(inputs[0]) + 3 * 0.5 * decoded(inputs[1])) / 4
    sent_N = sent(owner)
    assert torch.allclose(sent_N, mean_N, atol=float(mean_N.abs().max()) / 200)
    assert torch.allclose(owner.credit_N, (mean_N - sent_N) * 4, atol=1e-4)
    body, done = owner.done(5, 1)
    assert len(body) == done.wire_bytes == PART.max_bytes(members=2)
    assert done.partial == ()


def test_a_member_that_stalls_counts_with_the_cells_that_came():
    owner = reducer(m0=share(), m1=share())
    mine, other = frames_of(vector(0)), frames_of(vector(1))
    for frame in mine:
        owner.add(0, frame)
    owner.add(1, other[0])
    owner.advance()
    assert len(owner.frames) == 1
    owner.drop(1)
    owner.advance()
    assert owner.finished
    _, done = owner.done(0, 0)
    assert [(p.member, p.cells) for p in done.partial] == [(1, 1)]
    alone = decoded(mine)[CELL:]
    assert torch.allclose(sent(owner)[CELL:], alone, atol=float(alone.abs().max()) / 100)


def test_a_part_that_nobody_sends_is_zero():
    owner = reducer()
    owner.advance()
    assert owner.finished
    assert not sent(owner).any()


def test_a_norm_above_the_declared_one_is_refused():
    owner = reducer(m0=share(norm=1.0))
    with pytest.raises(CellRefused, match="norm of at most 1"):
        owner.add(0, frames_of(vector(0))[0])


def test_a_norm_is_that_of_all_parts_of_an_owner():
    frames, declared = frames_of(vector(0)), float(vector(0)[PART.values].norm())
    norms = Norms()
    first, second = (
        PartReducer(part=PART, shares={0: share(norm=declared)}, norms=norms) for _ in range(2)
    )
    for frame in frames:
        first.add(0, frame)
    with pytest.raises(CellRefused, match="norm of at most"):
        second.add(0, frames[0])


def test_norms_of_two_threads_add_up():
    norms = Norms()

    def count():
        for _ in range(20_000):
            norms.add(3, 0, 1.0)

    threads = [threading.Thread(target=count) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert norms.add(3, 0, 9.0) == math.sqrt(40_009)
    assert norms.add(3, 1, 4.0) == 2.0


def long_and_short():
    """Frames of which the second is longer than a message may be."""
    sizes = (1_000, (1 << 20) + 5, 10, 2_000)
    frames = [bytes([index]) * size for index, size in enumerate(sizes)]
    return frames, sizes


def test_a_long_frame_travels_in_pieces():
    frames, sizes = long_and_short()
    messages = list(batches(map(pack, frames), PACED_BYTES))
    assert max(map(len, messages)) <= PACED_BYTES
    buffer, came = FrameBuffer(sizes), []
    for message in messages:
        came += [bytes(frame) for frame in buffer.feed(memoryview(message))]
    assert came == frames


def test_a_long_frame_holds_nothing_else():
    frames, sizes = long_and_short()
    buffer, data = FrameBuffer(sizes[1:]), pack(frames[1])
    assert buffer.feed(memoryview(data[:PIECE_BYTES])) == []
    with pytest.raises(CellRefused, match="expected"):
        buffer.feed(memoryview(data[PIECE_BYTES:] + b"\1"))


def test_a_frame_that_claims_more_than_it_may_is_refused_before_it_comes():
    buffer = FrameBuffer([100])
    with pytest.raises(CellRefused, match="at most 100"):
        buffer.feed(memoryview(LENGTH.pack(1 << 31) + bytes(50)))


def group_of_one(**changes):
    fields = {"weight": 128.0, "clip": 1.0, "norm": 1e300, "tokens": 1280, "steps": 10}
    member = Member(peer_id=PEER, incarnation="f" * 32, loss=None, **(fields | changes))
    return Group(
        epoch=1, position=2, term=0, members=(member,), parts=(), stall_s=1.5, deadline_s=60.0
    )


def test_a_weight_that_fp32_does_not_hold_is_no_groups():
    group = group_of_one()
    assert Group.decode(group.encode()) == group
    for weight in (1e300, 1e-60, 128.0 + 2**-30):
        lie = group.encode().replace(struct.pack(">d", 128.0), struct.pack(">d", weight))
        with pytest.raises(MalformedRecord, match="weight"):
            Group.decode(lie)
    with pytest.raises(ValueError, match="clip"):
        group_of_one(clip=1.01)


def test_one_cell_too_many_is_refused():
    owner = reducer(m0=share())
    frames = frames_of(vector(0))
    for frame in frames:
        owner.add(0, frame)
    with pytest.raises(CellRefused, match="one more"):
        owner.add(0, frames[0])


def test_a_damaged_cell_is_refused():
    frame = bytearray(frames_of(vector(0))[0])
    frame[-1] ^= 1
    with pytest.raises(CodecError):
        reducer(m0=share()).add(0, bytes(frame))


def test_a_dropped_member_adds_nothing():
    owner = reducer(m0=share())
    owner.drop(0)
    owner.add(0, b"anything")
    assert owner.arrived(0) == 0


def test_frames_travel_in_messages_and_come_apart_again():
    frames = frames_of(vector(0))
    messages = list(batches([pack(frame) for frame in frames], 2 * len(pack(frames[0]))))
    assert len(messages) == 2
    first = split_frames(memoryview(messages[0]), LIMITS)
    second = split_frames(memoryview(messages[1]), LIMITS[2:])
    assert [bytes(f) for f in first + second] == frames


@pytest.mark.parametrize("cut", [1, 1000])
def test_a_message_that_ends_within_a_cell_is_refused(cut):
    message = body_of(frames_of(vector(0)))[:-cut]
    with pytest.raises(CellRefused):
        split_frames(memoryview(message), LIMITS)


def test_a_message_with_more_cells_than_the_part_is_refused():
    frames = frames_of(vector(0))
    with pytest.raises(CellRefused, match="got more"):
        split_frames(memoryview(body_of([*frames, frames[-1]])), LIMITS)


def liars_among_eight(rule):
    """A part of eight members of which two send ten times the opposite; and the honest mean."""
    honest_MN = [vector(0) + vector(seed, 0.3) for seed in range(1, 7)]
    rows_MN = [*honest_MN, -10 * honest_MN[0], -10 * honest_MN[1]]
    shares = dict.fromkeys(range(8), share())
    owner = PartReducer(part=PART, shares=shares, rule=rule)
    for member, row_N in enumerate(rows_MN):
        for frame in frames_of(row_N):
            owner.add(member, frame)
    assert owner.advance()
    return owner, torch.stack(honest_MN).mean(dim=0)[PART.values]


@pytest.mark.parametrize("name", REDUCERS)
def test_an_owner_with_a_robust_rule_keeps_liars_out(name):
    owner, honest_N = liars_among_eight(rule_of(name))
    error = float((sent(owner) - honest_N).norm() / honest_N.norm())
    assert (error < 0.5) == (name != "mean")
    assert (owner.rejected > 1.0) == (name != "mean")
    assert not owner._held


def test_a_robust_rule_takes_the_members_that_came():
    shares = dict.fromkeys(range(3), share())
    owner = PartReducer(part=PART, shares=shares, rule=rule_of("median"))
    frames = frames_of(vector(1))
    for member, count in ((0, 3), (1, 3), (2, 1)):
        for frame in frames[:count]:
            owner.add(member, frame)
    owner.drop(2)
    assert owner.advance()
    assert owner.finished
    assert torch.allclose(sent(owner), vector(1)[PART.values], atol=0.05)
