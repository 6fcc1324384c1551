"""The seam between a pipeline's hop and the trainer of its stage: jobs one way, results the other.

The hop gives jobs in their order, and the trainer reports each result by name. Where the two are in
processes of their own, each has a workbench, and a channel carries what they hold.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from typing import Any

from atoll.peer.pipeline.actions import MicrobatchEnded, RunJob, SettleHeld, TakeStep

Job = RunJob | TakeStep | SettleHeld | MicrobatchEnded
"""A trainer's job: a computation, or the end of an evaluation that it asked for."""

Report = Callable[[str, Sequence[Any], dict[str, Any]], None]
"""Takes the name of a result, its values, and those that have names."""


class Workbench:
    """The jobs of the trainer's thread; safe in any."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._report: Report | None = None

    def put(self, job: Job) -> None:
        """Give the trainer a job."""
        self._jobs.put(job)

    def take(self, timeout_s: float) -> Job | None:
        """Return the next job, None if none comes in time; called by the trainer."""
        try:
            return self._jobs.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def report(self, result: str, *values: Any, **named: Any) -> None:  # noqa: ANN401 - of `Hop`
        """Pass a result to the hop's method of that name; called by the trainer."""
        if self._report is not None:
            self._report(result, values, named)

    def report_to(self, report: Report) -> None:
        """Take results from now on."""
        self._report = report
