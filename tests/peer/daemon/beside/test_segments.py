"""Memory that two processes share: lent, returned, used again, and never left behind."""

import gc
import os
import socket

import pytest
import torch

from atoll.optim.state import mapped, vectors
from atoll.optim.state.mapped import MappedVectors
from atoll.peer.daemon.beside.channel import Channel
from atoll.peer.daemon.beside.segments import INLINE_BYTES, Segment, segment_of

LONG = vectors.LONG


def sent(ends, tensor):
    """The tensor as the other end gets it."""
    ends[0].send("tensor", tensor)
    _, (got,) = ends[1].receive()
    return got


def deliver_notices(here, there):
    """Let one end know what the other has dropped."""
    gc.collect()
    here.send_notices()
    there.receive()


def test_a_long_vector_is_lent_without_a_copy(ends):
    mine = vectors.empty(LONG).fill_(1.0)
    theirs = sent(ends, mine)
    mine[7] = 2.0
    assert theirs[7] == 2.0 and torch.equal(theirs, mine)
    assert theirs.data_ptr() != mine.data_ptr()  # mapped a second time


def test_a_vector_in_a_file_is_lent_without_a_copy(ends, tmp_path, monkeypatch):
    monkeypatch.setattr(mapped, "IN_MEMORY", ())  # the tests' folder may lie there
    gc.collect()  # of other tests
    before = len(os.listdir("/dev/fd"))
    mine = MappedVectors(tmp_path, Segment.of_file).empty(LONG).fill_(1.0)
    theirs = sent(ends, mine)
    mine[7] = 2.0
    assert theirs[7] == 2.0 and torch.equal(theirs, mine)
    del mine, theirs
    deliver_notices(ends[1], ends[0])
    assert ends[0].tensors.lent == 0
    deliver_notices(ends[0], ends[1])
    assert len(os.listdir("/dev/fd")) == before


def test_a_part_of_a_vector_is_lent_with_its_place(ends):
    mine = torch.arange(2.0 * LONG, out=vectors.empty(2 * LONG))
    theirs = sent(ends, mine[100 : LONG + 100])
    assert torch.equal(theirs, mine[100 : LONG + 100])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (INLINE_BYTES + 1, 2)])
def test_tensors_of_every_kind_arrive(ends, dtype, shape):
    mine = torch.ones(shape).to(dtype)
    theirs = sent(ends, mine)
    assert (theirs.dtype, theirs.shape) == (dtype, torch.Size(shape))
    assert torch.equal(theirs, mine)


def test_a_tensor_with_gaps_is_copied(ends):
    mine = vectors.empty(2 * LONG).fill_(3.0)
    theirs = sent(ends, mine[::2])
    assert torch.equal(theirs, mine[::2]) and theirs.is_contiguous()


def test_what_is_lent_is_kept_until_it_comes_back(ends):
    mine, (lender, borrower) = vectors.empty(LONG).fill_(1.0), ends
    address = mine.data_ptr()
    theirs = sent(ends, mine)
    part = theirs[:10]
    del mine, theirs
    assert vectors.empty(LONG).data_ptr() != address  # `part` still reads it
    del part
    deliver_notices(borrower, lender)
    assert lender.tensors.lent == 0
    taken = [vectors.empty(LONG) for _ in range(8)]
    assert address in {each.data_ptr() for each in taken}


def test_what_is_lent_back_is_the_lenders_own_memory(ends):
    mine = vectors.empty(LONG).fill_(1.0)
    theirs = sent(ends, mine)
    ends[1].send("back", theirs[5:])
    _, (again,) = ends[0].receive()
    mine[5] = 9.0
    assert again[0] == 9.0 and segment_of(again) is segment_of(mine)


def test_what_one_process_has_lent_is_copied_for_a_third(ends):
    theirs = sent(ends, vectors.empty(LONG).fill_(4.0))
    others = [Channel(each) for each in socket.socketpair()]
    got = sent(others, theirs)
    theirs[0] = 5.0
    assert got[0] == 4.0 and torch.equal(got[1:], theirs[1:])
    for each in others:
        each.close()


def test_memory_is_shown_once_and_forgotten_with_its_maker(ends):
    (lender, borrower), before = ends, len(os.listdir("/dev/fd"))
    for _ in range(3):  # the same memory each time
        theirs = sent(ends, vectors.empty(LONG))
        assert len(borrower.tensors._borrowed) == 1
        del theirs
        deliver_notices(borrower, lender)
    vectors.release()
    deliver_notices(lender, borrower)
    assert not borrower.tensors._borrowed
    assert len(os.listdir("/dev/fd")) <= before


@pytest.mark.parametrize("has_memfd", [True, False])  # macOS has none
def test_shared_memory_has_no_name(monkeypatch, has_memfd):
    if not has_memfd:
        monkeypatch.delattr(os, "memfd_create", raising=False)
    before = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    segment = Segment.make(1 << 20)
    segment.bytes()[:] = 7
    assert segment[-1] == 7
    after = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    assert not [name for name in after - before if "atoll" in name]
