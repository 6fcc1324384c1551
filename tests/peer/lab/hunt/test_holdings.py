"""What a process holds is found wherever it hangs, and nothing of others is."""

import asyncio
from collections import deque
from typing import Any

import torch

from atoll.peer.lab.hunt.holdings import held_by


class Keeper:
    def __init__(self) -> None:
        self.seen = {1, 2, 3}
        self.tables: dict[str, Any] = {"a": [1, 2], "b": deque(range(9))}
        self.spare = torch.zeros(10)
        self.same = self.spare[:5]
        self.body = bytearray(7)
        self.me = self


class Slotted:
    __slots__ = ("kept",)

    def __init__(self) -> None:
        self.kept = [0] * 6


def test_containers_have_the_labels_of_their_attributes() -> None:
    found = held_by([("root", Keeper())])
    assert found.largest == {"Keeper.seen": 3, "Keeper.tables": 2, "Keeper.tables[]": 9}


def test_a_buffer_that_is_shared_counts_once() -> None:
    assert held_by([("root", Keeper())]).num_bytes == 40 + 7


def test_slots_closures_and_methods_are_looked_into() -> None:
    rows = [0] * 4
    assert held_by([("root", Slotted())]).largest == {"Slotted.kept": 6}
    assert held_by([("root", lambda: rows)]).largest == {"root": 4}
    assert held_by([("root", Slotted().__init__)]).largest == {"Slotted.kept": 6}


def test_tasks_and_what_they_hold_are_found() -> None:
    async def wait(rows: list[int]) -> None:
        await asyncio.sleep(60.0)

    async def look() -> None:
        task = asyncio.create_task(wait([0] * 5))
        await asyncio.sleep(0)
        found = held_by([("root", {task})])
        task.cancel()
        assert found.num_tasks == 1
        assert max(n for label, n in found.largest.items() if "wait()" in label) == 5

    asyncio.run(look())


def test_what_is_foreign_is_left_out() -> None:
    other = Slotted()
    found = held_by([("root", [other])], lambda value: value is other)
    assert found.largest == {"root": 1}
