"""A model of 7B parameters passes through a meeting: nothing here allocates one vector of it.

Its vectors are files of 28 GB that have no blocks on the disk. Of each, the first and the last
chunks are sent; in between the two sides are told how far they have come.
"""

import os

import numpy as np
import pytest
import torch

from atoll.dht.transport import MAX_CALL_BYTES, MAX_MESSAGE_BYTES
from atoll.optim import methods
from atoll.optim.log.entry import MalformedRecord
from atoll.optim.reduction.cells import Cells, UpdateError
from atoll.optim.state import vectors
from atoll.optim.state.layout import CELL, Layout
from atoll.optim.state.outer_state import LEAF_BYTES, snapshot_bytes
from atoll.peer.gossip.meeting import IncomingVectors, OutgoingVectors
from atoll.peer.gossip.messages import SENT, VectorsSent, tagged
from atoll.peer.rounds.messages import SnapshotMeta

NUMEL = 7_000_000_000
LAYOUT = Layout(names=("w",), shapes=((NUMEL,),))
NUM_CELLS = -(-NUMEL // CELL)
METHOD = methods.parse("noloco(codec=int8)")
CELLS = Cells(codec=METHOD.codec, fragment=METHOD.fragments(LAYOUT)[0])
VECTORS = 3  # with the momentum of a side that hands over mass


@pytest.fixture
def sparse(tmp_path, monkeypatch):
    """Let long vectors lie in files without blocks; return a vector of the model."""
    files = iter(range(99))

    def allocate(length):
        path = tmp_path / f"vector{next(files)}"
        path.touch()
        os.truncate(path, 4 * length)
        return np.memmap(path, dtype=np.float32, mode="r+")

    monkeypatch.setattr(vectors, "_memory", vectors._memory)
    vectors.take_memory_from(allocate)
    yield lambda: vectors.empty(NUMEL)
    vectors.release()


def skip_to_last_cells(outgoing, incoming):
    """Go on before the last chunks, as if all before them had been sent."""
    first = NUM_CELLS - 3
    outgoing._vector, outgoing._cell = VECTORS - 1, first
    incoming._count = (VECTORS - 1) * NUM_CELLS + first
    for side in (outgoing, incoming):
        done = getattr(side, "wire_bytes", 0) or side._wire_bytes
        skipped = (VECTORS * NUM_CELLS - 3) * CELLS.max_sent_bytes(0) - done
        name = "wire_bytes" if hasattr(side, "wire_bytes") else "_wire_bytes"
        setattr(side, name, done + skipped)


def test_its_vectors_are_encoded_as_they_are_sent(sparse):
    mine = [sparse() for _ in range(VECTORS)]
    mine[0][:CELL] = torch.linspace(-1, 1, CELL)
    mine[2][-5:] = torch.arange(5.0)
    outgoing, incoming = OutgoingVectors(CELLS, mine), IncomingVectors(CELLS, VECTORS)
    first = outgoing.encode()
    assert 0 < len(first) <= 17 * CELLS.max_sent_bytes(0)
    incoming.take(memoryview(first))
    skip_to_last_cells(outgoing, incoming)
    while data := outgoing.encode():
        for start in range(0, len(data), 1000):  # frames end anywhere in a message
            incoming.take(memoryview(data[start : start + 1000]))
    sent = outgoing.finish()
    assert sent.wire_bytes == outgoing.wire_bytes > 3 * NUMEL > 1 << 32
    assert VectorsSent.decode(sent.encode()) == sent
    assert len(tagged(SENT, sent)) < MAX_MESSAGE_BYTES
    theirs = incoming.finish(sent)
    for got, shown, own in zip(theirs, outgoing.decoded, mine, strict=True):
        assert torch.equal(got[:CELL], shown[:CELL]) and torch.equal(got[-CELL:], shown[-CELL:])
        torch.testing.assert_close(got[:CELL], own[:CELL], atol=0.01, rtol=0)
        torch.testing.assert_close(got[-5:], own[-5:], atol=0.05, rtol=0)
    assert theirs[0][0] < -0.9 and theirs[2][-1] > 3.9
    with pytest.raises(UpdateError, match=f"expected at most {VECTORS * NUM_CELLS} chunks"):
        incoming.take(memoryview(first))


def test_its_missing_chunks_are_noticed(sparse):
    outgoing = OutgoingVectors(CELLS, [sparse()])
    incoming = IncomingVectors(CELLS, 1)
    incoming.take(memoryview(outgoing.encode()))
    with pytest.raises(MalformedRecord, match=f"expected {NUM_CELLS} chunks"):
        incoming.finish(outgoing.finish())


def test_the_digests_of_its_state_fit_into_an_answer():
    """Those of a log travel on a stream, as its snapshots may be larger."""
    count = -(-snapshot_bytes(LAYOUT) // LEAF_BYTES)
    meta = SnapshotMeta(position=1, leaves=bytes(32 * count))
    assert len(meta.encode()) < MAX_CALL_BYTES
    assert SnapshotMeta.decode(meta.encode()) == meta


@pytest.mark.parametrize("codec", ["fp32", "int8", "fp16"])
def test_frames_are_those_of_whole_vectors(codec):
    """However they are cut into messages."""
    layout = Layout(names=("w",), shapes=((20 * CELL + 7,),))
    method = methods.parse(f"noloco(codec={codec})")
    cells = Cells(codec=method.codec, fragment=method.fragments(layout)[0])
    vector_N = torch.randn(layout.numel, generator=torch.Generator().manual_seed(0))
    outgoing = OutgoingVectors(cells, [vector_N])
    data = b"".join(iter(outgoing.encode, b""))
    frames = cells.encode(vector_N)
    assert data == b"".join(len(f).to_bytes(4, "little") + f for f in frames)
    whole_N = torch.cat([cells.decode_sent(i, frame) for i, frame in enumerate(frames)])
    assert torch.equal(outgoing.decoded[0], whole_N)
