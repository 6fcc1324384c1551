"""Where a replay reads a run: its newest status, and the one after an earlier round."""

from __future__ import annotations

from typing import Protocol

from atoll.coordinator.run.status import RunStatus


class RunArchive(Protocol):
    """A run that can be looked back at."""

    async def now(self) -> RunStatus:
        """Return the newest status."""
        ...

    async def at(self, position: int) -> RunStatus:
        """Return the status after a round of the last module; 0 for before the first."""
        ...
