"""Owners and senders wait for nobody without a limit, and take from nobody more than is due."""

import asyncio
from types import SimpleNamespace

import pytest

from atoll.compression import parse
from atoll.dht.refusals import RefusalCode
from atoll.dht.testing.virtualtime import inline, run_virtual
from atoll.dht.transport import DeadlineExceeded, Refused
from atoll.optim.reduction.cells import Cells
from atoll.optim.state.layout import CELL
from atoll.peer.rounds.allreduce.exchange import Exchange
from atoll.peer.rounds.allreduce.reduction import PartRange, Share
from atoll.peer.rounds.allreduce.sides import Owner, PartLost, Sender
from atoll.peer.rounds.conduct import MAX_FAULTS, Conduct, Fault
from atoll.peer.rounds.messages import ALIVE, PART_DONE, PartDone, Reduce, Repair, tagged
from atoll.peer.rounds.messages import CELL as CELL_KIND

DEADLINE_S, STALL_S = 10.0, 1.5
PEERS = ("me", "b", "c")
CELLS = Cells.of_vector(parse("int8"), CELL)


class State:
    """A member's side of a group of three, of which it is the first."""

    me = 0
    round = 1
    factors = None

    def __init__(self):
        now = asyncio.get_running_loop().time
        self.faults, self.lines, self.left_out, self.gone = [], [], {}, set()
        self.conduct = Conduct()
        self.ctx = SimpleNamespace(
            now=now,
            alive_s=STALL_S / 4,
            compute=inline,
            conduct=self.conduct,
            lags=Conduct(),
            rule_in_force=None,
            fault=lambda peer, why: self.faults.append((peer, why)),
        )
        members = [SimpleNamespace(peer_id=peer, weight=1.0) for peer in PEERS]
        plan = SimpleNamespace(start_cell=0, stop_cell=1, owner=0)
        self.group = SimpleNamespace(
            deadline_s=DEADLINE_S, stall_s=STALL_S, members=members, parts=[plan]
        )
        self.cells = CELLS
        self.times = SimpleNamespace(started=now())

    def member(self, remote):
        return PEERS.index(remote)

    def peer(self, member):
        return PEERS[member]

    def range_of(self, part):
        return PartRange(start_cell=0, stop_cell=1, cells=CELLS)

    def shares(self):
        return {i: Share(weight=1.0, clip=1.0, norm=1e9) for i in range(len(PEERS))}

    def take_room(self, part):
        return None

    def log(self, text, level="warning"):
        self.lines.append(text)


class Chatty:
    """Sends signs of life for ever, after these messages."""

    def __init__(self, *messages):
        self.messages = list(messages)

    async def recv(self, *, timeout_s):
        await asyncio.sleep(0.5)
        return self.messages.pop(0) if self.messages else ALIVE


def test_results_that_never_come_are_waited_for_until_the_deadline():
    async def main():
        state = State()
        sender = Sender(state, None)
        with pytest.raises(DeadlineExceeded):
            async with asyncio.timeout(10 * DEADLINE_S):
                await sender.collect(Chatty(), 0, 0, asyncio.Queue())
        assert state.ctx.now() - state.times.started <= DEADLINE_S + 2 * STALL_S

    run_virtual(main())


def test_a_report_on_another_part_loses_the_part():
    async def main():
        other = PartDone(part=0, generation=1, wire_bytes=1, digest=b"d" * 32, partial=())
        stream = Chatty(tagged(PART_DONE, other))
        with pytest.raises(PartLost, match="another part"):
            await Sender(State(), None).collect(stream, 0, 0, asyncio.Queue())

    run_virtual(main())


def test_slow_senders_are_left_out_at_half_of_the_deadline():
    async def main():
        state = State()
        owner = Owner(state)
        owned = owner.make_part(0, 0, range(3))
        owned.waiting.clear()  # all have opened their streams, and send signs of life alone
        await owned.drop(0)
        async with asyncio.timeout(10 * DEADLINE_S):
            await owner.await_senders(owned)
        assert state.ctx.now() - state.times.started == pytest.approx(DEADLINE_S / 2, abs=STALL_S)
        assert state.left_out == {1: "missed the deadline", 2: "missed the deadline"}

    run_virtual(main())


def test_cells_of_a_barred_member_are_not_waited_for():
    async def main():
        state = State()
        for _ in range(MAX_FAULTS):
            state.conduct.fault("b", Fault.BAD_CELL, state.ctx.now())
        owned = Owner(state).make_part(0, 0, range(3))
        assert owned.waiting == {2}
        assert owned.reducer.waiting_for == {0, 2}
        assert state.left_out == {1: "banned"}

    run_virtual(main())


def test_a_second_stream_of_a_member_is_refused():
    async def main():
        state = State()
        owner = Owner(state)
        owner.parts[0, 0] = owned = owner.make_part(0, 0, range(3))
        owned.came.add(1)
        head = Reduce(position=0, group=b"g" * 32, part=0, generation=0, sums=False)
        with pytest.raises(Refused) as refusal:
            await owner.serve("b", head, Chatty())
        assert refusal.value.code is RefusalCode.REPLAYED

    run_virtual(main())


def test_a_bad_cell_is_a_fault_of_its_sender():
    async def main():
        state = State()
        owner = Owner(state)
        owned = owner.make_part(0, 0, range(3))
        with pytest.raises(Refused) as refusal:
            await owner._receive(owned, 1, Chatty(CELL_KIND + b"noise"))
        assert refusal.value.code is RefusalCode.BAD_CELL
        assert state.faults == [("b", Fault.BAD_CELL)]

    run_virtual(main())


def test_an_order_of_an_earlier_generation_changes_nothing():
    exchange = Exchange.__new__(Exchange)
    exchange.group = SimpleNamespace(parts=[0], members=[0, 1])
    exchange._generation = {0: 2}
    exchange.parts = {0: "done"}
    exchange.repair(Repair(part=0, generation=2, owner=1, senders=(0, 1)))
    assert exchange.parts == {0: "done"}


@pytest.mark.parametrize("senders", [(), (1,)], ids=["none", "only one that is barred"])
def test_a_part_that_nobody_may_send_ends(senders):
    """The leader that orders a repair names its senders: an owner that waited for none hung."""

    async def main():
        state = State()
        for _ in range(MAX_FAULTS):
            state.conduct.fault("b", Fault.BAD_CELL, state.ctx.now())
        owner = Owner(state)
        owned = owner.make_part(0, 1, senders)
        await asyncio.sleep(2 * DEADLINE_S)  # past all deadlines: no wait is left
        await owner.await_senders(owned)
        assert owned.reducer.finished
        assert [prefix.cells for prefix in owned.reducer.done(0, 1)[1].partial] == [0, 0, 0]

    run_virtual(main())
