"""Reduced cells at members that do not own them: checked, decoded and hashed as they come."""

import hashlib

import pytest
import torch

from atoll.compression import CodecError, parse
from atoll.optim.reduction.cells import Cells, body_of, pack
from atoll.optim.state.layout import CELL
from atoll.peer.rounds.allreduce.reduction import (
    CellRefused,
    PartRange,
    PartReceiver,
    PartReducer,
    Share,
)
from atoll.peer.rounds.allreduce.sides import Arrival, accumulate

CODEC = parse("int8")
NUMEL = 2 * CELL + 100
PART = PartRange(start_cell=0, stop_cell=3, cells=Cells.of_vector(CODEC, NUMEL))
SHARE = Share(weight=1.0, clip=1.0, norm=1e9)


def frames(seed=0):
    x_N = torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))
    return PART.cells.encode(x_N)


def reduced(*members):
    reducer = PartReducer(part=PART, shares={m: SHARE for m in members})
    for member in members:
        reducer.add_all(member, frames(member))
    reducer.advance()
    return reducer


def receive(messages):
    receiver = PartReceiver(part=PART, members=2)
    for message in messages:
        receiver.take(memoryview(message))
    return receiver


def test_a_receiver_ends_with_the_owners_bytes_and_values():
    reducer = reduced(0, 1)
    body, done = reducer.done(0, 0)
    receiver = receive([reducer.frames[0] + reducer.frames[1], reducer.frames[2]])
    assert receiver.finish(done) == body
    assert done.digest == hashlib.sha256(body).digest()
    assert torch.equal(receiver.decoded_N, reducer.decoded_N)


def test_bytes_of_another_part_are_refused_at_the_end():
    _, done = reduced(0).done(0, 0)
    with pytest.raises(CellRefused, match="digest that its owner reported"):
        receive([pack(frame) for frame in frames(5)]).finish(done)


def test_a_part_that_ends_early_is_refused():
    reducer = reduced(0)
    _, done = reducer.done(0, 0)
    with pytest.raises(CellRefused):
        receive(reducer.frames[:2]).finish(done)


def test_a_cell_too_many_is_refused():
    with pytest.raises(CellRefused, match="got more"):
        receive([pack(frame) for frame in [*frames(), frames()[0]]])


def test_a_damaged_cell_is_refused_when_it_comes():
    damaged = bytearray(pack(frames()[0]))
    damaged[-1] ^= 1
    with pytest.raises(CodecError):
        receive([bytes(damaged)])


def test_the_error_of_one_member_spares_the_others_of_its_batch():
    reducer = PartReducer(part=PART, shares={0: SHARE, 1: SHARE})
    bad = Arrival(member=0, cells=memoryview(pack(frames()[0])[:-1]))
    good = Arrival(member=1, cells=memoryview(body_of(frames(1))))
    accumulate(reducer, [bad, good])
    assert isinstance(bad.error, CellRefused)
    assert good.error is None
    assert reducer.waiting_for == {0}
