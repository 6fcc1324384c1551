"""A feed: any coroutine function that returns the current `RunStatus`.

Exceptions:

    RuntimeError
      FeedError      the status could not be read this time; gives the reason in one line
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from atoll.coordinator.run.status import RunStatus
from atoll.coordinator.run.text import clean

Feed = Callable[[], Awaitable[RunStatus]]

INTERVAL_S = 1.0  # peers report about as often; a shorter one would redraw the same numbers
TIMEOUT_S = 5.0  # a coordinator that takes longer is shown as lost, and is asked again
RETRY_MAX_S = 5.0  # the longest a user waits to see a restored connection


class FeedError(RuntimeError):
    """The run's status could not be read this time."""


async def read(feed: Feed) -> RunStatus:
    """Read the status once. Raises FeedError if the feed raises anything or takes too long."""
    try:
        return await asyncio.wait_for(feed(), TIMEOUT_S)
    except TimeoutError:
        reason = f"no answer within {TIMEOUT_S:.0f} s"
    except Exception as error:  # the screen must outlive whatever a feed raises
        reason = clean(error) or type(error).__name__
    raise FeedError(f"cannot read the status of the run: {reason}")


def pause_s(status: RunStatus | None, num_failures: int, interval_s: float) -> float:
    """Return the pause before the next look: as the coordinator asks, longer after failures."""
    asked_s = status.look_every_s if status is not None else 0.0
    return retry_s(num_failures, max(interval_s, asked_s))


def retry_s(num_attempts: int, interval_s: float) -> float:
    """Return the pause after this many failures in a row: doubling up to a limit, without end."""
    return min(max(RETRY_MAX_S, interval_s), interval_s * 2.0 ** min(num_attempts, 8))
