"""One status for everybody who watches."""

import asyncio
from dataclasses import replace

import pytest

from atoll.coordinator.admission_control import Refusal, RefusalStatus
from atoll.coordinator.policies import LOOK_S, WATCH_BYTES_PER_S, look_every_s
from atoll.coordinator.report.feed import pause_s
from atoll.coordinator.run.frames import decompress
from atoll.coordinator.run.status import MAX_LOOK_S, RunStatus
from atoll.coordinator.service.status_pages import MAKING_SHARE, MAX_AGE_S, StatusPages
from support.status import make_status

MAKES_S = 0.03


class Making:
    """A run whose status takes a while to make, by a clock of its own."""

    def __init__(self, takes_s: float) -> None:
        self.takes_s, self.now_s, self.made = takes_s, 0.0, list[str]()
        self.pages = StatusPages(self._make, clock=lambda: self.now_s)

    def _make(self, module: str) -> RunStatus:
        if module == "none":
            raise Refusal(RefusalStatus.INVALID_ARGUMENT, "no such module")
        self.made.append(module)
        self.now_s += self.takes_s
        return make_status(position=len(self.made))

    async def position(self, module: str = "") -> int:
        packed = await self.pages.page(module)
        return RunStatus.from_json(decompress(packed, most_bytes=1 << 20)).position


def test_who_waits_while_one_is_made_shares_the_next() -> None:
    async def main() -> tuple[set[int], int]:
        run = Making(MAKES_S)
        found = await asyncio.gather(*(run.position() for _ in range(50)))
        return set(found), len(run.made)

    assert asyncio.run(main()) == ({1, 2}, 2)


def test_a_few_watchers_always_get_a_new_one() -> None:
    async def main() -> list[int]:
        run, found = Making(MAKES_S), []
        for _ in range(5):
            found.append(await run.position())
            run.now_s += 1.0
        return found

    assert asyncio.run(main()) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("takes_s", "most"), [(MAKES_S, 1.2 * MAKING_SHARE), (0.5, 0.5 / MAX_AGE_S)]
)
def test_many_watchers_take_a_share_of_the_time_and_none_sees_old(
    takes_s: float, most: float
) -> None:
    async def main() -> tuple[float, float]:
        run, newest, made_s, oldest_s = Making(takes_s), 0, 0.0, 0.0
        while run.now_s < 20.0:
            run.now_s += 0.01
            asked_s = run.now_s
            if await run.position() > newest:
                newest, made_s = len(run.made), asked_s
            oldest_s = max(oldest_s, asked_s - made_s)
        return len(run.made) * takes_s / run.now_s, oldest_s

    share, oldest_s = asyncio.run(main())
    assert oldest_s < MAX_AGE_S + takes_s
    assert share <= most


def test_modules_have_pages_of_their_own_and_unknown_ones_none() -> None:
    async def main() -> list[str]:
        run = Making(0.4)
        for module in ("a", "b", "a"):
            await run.position(module)
        with pytest.raises(Refusal):
            await run.position("none")
        return run.made

    assert asyncio.run(main()) == ["a", "b"]


def test_many_watchers_are_told_to_look_less_often() -> None:
    async def main() -> list[float]:
        run, told = Making(0.001), []
        every_s = LOOK_S
        for _ in range(8):  # 2,000 look once in every `every_s` each
            for _ in range(4):
                run.now_s += every_s / 4
                pages = await asyncio.gather(*(run.pages.page("") for _ in range(500)))
            last = RunStatus.from_json(decompress(pages[-1], most_bytes=1 << 20))
            every_s = max(LOOK_S, last.look_every_s)
            told.append(every_s)
        assert told[-1] == pytest.approx(len(pages[-1]) * 2000 / WATCH_BYTES_PER_S, rel=0.3)
        return told

    assert asyncio.run(main())[-1] > 2 * LOOK_S


def test_a_few_watchers_look_once_a_second() -> None:
    assert look_every_s(100_000, 25) == LOOK_S
    assert look_every_s(100_000, 200) == 8.0
    assert look_every_s(1 << 24, 4096) == MAX_LOOK_S


def test_a_watcher_heeds_how_often_it_may_look() -> None:
    status = replace(make_status(), look_every_s=8.0)
    assert [pause_s(s, n, 1.0) for s, n in ((None, 0), (status, 0), (status, 2))] == [1.0, 8.0, 8.0]
