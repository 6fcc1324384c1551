"""What happens in a run as records with fields, for programs: one a round, one an event.

    {"kind": "round", "position": 37, "at": 1790000666.2, "loss": 1.42, "tokens": 307200, ...}
    {"kind": "event", "at": 1790000667.0, "level": "warning", "source": "12D3K...", "text": ...}
    {"kind": "state", "at": 1790000000.0, "state": "training", "peers": 5, "position": 0}

A round has the fields of `RoundSummary`, an event those of `Event`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from atoll.coordinator.report.feed import INTERVAL_S, Feed, FeedError, pause_s, read
from atoll.coordinator.report.plain import is_older, is_over, new_events, settled_rounds
from atoll.coordinator.report.view import num_present
from atoll.coordinator.run.status import RunStatus, StatusRecord

Record = dict[str, Any]


def records(previous: RunStatus | None, current: RunStatus) -> list[Record]:
    """Return what happened between two states; a round once its members have reported."""
    if previous is not None and is_older(current, previous):
        return []
    found = [_record("event", event) for event in new_events(previous, current)]
    found += [_record("round", row) for row in settled_rounds(previous, current)]
    found.sort(key=lambda record: float(record["at"]))
    state = (current.state, num_present(current))
    if previous is None or (previous.state, num_present(previous)) != state:
        found.append(
            {
                "kind": "state",
                "at": current.now,
                "state": current.state,
                "peers": num_present(current),
                "position": current.position,
            }
        )
    return found


def _record(kind: str, record: StatusRecord) -> Record:
    fields: Record = json.loads(record.to_json())
    return {"kind": kind} | fields


async def follow(
    feed: Feed,
    write: Callable[[Record], None],
    *,
    interval_s: float = INTERVAL_S,
    since: RunStatus | None = None,
) -> RunStatus:
    """Pass on the records of a run until it has finished; a lost connection shows as a gap in time.

    Args:
        feed: reads the status of the run.
        write: takes one record.
        interval_s: seconds from one reading to the next.
        since: what is known of the run already; by default all that it remembers is written.

    Returns:
        The last status of the finished run.
    """
    previous, num_failures = since, 0
    while True:
        try:
            current = await read(feed)
        except FeedError:
            num_failures += 1
        else:
            num_failures = 0
            for record in records(previous, current):
                write(record)
            if is_over(current):
                return current
            if previous is None or not is_older(current, previous):
                previous = current
        await asyncio.sleep(pause_s(previous, num_failures, interval_s))
