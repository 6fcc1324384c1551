"""Messages of many cells: the owner takes and encodes them at once, as it would one by one."""

import pytest
import torch

from atoll.compression import CodecError, parse
from atoll.optim.reduction.cells import Cells, pack
from atoll.optim.state.layout import CELL
from atoll.optim.state.updates import dense
from atoll.peer.rounds.allreduce.reduction import (
    CellRefused,
    PartRange,
    PartReceiver,
    PartReducer,
    Share,
)
from atoll.peer.rounds.allreduce.sides import Arrival, accumulate

NUMEL = 21 * CELL + 100
CELLS = Cells.of_vector(parse("topk+2bit"), NUMEL)
PART = PartRange(start_cell=1, stop_cell=22, cells=CELLS)
SHARES = {0: Share(weight=2.0, clip=1.0, norm=1e9), 1: Share(weight=1.0, clip=0.5, norm=1e9)}


def frames(seed):
    x_N = torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))
    return CELLS.encode(x_N)[PART.start_cell :]


def message(cells):
    return memoryview(b"".join(pack(frame) for frame in cells))


def one_by_one(*, missing=0):
    """An owner that is given cell after cell; the last ones of member 1 never come."""
    owner = PartReducer(part=PART, shares=SHARES)
    for member in SHARES:
        for frame in frames(member)[: PART.num_cells - missing * member]:
            owner.add(member, frame)
            owner.advance()
    owner.drop(1)
    owner.advance()
    return owner


@pytest.mark.parametrize("missing", [0, 5])
def test_messages_are_the_cells_in_them(missing):
    owner = PartReducer(part=PART, shares=SHARES)
    for at in range(0, PART.num_cells, 9):
        for member in SHARES:
            cells = frames(member)[: PART.num_cells - missing * member][at : at + 9]
            owner.add_all(member, message(cells) if cells else [])
        owner.advance()
    owner.drop(1)
    owner.advance()
    expected = one_by_one(missing=missing)
    assert owner.frames == expected.frames
    assert owner.done(0, 0) == expected.done(0, 0)
    assert torch.equal(dense(owner.credit_N), dense(expected.credit_N))
    assert torch.equal(dense(owner.decoded_N), dense(expected.decoded_N))


def test_a_receiver_decodes_messages_of_many_cells():
    owner = one_by_one()
    body, done = owner.done(0, 0)
    receiver = PartReceiver(part=PART, members=2)
    for at in range(0, PART.num_cells, 10):
        receiver.take(memoryview(b"".join(owner.frames[at : at + 10])))
    assert receiver.finish(done) == body
    assert torch.equal(dense(receiver.decoded_N), dense(owner.decoded_N))


def test_cells_decoded_together_with_a_bad_cell_do_not_count():
    owner, cells = PartReducer(part=PART, shares=SHARES), frames(0)
    broken = bytearray(cells[5])
    broken[-1] ^= 1
    arrivals = [
        Arrival(member=0, cells=message(cells[:3])),
        Arrival(member=0, cells=message([*cells[3:5], bytes(broken), cells[6]])),
    ]
    accumulate(owner, arrivals)
    assert arrivals[0].error is None
    assert isinstance(arrivals[1].error, CodecError)
    assert owner.arrived(0) == 3


def test_cells_that_nobody_sent_are_zero():
    owner = PartReducer(part=PART, shares=SHARES)
    owner.add_all(0, message(frames(0)[:3]))
    for member in SHARES:
        owner.drop(member)
    assert owner.advance()
    assert owner.finished
    rest = slice(PART.cell(3).start, None)
    assert not dense(owner.decoded_N)[rest].any()
    assert not dense(owner.credit_N)[rest].any()


def test_a_message_that_brings_the_norm_above_the_declared_one_is_refused():
    norm = float(torch.cat([CELLS.decode_sent(i, f) for i, f in enumerate(frames(0), 1)]).norm())
    shares = {0: Share(weight=1.0, clip=1.0, norm=norm / 2)}
    owner, cells = PartReducer(part=PART, shares=shares), frames(0)
    owner.add_all(0, message(cells[:3]))
    with pytest.raises(CellRefused, match="norm"):
        owner.add_all(0, message(cells[3:]))
    assert owner.arrived(0) == 3
