"""Whether a peer is in touch with its coordinator, and what its owner hears of that."""

from __future__ import annotations

from importlib.metadata import version

from atoll.coordinator.rpc.client_errors import CoordinatorError, CoordinatorUnreachable
from atoll.coordinator.run.releases import is_newer
from atoll.peer import notices
from atoll.peer.rounds.context import OnEvent


class Touch:
    """Reports each loss of touch once, as the coordinator may be away for days.

    A coordinator that is updated is first away and then, if its protocol is another one, refuses
    this peer. The owner has to hear of both: only the refusal names a remedy.
    """

    def __init__(self, report: OnEvent, *, in_touch: bool) -> None:
        """Begin in touch, or with a coordinator whose absence has been reported."""
        self.in_touch = in_touch
        self._report = report
        self._reported: set[type[CoordinatorError]] = set()
        """Kinds of failures since the last answer."""
        if not in_touch:
            self._reported.add(CoordinatorUnreachable)
        self._release = ""
        """The newest version that was reported."""

    def answered(self, release: str) -> None:
        """Note an answer of a coordinator of that version, which may be empty."""
        if not self.in_touch:
            self._report("info", notices.coordinator_back())
        self.in_touch = True
        self._reported.clear()
        ours = version("atoll")
        if release != self._release and is_newer(release, ours):
            self._release = release
            self._report("info", notices.newer_release(theirs=release, ours=ours))

    def failed(self, error: CoordinatorError) -> None:
        """Note a call that failed."""
        self.in_touch = False
        if type(error) not in self._reported:
            self._reported.add(type(error))
            self._report("warning", notices.coordinator_lost(reason=str(error)))
