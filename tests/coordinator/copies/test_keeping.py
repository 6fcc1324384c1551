"""When copies are written, and what becomes of a target that fails: never anything of the run."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from atoll.coordinator.copies import keeping
from atoll.coordinator.copies.keeping import Copies
from atoll.coordinator.copies.target import Superseded, TargetFailed
from atoll.coordinator.copies.writing import WrittenCopy
from atoll.coordinator.epochs import LEARN_S
from atoll.coordinator.report.plain import render_status
from atoll.coordinator.run.status import RunStatus


class Writer:
    """Fails while `failures` last; then each copy is one round further."""

    def __init__(self, *failures: Exception) -> None:
        self.failures = list(failures)
        self.position, self.num_pruned, self.moved_s = 0, 0, 0.0
        self.is_superseded = False

    def expect_newest(self) -> None:
        if self.is_superseded:
            raise Superseded("restored elsewhere")

    def write(self) -> WrittenCopy:
        if self.failures:
            raise self.failures.pop(0)
        self.position += 1
        return WrittenCopy(positions=(self.position,), wire_bytes=1)

    def prune(self) -> None:
        self.num_pruned += 1


def kept(writer: Any, **options: Any) -> tuple[Copies, list[tuple[str, str]]]:
    told: list[tuple[str, str]] = []
    return Copies(writer, lambda level, text: told.append((level, text)), **options), told


def failed(cause: Exception) -> TargetFailed:
    failure = TargetFailed("s3://secret-bucket: cannot be written")
    failure.__cause__ = cause
    return failure


def test_a_target_that_fails_is_reported_once_and_tried_ever_more_rarely() -> None:
    async def main() -> None:
        writer = Writer(*(failed(PermissionError()) for _ in range(3)), failed(OSError(28, "full")))
        copies, told = kept(writer)
        pauses = []
        for _ in range(4):
            await copies.copy()
            pauses.append(copies._pause_s())
        assert pauses == [20.0, 40.0, 80.0, 160.0]
        assert [level for level, _ in told] == ["warning", "warning"]
        assert "no permission" in told[0][1] and "it is full" in told[1][1]
        assert not any("secret-bucket" in text for _, text in told)
        assert copies.status.failing == "it is full" and copies.status.at is None
        assert copies.status.failing_since is not None
        await copies.copy()
        assert told[-1] == ("info", "copies work again: the newest is after round 1")
        assert (copies.status.failing, copies.status.position) == ("", 1)
        assert copies._pause_s() == 10.0

    asyncio.run(main())


def test_the_longest_pause_is_ten_minutes() -> None:
    async def main() -> None:
        copies, _ = kept(Writer(*(failed(TimeoutError()) for _ in range(20))))
        for _ in range(20):
            await copies.copy()
        assert copies._pause_s() == 600.0

    asyncio.run(main())


def test_a_fault_of_ours_ends_neither_copies_nor_run() -> None:
    async def main() -> None:
        copies, told = kept(Writer(ZeroDivisionError()))
        await copies.copy()
        assert copies.status.failing == "ZeroDivisionError" and told[0][0] == "warning"
        await copies.copy()
        assert copies.status.position == 1

    asyncio.run(main())


class Hanging(Writer):
    """A back end that never answers, as some do when a network is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.free = threading.Event()

    def write(self) -> WrittenCopy:
        self.free.wait(30)
        return super().write()


def test_a_target_that_hangs_is_reported_and_holds_up_no_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(keeping, "STUCK_S", 0.0)
    monkeypatch.setattr(keeping, "LAST_S", 0.05)

    async def main() -> None:
        writer = Hanging()
        copies, told = kept(writer, every_s=0.01)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(copies.run(), 0.1)
        assert copies.status.failing == "it does not answer"
        assert len(told) == 1
        await copies.close()
        writer.free.set()

    asyncio.run(main())


@pytest.mark.parametrize("hangs", [False, True])
def test_an_old_coordinator_ends_whatever_its_copies_do(hangs: bool) -> None:
    """An upload or a pause may take hours; the restored coordinator waits a minute."""

    async def main() -> None:
        writer = Hanging() if hangs else Writer()
        copies, _ = kept(writer, look_s=0.01)
        writer.is_superseded = True
        with pytest.raises(Superseded):
            await asyncio.wait_for(copies.run(), 5)
        if isinstance(writer, Hanging):
            writer.free.set()

    assert keeping.LOOK_S < LEARN_S
    asyncio.run(main())


def test_copies_that_take_long_are_rare() -> None:
    copies, _ = kept(Writer())
    copies._took_s = 600.0
    assert copies._pause_s() == 1800.0


def test_the_last_copy_is_written_at_the_end() -> None:
    async def main() -> None:
        writer = Writer()
        copies, _ = kept(writer)
        await copies.close()
        assert (writer.position, writer.num_pruned) == (1, 1)

    asyncio.run(main())


def test_atoll_status_shows_how_far_copies_are(sample: Any) -> None:
    def shown(**fields: Any) -> str:
        status = sample()
        copies = keeping.CopyStatus(**fields)
        raw = RunStatus(**{**vars(status), "copies": copies})
        lines = render_status(RunStatus.from_json(raw.to_json())).splitlines()
        return next(line for line in lines if line.startswith("  copies"))

    now = sample().now
    assert shown(at=now, position=7).split(maxsplit=1)[1] == "after round 7"
    assert shown(at=now - 60, position=7, failing="no permission").endswith(
        "after round 7, 1m 00s ago; failing: no permission"
    )
    assert shown(failing="it is full").endswith("none yet; failing: it is full")
    assert "copies" not in render_status(sample())
