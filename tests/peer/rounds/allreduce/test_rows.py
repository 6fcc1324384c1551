"""Rows of a large group: who relays what, and sums that count each member once."""

import random
from collections import defaultdict

import pytest
import torch

from atoll.compression import parse
from atoll.dht.testing.memory import run_virtual
from atoll.dht.testing.virtualtime import inline
from atoll.optim.reduction.cells import Cells, unpack
from atoll.optim.state.layout import CELL
from atoll.peer.rounds import policies
from atoll.peer.rounds.allreduce.reduction import CellRefused, PartRange, PartReducer, Share
from atoll.peer.rounds.allreduce.rows import TreePart, rows_of
from atoll.peer.rounds.allreduce.sums import RowReducer, TreeReducer
from atoll.peer.rounds.messages import PartPlan

# who relays


def plans(owners):
    return [PartPlan(start_cell=i, stop_cell=i + 1, owner=o) for i, o in enumerate(owners)]


@pytest.mark.parametrize("members", [65, 100, 144, 1000])
def test_a_row_has_about_four_times_as_many_members_as_there_are_rows(members):
    found = rows_of(members, plans(range(0, members, 2)))
    assert sorted(m for row in found.members for m in row) == list(range(members))
    assert len(found.members) == round(members**0.5 / 2)
    sizes = {len(row) for row in found.members}
    assert max(sizes) - min(sizes) <= 1
    assert all(member in found.members[found.of[member]] for member in range(members))


def test_each_part_has_one_relay_a_row_and_each_relays_about_as_many_parts():
    parts = plans(range(100))
    found = rows_of(100, parts)
    load = defaultdict(int)
    for part, plan in enumerate(parts):
        for row, relay in enumerate(found.relays[part]):
            assert found.of[relay] == row
            load[relay] += relay != plan.owner
        assert found.relay(part, plan.owner) == plan.owner
        assert len(found.passed(plan.owner)) == 4
    assert max(load.values()) <= 5


@pytest.mark.parametrize(("cells", "most"), [(1, 0.2), (0, 0.0)])
def test_who_owns_few_cells_relays_few_and_who_owns_none_none(cells, most):
    owners = [m for m in range(100) for _ in range(cells if m == 5 else 10)]
    found = rows_of(100, plans(owners))
    relayed = [relay for part in found.relays for relay in part]
    assert relayed.count(5) <= most * relayed.count(15)


def test_where_cells_do_not_go_round_all_relay():
    found = rows_of(100, plans(range(40)))
    assert {relay for part in found.relays for relay in part} == set(range(100))


@pytest.mark.parametrize(
    ("bits", "members", "relayed"),
    [(8, 64, False), (8, 65, True), (4, 65, True), (1, 144, False), (1, 300, True)],
)
def test_a_large_group_has_relays_if_sums_are_no_longer_than_codes(bits, members, relayed):
    assert policies.is_relayed(members, 10**6, bits * 10**6 // 8) is relayed


# the arithmetic

NUMEL = 3 * CELL + 100
CELLS = Cells.of_vector(parse("int8"), NUMEL)
PART = PartRange(start_cell=0, stop_cell=4, cells=CELLS)
ROW = (1, 4, 7)
SHARES = {m: Share(weight=1.0 + m, clip=0.5 + 0.05 * m, norm=1.1 * (NUMEL**0.5)) for m in (0, *ROW)}


def frames_of(member):
    x_N = torch.randn(NUMEL, generator=torch.Generator().manual_seed(member))
    return CELLS.encode(x_N)


def relay_with(arrived, members=ROW):
    """The relay of the row, to which so many cells of each member came."""
    row = RowReducer(row=ROW, part=PART, shares={m: SHARES[m] for m in members})
    for member, cells in arrived.items():
        row.add_all(member, frames_of(member)[:cells])
        if cells < PART.num_cells:
            row.drop(member)
    row.advance()
    return row


def owner():
    found = TreeReducer(rows={1: ROW}, part=PART, shares=SHARES)
    found.add_all(0, frames_of(0))
    return found


def flat(arrived):
    """The same cells at an owner without rows."""
    found = PartReducer(part=PART, shares=SHARES)
    for member, cells in {0: PART.num_cells, **arrived}.items():
        found.add_all(member, frames_of(member)[:cells])
        found.drop(member)
    found.advance()
    return found


def sums_of(found, arrived):
    """What was added up: what is sent times the weight behind it, and what encoding lost."""
    weight_N = torch.zeros(NUMEL)
    for member, cells in {0: PART.num_cells, **arrived}.items():
        weight_N[: CELLS.values(0, cells).stop if cells else 0] += SHARES[member].weight
    return found.decoded_N * weight_N + found.credit_N


def expect_as_flat(found, arrived):
    assert found.finished
    expected = flat(arrived)
    assert found.done(0, 0)[1].partial == expected.done(0, 0)[1].partial
    assert torch.allclose(sums_of(found, arrived), sums_of(expected, arrived), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("cells", [(4, 4, 4), (4, 2, 4), (0, 4, 1), (0, 0, 0)])
def test_a_sum_of_sums_is_the_sum_whoever_is_missing(cells):
    arrived = dict(zip(ROW, cells, strict=True))
    found, row = owner(), relay_with(arrived)
    for frame in row.frames:
        found.add_sums(1, memoryview(frame))
    for member in ROW:
        found.drop(member)
    found.advance()
    expect_as_flat(found, arrived)


@pytest.mark.parametrize("seed", range(40))
def test_nobody_counts_twice_in_whatever_order_sums_and_members_come(seed):
    rng = random.Random(seed)
    found, row = owner(), relay_with({m: rng.choice((1, 4, 4)) for m in ROW})
    sums = row.frames[: rng.randint(0, 4)]  # then the relay is lost
    steps = [("sum", None)] * len(sums) + [("end", None)]
    streams = {m: list(frames_of(m)) for m in ROW}
    for member in ROW:
        at = sorted(rng.randint(0, len(steps)) for _ in range(PART.num_cells))
        for place in reversed(at):
            steps.insert(place, ("cell", member))
    if rng.random() < 0.5:  # all that members send comes after the relay was lost
        steps.sort(key=lambda step: step[0] == "cell")
    left = list(sums)
    for what, member in steps:
        if what == "sum" and left:
            found.add_sums(1, memoryview(left.pop(0)))
        elif what == "end":
            left = []
            found.dissolve(1)
        elif what == "cell":
            found.add(member, streams[member].pop(0))
        found.advance()
    expect_as_flat(found, dict.fromkeys(ROW, PART.num_cells))


def test_an_owner_drops_late_sums_before_it_drops_the_rows_members():
    async def main():
        found, row = owner(), relay_with(dict.fromkeys(ROW, 4))
        part = TreePart(
            reducer=found,
            tree=found,
            compute=inline,
            waiting=set(),
            relays={},
            late_s=0.5,
            rows_by=6.0,
        )
        for frame in row.frames[:2]:
            await part.add_sums(1, memoryview(frame))
        assert await part.silent(5.9, 1.0, ()) == set()
        assert found.open_rows == {1}
        assert await part.silent(6.0, 1.0, ()) == set()
        assert found.is_dissolved(1)
        part.came.add(4)
        await part.add(4, frames_of(4))
        assert await part.silent(6.4, 1.0, ()) == set()
        assert await part.silent(6.5, 1.0, ()) == {1, 7}
        for member in (1, 7):
            await part.drop(member)
        expect_as_flat(found, {1: 2, 4: 4, 7: 2})

    run_virtual(main())


def exact_codes(member, count):
    """Whole numbers of some bits: their sums are exact in fp32, in whatever order."""
    generator = torch.Generator().manual_seed(member)
    return torch.randint(-64, 64, (count,), generator=generator).float()


def test_rows_with_exact_sums_give_the_bits_of_the_flat_reduction():
    cells = Cells.of_vector(parse("fp32"), NUMEL)
    part = PartRange(start_cell=0, stop_cell=4, cells=cells)
    shares = {m: Share(weight=2.0 ** (m % 3), clip=0.5, norm=1e6) for m in range(8)}
    frames = {m: cells.encode(exact_codes(m, NUMEL)) for m in shares}
    found = TreeReducer(rows={1: (1, 4, 7), 2: (2, 5)}, part=part, shares=shares)
    expected = PartReducer(part=part, shares=shares)
    for number, row in enumerate([(1, 4, 7), (2, 5)], 1):
        relay = RowReducer(row=row, part=part, shares={m: shares[m] for m in row})
        for member in row:
            relay.add_all(member, frames[member])
        relay.advance()
        for frame in relay.frames:
            found.add_sums(number, memoryview(frame))
    for member in (0, 3, 6):
        found.add_all(member, frames[member])
    for member in reversed(range(8)):
        expected.add_all(member, frames[member])
    found.advance()
    expected.advance()
    assert found.done(0, 0) == expected.done(0, 0)
    assert torch.equal(found.credit_N, expected.credit_N)


def spoiled(values=None, mask=None):
    frame = relay_with(dict.fromkeys(ROW, 4)).frames[0]
    body = bytearray(unpack(memoryview(frame), [1 << 20])[0])
    if mask is not None:
        body[0] = mask
    if values is not None:
        body[1:] = values(torch.frombuffer(body[1:], dtype=torch.float32)).numpy().tobytes()
    return len(body).to_bytes(4, "little") + bytes(body)


@pytest.mark.parametrize(
    "messages",
    [
        [spoiled(values=lambda x: 100 * x)],
        [spoiled(values=lambda x: x * float("nan"))],
        [spoiled(mask=0b011), spoiled(mask=0b111)],
        [spoiled(mask=0b1111)],
        [spoiled(values=lambda x: x[:-1])],
        [*relay_with(dict.fromkeys(ROW, 4)).frames, spoiled()],
    ],
    ids=["large", "nan", "came back", "nobody", "short", "many"],
)
def test_sums_that_cannot_be_are_refused(messages):
    found = owner()
    for message in messages[:-1]:
        found.add_sums(1, memoryview(message))
    with pytest.raises(CellRefused):
        found.add_sums(1, memoryview(messages[-1]))
