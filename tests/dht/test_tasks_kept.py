"""Kept tasks: a failure ends no other, and all end with their owner."""

import asyncio

import pytest

from atoll.dht.tasks import RESTART_S, KeptTasks
from atoll.dht.testing.memory import run_virtual


def test_work_that_must_not_end_starts_again_and_says_why():
    async def main():
        starts, told = [], []

        async def work():
            starts.append(asyncio.get_running_loop().time())
            raise ValueError("broken")

        async with KeptTasks(told.append) as tasks:
            tasks.keep(work)
            await asyncio.sleep(2.5 * RESTART_S)
        assert len(starts) == len(told) == 3
        assert "work failed and restarts: ValueError('broken')" in told[0]

    run_virtual(main())


def test_a_failure_is_logged_and_ends_no_other(caplog):
    async def main():
        done = []

        async def fails():
            raise ValueError("broken")

        async def works(what):
            await asyncio.sleep(1.0)
            done.append(what)

        async with KeptTasks(print) as tasks:
            tasks.spawn(fails)
            tasks.spawn(works, "other")
            await asyncio.sleep(2.0)
        assert done == ["other"]

    run_virtual(main())
    assert "fails failed" in caplog.text
    assert "ValueError: broken" in caplog.text


def test_all_end_with_the_block_whose_error_passes_as_it_is():
    ended = []

    async def work():
        try:
            await asyncio.sleep(1000.0)
        finally:
            ended.append(True)

    async def main():
        async with KeptTasks(print) as tasks:
            tasks.spawn(work)
            await asyncio.sleep(0)
            raise KeyError("the block's own")

    with pytest.raises(KeyError):
        run_virtual(main())
    assert ended == [True]


def test_ending_waits_only_so_long_and_lets_nothing_new_begin():
    async def main():
        began = []

        async def stubborn():
            try:
                await asyncio.sleep(1000.0)
            except asyncio.CancelledError:
                await asyncio.sleep(5.0)

        async def late():
            began.append(True)

        loop = asyncio.get_running_loop()
        async with KeptTasks(print) as tasks:
            tasks.spawn(stubborn)
            await asyncio.sleep(0)
            before_s = loop.time()
            await tasks.close(2.0)
            assert loop.time() - before_s == pytest.approx(2.0)
            tasks.spawn(late)
        assert began == []

    run_virtual(main())
