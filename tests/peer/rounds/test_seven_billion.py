"""A model of 7B parameters passes through every message: nothing here allocates one vector of it.

Its snapshot is a file of 56 GB that has no blocks on the disk, so every leaf is of zeros. The body
of an entry is memory that nobody has written, and so of zeros too.
"""

import hashlib
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from atoll.compression import planes
from atoll.dht.testing.memory import run_virtual
from atoll.dht.transport import MAX_MESSAGE_BYTES
from atoll.optim import methods
from atoll.optim.log.claims import certified_roots, verify_linked
from atoll.optim.log.entry import Entry, Member, Part, Partial, StateRoot
from atoll.optim.log.replay import Replay
from atoll.optim.log.store import CHUNK_BYTES, StoreHead
from atoll.optim.log.stored_snapshots import SnapshotFile, SnapshotInfo
from atoll.optim.state.layout import CELL, Layout
from atoll.optim.state.outer_state import LEAF_BYTES, leaf_digest, merkle_root, snapshot_bytes
from atoll.peer.recovery.sources import PeerSource
from atoll.peer.rounds import policies
from atoll.peer.rounds.allreduce.reduction import FrameBuffer, PartRange
from atoll.peer.rounds.context import Stored
from atoll.peer.rounds.fetching import fetch_body, fetch_headers, fetch_part
from atoll.peer.rounds.messages import (
    MAX_GROUP_BYTES,
    Closed,
    Decided,
    Group,
    PartDone,
    Plan,
    deflated,
    inflated,
    planned_parts,
)
from support import kit
from support.swarm import Swarm

NUMEL = 7_000_000_000
LAYOUT = Layout(names=("w",), shapes=((NUMEL,),))
NUM_CELLS = -(-NUMEL // CELL)
NUM_LEAVES = -(-snapshot_bytes(LAYOUT) // LEAF_BYTES)
BODY_BYTES = 7_100_000_001  # of int8: a byte a parameter, and a scale for each 256
POSITION = 4


@pytest.fixture(scope="module")
def replay() -> Replay:
    return Replay(methods.parse("diloco"), LAYOUT)


@pytest.fixture
def snapshot(tmp_path: Path) -> Iterator[SnapshotFile]:
    path = tmp_path / "snapshot"
    with path.open("wb") as file:
        os.truncate(file.fileno(), snapshot_bytes(LAYOUT))
    leaf = leaf_digest(bytes(LEAF_BYTES))
    last = leaf_digest(bytes(snapshot_bytes(LAYOUT) % LEAF_BYTES))
    digests = (leaf,) * (NUM_LEAVES - 1) + (last,)
    yield SnapshotFile(
        SnapshotInfo(
            position=POSITION,
            chain=bytes(32),
            root=merkle_root(digests),
            leaf_digests=digests,
            layout=LAYOUT,
            path=path,
        )
    )


def test_its_snapshot_can_be_fetched(tmp_path: Path, snapshot: SnapshotFile) -> None:
    last = snapshot_bytes(LAYOUT) % LEAF_BYTES
    assert NUM_LEAVES * 32 > MAX_MESSAGE_BYTES  # the digests do not fit into one message

    async def main() -> None:
        swarm = Swarm(tmp_path / "peers")
        try:
            donor, *_ = await swarm.start(3)
            await swarm.until(lambda: donor.replica.position > POSITION)
            donor.replica.snapshots[POSITION] = snapshot
            source = PeerSource(swarm.add().ctx, donor.identity.peer_id)
            assert POSITION in (await source.head()).snapshots
            digests = await source.leaf_digests(POSITION, NUM_LEAVES)
            assert merkle_root(digests) == snapshot.root()
            for indices in (range(8), range(NUM_LEAVES - 3, NUM_LEAVES)):
                async for index, leaf in source.leaves(POSITION, indices):
                    whole = planes.unpack(leaf, LEAF_BYTES if index < NUM_LEAVES - 1 else last)
                    assert leaf_digest(whole) == digests[index]
        finally:
            await swarm.stop()

    run_virtual(main())


def test_its_entries_are_checked_and_told(replay: Replay) -> None:
    half = NUM_CELLS // 2
    wire_bytes = [
        replay.cells_at(0).max_body_bytes(2, *cells) for cells in ((0, half), (half, NUM_CELLS))
    ]
    parts = tuple(
        Part(
            start_cell=start,
            stop_cell=stop,
            owner=owner,
            generation=0,
            wire_bytes=wire_bytes[owner],
            digest=bytes(32),
            partial=(Partial(member=1 - owner, cells=half - 1 - owner),),
        )
        for owner, (start, stop) in enumerate(((0, half), (half, NUM_CELLS)))
    )
    swarm = kit.Swarm()
    head = StoreHead(epoch=0, position=POSITION, chain=bytes(32))
    root = StateRoot(position=POSITION - 2, root=bytes(32))
    entry, _ = swarm.entry(bytes(32), head, parts=parts, state_root=root)
    replay.check(entry)
    record, certificate = entry.encode(), swarm.certify(entry).encode()
    decided = Decided(entry=record, certificate=certificate).encode()
    assert len(decided) < MAX_MESSAGE_BYTES and Entry.decode(record) == entry
    (claim,) = verify_linked(
        [(record, certificate)], run_id=entry.run_id, start=POSITION, chain=entry.chain
    )
    assert certified_roots([claim]) == {POSITION - 2: bytes(32)}
    assert replay.max_body_bytes(entry) >= sum(wire_bytes) == entry.body_bytes > NUMEL
    first, second = entry.members[:2]
    included = torch.tensor(entry.included_cells(first.peer_id, first.incarnation))
    assert included.sum() == half + half - 2
    with torch.device("meta"):  # a mask of 7 GB, whose runs are filled one by one
        assert replay.fragments[0].mask(included).numel() == NUMEL
    others = entry.included_cells(second.peer_id, second.incarnation)
    assert others is not None and sum(others) == half - 1 + NUM_CELLS - half


def test_the_frames_of_a_part_come_in_any_number_of_messages(replay: Replay) -> None:
    part = PartRange(start_cell=0, stop_cell=NUM_CELLS, cells=replay.cells_at(0))
    limits = [part.max_reduced_bytes(index, 2) for index in range(part.num_cells)]
    assert len(limits) == NUM_CELLS
    buffer, message = FrameBuffer(limits), memoryview(b"\x01\x00\x00\x00x" * 16)
    taken = sum(len(buffer.feed(message)) for _ in range(NUM_CELLS // 16))
    assert taken == NUM_CELLS // 16 * 16


@pytest.fixture
def body() -> Iterator[memoryview]:
    """The body of an entry, in pages that take no memory until they are written."""
    with mmap.mmap(-1, BODY_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as pages:
        with memoryview(pages) as view:
            yield view


def test_a_group_of_many_and_all_that_follows_from_it_fit(replay: Replay) -> None:
    cells = replay.cells_at(0)
    sizes = [cells.max_reduced_bytes(index, 2) for index in range(NUM_CELLS)]
    assert sum(sizes) > BODY_BYTES > 1 << 32
    for members in (2, 64, 1024):
        parts = policies.split_cells(sizes, [100.0] * members)
        assert parts[-1].stop_cell == NUM_CELLS and len(parts) >= members
        admitted = [
            Member(
                peer_id=f"12D3KooW{index:044d}",
                incarnation="1",
                weight=1.0,
                clip=1.0,
                norm=1e6,
                tokens=1 << 40,
                steps=1000,
                loss=2.0,
            )
            for index in range(members)
        ]
        group = Group(
            epoch=0,
            position=POSITION,
            term=0,
            members=tuple(admitted),
            parts=tuple(parts),
            stall_s=10.0,
            deadline_s=policies.round_deadline_s(sum(sizes), 20.0, stall_s=10.0),
        )
        closed = Closed(group=deflated(group.encode()), signature=b"s" * 64, tell=())
        again = Group.decode(inflated(Closed.decode(closed.encode()).group, MAX_GROUP_BYTES))
        assert again == group
        plan = Plan(epoch=0, position=POSITION, parts=planned_parts(parts, admitted))
        assert Plan.decode(plan.encode()).digest == plan.digest
    done = PartDone(part=0, generation=0, wire_bytes=sum(sizes), digest=bytes(32), partial=())
    assert PartDone.decode(done.encode()) == done


def test_a_part_and_a_body_behind_4_gib_are_served_from_the_log(
    tmp_path: Path, body: memoryview
) -> None:
    last = BODY_BYTES - (5 << 20)
    digest = hashlib.sha256(bytes(BODY_BYTES - last)).digest()

    async def main() -> None:
        swarm = Swarm(tmp_path / "peers")
        try:
            donor, *_ = await swarm.start(3)
            store, position = donor.replica.store, donor.replica.store.head.position
            await swarm.until(lambda: donor.replica.position > position)
            store._unwritten[position] = body
            entry = Entry.decode(store.get(position).entry)
            part = entry.parts[0].model_copy(update={"wire_bytes": BODY_BYTES})
            told = entry.model_copy(update={"parts": (part, *entry.parts[1:])}).encode()
            store._db.execute(
                "UPDATE entries SET entry = ?, body_bytes = ? WHERE position = ?",
                (told, BODY_BYTES, position),
            )
            donor.ctx.parts._stored[digest] = Stored(position, last, BODY_BYTES)
            other, me = swarm.add().ctx, donor.identity.peer_id
            part = await fetch_part(other, [me], digest, BODY_BYTES - last)
            assert len(part) == BODY_BYTES - last > 4 * CHUNK_BYTES
            header = (await fetch_headers(other, me, position, position + 1))[0]
            assert Entry.decode(header.entry).position == position
            some, start = bytearray(1000), BODY_BYTES - 1000
            await fetch_body(other, me, position, start, memoryview(some))
            assert some == body[start:]
            del store._unwritten[position]
        finally:
            await swarm.stop()

    run_virtual(main())
