"""Slots of bulk reads go to the peers that have fewest."""

import asyncio
from contextlib import AsyncExitStack

from atoll.dht.testing.memory import run_virtual
from atoll.peer.rounds.slots import MAX_OF_ONE, MAX_SLOTS, SHARE, Slots


class Reader:
    """A stream that has or awaits a slot."""

    def __init__(self, slots, peer):
        self.peer = peer
        self.stack = AsyncExitStack()
        self.turn = None
        self.task = asyncio.create_task(self._begin(slots))

    async def _begin(self, slots):
        self.turn = await self.stack.enter_async_context(slots.turn(self.peer))

    @property
    def reads(self):
        return self.turn is not None and self.turn.has_slot

    def cede(self):
        self.task = asyncio.create_task(self.turn.cede())

    async def end(self):
        await self.stack.aclose()


async def readers(slots, names):
    made = [Reader(slots, name) for name in names]
    await asyncio.sleep(1)
    return made


def reading(made):
    return [reader for reader in made if reader.reads]


def test_a_peer_alone_has_what_a_joiner_needs_and_leaves_the_rest_free():
    async def main():
        slots = Slots()
        alone = await readers(slots, "a" * 10)
        assert reading(alone) == alone[:MAX_OF_ONE]
        other = await readers(slots, "bb")
        assert reading(other) == other[:1]
        assert slots.held.total() == MAX_SLOTS - 1, "the last one is kept for a third peer"
        await alone[0].end()
        await asyncio.sleep(1)
        assert reading(other) == other
        assert reading(alone[1:]) == alone[1:MAX_OF_ONE]

    run_virtual(main())


def test_a_peer_over_its_share_cedes_to_those_below_theirs_and_no_further():
    async def main():
        slots = Slots()
        many, few = await readers(slots, "a" * 6), await readers(slots, "b" * 2)
        late = await readers(slots, "c" * 4)
        assert reading(few) == few[:1]
        assert reading(late) == late[:1], "by the slot that is kept for it"
        for reader in many + few[:1]:
            reader.cede()
        await asyncio.sleep(1)
        assert len(reading(late)) == SHARE
        assert len(reading(many)) == 3, "one more, so that a slot is kept again"
        assert reading(few) == few
        for reader in late[:SHARE]:
            await reader.end()
        await asyncio.sleep(1)
        assert reading(late) == late  # the others have waited with fewer slots than the rest

    run_virtual(main())


def test_the_last_peer_of_many_gets_a_slot_of_one_with_two():
    async def main():
        slots = Slots()
        many = await readers(slots, "aabbccdd")
        late, later = await readers(slots, "ef")
        assert late.reads
        for reader in reading(many):
            reader.cede()
        await asyncio.sleep(1)
        assert len(reading(many)) == 6
        assert late.reads
        assert later.reads
        singles = [*reading(many), late, later]
        waiting = (await readers(slots, "z"))[0]
        for reader in singles:
            if slots.held[reader.peer] == 1:
                reader.cede()
        await asyncio.sleep(1)
        assert not waiting.reads  # those with one slot keep it

    run_virtual(main())


def test_a_stream_that_was_begun_continues_before_new_ones():
    async def main():
        slots = Slots()
        many = await readers(slots, "a" * 9)
        others = await readers(slots, "bb") + await readers(slots, "cc")
        for reader in many[:2]:
            reader.cede()
        await asyncio.sleep(1)
        assert not many[0].reads
        assert not many[1].reads
        for reader in others:
            await reader.end()
        await asyncio.sleep(1)
        assert set(reading(many)) == set(many[:MAX_OF_ONE])

    run_virtual(main())


def test_whoever_gives_up_frees_its_place():
    async def main():
        slots = Slots(count=1)
        first, second, third = await readers(slots, "abc")
        second.task.cancel()
        await asyncio.sleep(1)
        await first.end()
        third.task.cancel()  # while it is granted
        await asyncio.sleep(1)
        assert slots.held.total() == 0
        assert (await readers(slots, "d"))[0].reads

    run_virtual(main())
