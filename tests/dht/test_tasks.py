"""Work that runs at the same time: who ends it, and who learns of its failures."""

import asyncio
import gc
import weakref
from contextlib import suppress

import pytest

from atoll.dht.tasks import ENDING_S, Tasks, beside, end, race, together
from atoll.dht.testing.memory import run_virtual
from atoll.dht.transport import PeerUnreachable


class Broken(Exception):
    """A failure of a test."""


async def fail(error):
    raise error


async def hang(ended=None):
    try:
        await asyncio.Event().wait()
    finally:
        if ended is not None:
            ended.append(True)


def told(scenario):
    """What the loop's exception handler is told while a scenario runs."""

    async def main():
        failures = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: failures.append(context["exception"]))
        async with asyncio.timeout(5):
            await scenario()
        return failures

    return asyncio.run(main())


def test_a_helper_ends_with_its_block():
    ended = []

    async def scenario():
        async with beside(hang(ended)):
            await asyncio.sleep(0)
            assert not ended
        assert ended

    assert told(scenario) == []


def test_a_helper_that_fails_ends_its_block():
    async def scenario():
        with pytest.raises(Broken):
            async with beside(fail(Broken())):
                await hang()

    assert told(scenario) == []


def test_a_helper_that_loses_its_link_changes_nothing():
    async def scenario():
        async with beside(fail(PeerUnreachable("gone"))):
            await asyncio.sleep(0.01)

    assert told(scenario) == []


def test_a_block_raises_its_own_failure_and_reports_that_of_a_helper():
    async def scenario():
        with pytest.raises(Broken, match="own"):
            async with beside(fail_when_ended(Broken("helper"))):
                await asyncio.sleep(0)
                raise Broken("own")

    assert [str(failure) for failure in told(scenario)] == ["helper"]


async def fail_when_ended(error):
    try:
        await hang()
    finally:
        raise error


def test_parts_of_one_thing_fail_together():
    ended = []

    async def scenario():
        with pytest.raises(Broken):
            await together(hang(ended), fail(Broken()))

    assert told(scenario) == []
    assert ended


def test_parts_return_their_results_in_order():
    async def scenario():
        assert await together(asyncio.sleep(0.01, "slow"), asyncio.sleep(0, "fast")) == [
            "slow",
            "fast",
        ]

    assert told(scenario) == []


def test_a_race_returns_what_the_work_returns_or_nothing():
    async def scenario():
        ended = []
        assert await race(asyncio.sleep(0, "done"), hang(ended)) == "done"
        assert await race(hang(ended), hang(), asyncio.sleep(0, "stop")) is None
        assert len(ended) == 2
        assert await race(asyncio.sleep(0, "done"), asyncio.sleep(0)) == "done"

    assert told(scenario) == []


def test_a_race_raises_what_ended_first_raised():
    async def scenario():
        for racers in ((fail(Broken()), hang()), (hang(), fail(Broken()))):
            with pytest.raises(Broken):
                await race(*racers)

    assert told(scenario) == []


def test_a_race_that_is_cancelled_ends_its_work():
    ended = []

    async def scenario():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await race(hang(ended), hang(ended))

    assert told(scenario) == []
    assert len(ended) == 2


def test_a_failure_while_a_task_ends_is_reported():
    async def scenario():
        task = asyncio.create_task(fail_when_ended(Broken("late")))
        await asyncio.sleep(0)
        await end(task)

    assert [str(failure) for failure in told(scenario)] == ["late"]


def test_work_in_the_background_reports_its_failure_at_once():
    async def scenario():
        tasks = Tasks()
        tasks.spawn(fail(Broken("alone")))
        tasks.spawn(fail(PeerUnreachable("gone")))
        await asyncio.sleep(0.01)
        await tasks.close()

    assert [str(failure) for failure in told(scenario)] == ["alone"]


def test_work_in_the_background_ends_with_its_owner():
    ended = []

    async def scenario():
        tasks = Tasks()
        tasks.spawn(hang(ended))
        await asyncio.sleep(0)
        await tasks.close()

    assert told(scenario) == []
    assert ended


@pytest.mark.filterwarnings("error")
def test_a_helper_may_end_before_it_begins():
    async def scenario():
        async with beside(hang()):
            pass

    assert told(scenario) == []


async def swallow(release, error=None):
    """Ignore every cancellation until the event is set."""
    while not release.is_set():
        with suppress(asyncio.CancelledError):
            await release.wait()
    if error is not None:
        raise error


@pytest.mark.parametrize("owned", [True, False])
def test_work_that_swallows_its_cancellation_is_named_and_left(caplog, owned):
    failures = []

    async def main():
        loop, release, tasks = asyncio.get_running_loop(), asyncio.Event(), Tasks()
        loop.set_exception_handler(lambda _, context: failures.append(str(context["exception"])))
        work = swallow(release, Broken("late"))
        task = tasks.spawn(work) if owned else asyncio.create_task(work)
        await asyncio.sleep(0)
        before_s = loop.time()
        await (tasks.close() if owned else end(task))
        assert loop.time() - before_s == pytest.approx(ENDING_S)
        assert not task.done()
        release.set()
        await asyncio.sleep(1)
        assert task.done()

    run_virtual(main())
    assert "swallow (Task-" in caplog.text
    assert "has not ended 30 s after it was cancelled" in caplog.text
    assert failures == ["late"]  # reported when it comes, not lost


def test_ending_that_is_cancelled_still_waits_for_its_tasks():
    ended = []

    async def slow():
        try:
            await asyncio.Event().wait()
        finally:
            with suppress(asyncio.CancelledError):  # that which closing passes on
                await asyncio.sleep(1)
            await asyncio.sleep(1)
            ended.append(True)

    async def main():
        tasks = Tasks()
        tasks.spawn(slow())
        await asyncio.sleep(0)
        closing = asyncio.create_task(tasks.close())
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert ended

    run_virtual(main())


def test_an_interrupted_ending_leaves_nothing_to_the_collector():
    class Held:
        pass

    async def main():
        held = []

        async def owner():
            big, tasks = Held(), Tasks()
            held.append(weakref.ref(big))
            tasks.spawn(hang())
            await asyncio.sleep(0)
            await tasks.close()

        owning = asyncio.create_task(owner())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        owning.cancel()
        with suppress(asyncio.CancelledError):
            await owning
        del owning
        await asyncio.sleep(0)
        assert held[0]() is None

    gc.collect()
    gc.disable()
    try:
        run_virtual(main())
    finally:
        gc.enable()


def test_a_task_may_close_its_owner():
    async def main():
        tasks = Tasks()
        await tasks.spawn(tasks.close())

    run_virtual(main())


def test_a_context_closes_its_tasks():
    ended = []

    async def main():
        async with Tasks() as tasks:
            tasks.spawn(hang(ended))
            await asyncio.sleep(0)
        assert ended

    run_virtual(main())
