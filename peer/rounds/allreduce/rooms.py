"""The memory of a reduction: values and bytes of its parts, side by side.

All parts are decoded into one vector, and their bytes come to lie in one buffer, so neither the
update nor the body of its entry is ever copied together. Both are made on first use: rounds that
begin again overlap, and a reduction that has brought nothing takes no memory.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from torch import Tensor

from atoll.optim.reduction.cells import Bytes
from atoll.optim.state import vectors


class PartBytes:
    """The bytes of one part, piece after piece."""

    def __init__(self, memory: memoryview | None = None) -> None:
        """Lay the pieces in `memory`, which holds the longest part; without it, keep each apart."""
        self._memory = memory
        self._pieces: list[bytes] = []
        self._stop = 0

    def add(self, piece: bytes) -> Bytes:
        """Keep a piece; return it as it is kept."""
        if self._memory is None:
            self._pieces.append(piece)
            return piece
        start, self._stop = self._stop, self._stop + len(piece)
        self._memory[start : self._stop] = piece
        return self._memory[start : self._stop].toreadonly()

    def whole(self) -> Bytes:
        """Return all pieces as one."""
        if self._memory is None:
            return b"".join(self._pieces)
        return self._memory[: self._stop].toreadonly()


class Room(NamedTuple):
    """The place of one part, for whoever reduces or receives it; it takes memory when asked."""

    values: Callable[[], Tensor]
    """Makes room for the part's values."""
    bytes: Callable[[], PartBytes]
    """Makes room for its bytes."""


def room_alone(count: int) -> Room:
    """Return a place for a part of so many values, beside no other part."""
    return Room(partial(vectors.empty, count), PartBytes)


class Rooms:
    """The memory of one group's update."""

    def __init__(
        self,
        values: Sequence[slice],
        most_bytes: Sequence[int],
        allocate: vectors.Allocate = vectors.empty,
    ) -> None:
        """Divide it into parts.

        Args:
            values: of each part, within the update.
            most_bytes: length of the longest body of each part. If all of them are that long, they
                lie in the buffer as they do in the entry's body. Empty: pieces are kept apart.
            allocate: makes the vector of the values.
        """
        self._values = values
        self._allocate = allocate
        self._starts = [0, *itertools.accumulate(most_bytes)]
        self._lock = threading.Lock()  # parts are reduced in several threads
        self._update_F: Tensor | None = None
        self._body: memoryview | None = None

    def room(self, part: int) -> Room:
        """Return the place of a part."""
        bytes_of = partial(self._bytes_of, part) if len(self._starts) > 1 else PartBytes
        return Room(partial(self._values_of, part), bytes_of)

    @property
    def is_made(self) -> bool:
        """Return whether it takes memory."""
        return self._update_F is not None or self._body is not None

    def _values_of(self, part: int) -> Tensor:
        with self._lock:
            if self._update_F is None:
                self._update_F = self._allocate(self._values[-1].stop)
        return self._update_F[self._values[part]]

    def _bytes_of(self, part: int) -> PartBytes:
        with self._lock:
            if self._body is None:
                self._body = vectors.buffer(self._starts[-1])
        return PartBytes(self._body[self._starts[part] : self._starts[part + 1]])


def joined(pieces: Sequence[Bytes]) -> Bytes:
    """Join bytes: to a view if they lie so in one memory, else to a copy."""
    if len(pieces) < 2 or not all(isinstance(piece, memoryview) and piece for piece in pieces):
        return b"".join(pieces) if len(pieces) != 1 else pieces[0]
    views = [memoryview(piece) for piece in pieces]
    memory = memoryview(views[0].obj)
    start = stop = _address(views[0]) - _address(memory)
    for view in views:
        if view.obj is not memory.obj or _address(view) - _address(memory) != stop:
            return b"".join(views)
        stop += len(view)
    return memory[start:stop].toreadonly()


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, dtype=np.uint8).ctypes.data)
