"""Rosters of one process, without a DHT; time is the event loop's."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from atoll.dht.roster import PeerRecord


class MemoryBoard:
    """The records that the rosters of one test share."""

    def __init__(self) -> None:
        self.records: dict[str, PeerRecord] = {}

    def roster(self, peer_id: str) -> MemoryRoster:
        """Return one peer's view."""
        return MemoryRoster(self, peer_id)


class MemoryRoster:
    """A `Roster` without a network: every peer sees a new record at once."""

    def __init__(self, board: MemoryBoard, peer_id: str) -> None:
        self._board = board
        self._peer_id = peer_id

    async def publish(self, record: PeerRecord, ttl_s: float) -> None:
        """Replace our record for the next `ttl_s` seconds of the loop's time."""
        if record.peer_id != self._peer_id:
            raise ValueError(f"record of {record.peer_id}, expected {self._peer_id}")
        expires_at = asyncio.get_running_loop().time() + ttl_s
        self._board.records[self._peer_id] = replace(record, expires_at=expires_at)

    async def peers(self) -> dict[str, PeerRecord]:
        """Return the records that have not expired."""
        now = asyncio.get_running_loop().time()
        return {name: r for name, r in self._board.records.items() if r.expires_at > now}

    async def leave(self) -> None:
        """Remove our record."""
        self._board.records.pop(self._peer_id, None)

    def question(self) -> bytes:
        """Return nothing: all records are on the board."""
        return b""

    async def answer(self, question: bytes, remote: str = "") -> bytes:
        """Return nothing."""
        return b""

    async def hear(self, answer: bytes) -> None:
        """Do nothing."""
