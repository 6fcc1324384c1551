"""Where the screen's states come from: any function that can be awaited for a `RunStatus`.

Exceptions:

    RuntimeError
      FeedError      the state could not be read this time; says why in one line
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from atoll.coordinator.report.text import clean
from atoll.coordinator.run.status import RunStatus

Feed = Callable[[], Awaitable[RunStatus]]

INTERVAL_S = 1.0  # peers report about as often; faster would redraw the same numbers
TIMEOUT_S = 5.0  # a coordinator that takes longer is shown as lost, and asked again
RETRY_MAX_S = 5.0  # a person watching sees the connection return within this


class FeedError(RuntimeError):
    """The state could not be read this time."""


async def read(feed: Feed) -> RunStatus:
    """Read the state once. Raises FeedError, whatever the feed raised or however long it takes."""
    try:
        return await asyncio.wait_for(feed(), TIMEOUT_S)
    except TimeoutError:
        reason = f"no answer within {TIMEOUT_S:.0f} s"
    except Exception as error:  # whatever a feed raises, the screen outlives it
        reason = clean(error) or type(error).__name__
    raise FeedError(f"cannot read the state of the run: {reason}")


def retry_s(num_attempts: int, interval_s: float) -> float:
    """How long to wait after this many failures in a row: doubling, to a limit, for ever."""
    return min(max(RETRY_MAX_S, interval_s), interval_s * 2.0 ** min(num_attempts, 8))
