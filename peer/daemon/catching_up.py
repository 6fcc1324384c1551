"""Catching up with the log, and reporting while that takes long."""

from __future__ import annotations

from collections.abc import Callable

from atoll.coordinator.rpc.client_errors import CoordinatorError
from atoll.coordinator.run.levels import Level
from atoll.dht.identity import short
from atoll.optim.log.entry import LogError
from atoll.optim.log.live import Recovered, RecoveryError
from atoll.peer.recovery.recovery import Recovery
from atoll.peer.recovery.sources import CoordinatorSource
from atoll.peer.rounds.context import Context

LASTS_S = 15.0  # a run that begins, or an epoch, has given everybody what is missing by then
AGAIN_S = 60.0


class CatchingUp:
    """Brings the replica to the head of the log."""

    def __init__(
        self,
        ctx: Context,
        recovery: Recovery,
        *,
        on_recovered: Callable[[], None],
        on_leap: Callable[[], None],
    ) -> None:
        """Call `on_leap` when the replica moved other than by the entries in between."""
        self._ctx = ctx
        self._recovery = recovery
        self._on_recovered = on_recovered
        self._on_leap = on_leap
        self._patience = Patience()

    async def run(self) -> None:
        """Recover once; if that fails, report it and leave it to the next time."""
        before = self._ctx.replica.leaps
        try:
            recovered = await self._recovery.run()
        except (RecoveryError, CoordinatorError, LogError) as error:
            self.say_waiting(f"cannot catch up yet: {error}")
        else:
            self._patience.over()
            if recovered is not None:
                self._on_recovered()
                self._ctx.on_event("info", _account(recovered))
        # Also after a failure: a recovery that leapt and then found no donor has left the old
        # position behind, and the trainer would continue from parameters that nobody else has.
        if self._ctx.replica.leaps != before:
            self._on_leap()

    def say_waiting(self, text: str) -> None:
        """Report that something is missing, as loudly as its duration asks."""
        level = self._patience.level(self._ctx.now())
        if level is not None:
            self._ctx.on_event(level, text)


class Patience:
    """How loudly to report a wait: most are over before anyone has to act."""

    def __init__(self) -> None:
        """Start without a wait."""
        self._since_s: float | None = None
        self._warn_at_s = 0.0

    def level(self, now_s: float) -> Level | None:
        """Return the level at which to report that the wait continues; None for not at all.

        First it is a fact, then a warning once it lasts, and another every `AGAIN_S`.
        """
        if self._since_s is None:
            self._since_s, self._warn_at_s = now_s, now_s + LASTS_S
            return "info"
        if now_s < self._warn_at_s:
            return None
        self._warn_at_s = now_s + AGAIN_S
        return "warning"

    def over(self) -> None:
        """End the wait."""
        self._since_s = None


def _account(recovered: Recovered) -> str:
    how = f"{recovered.entries} entries"
    if recovered.snapshot_position is not None:
        how = f"the snapshot at {recovered.snapshot_position} and {how}"
    donors = (d if d == CoordinatorSource.name else short(d) for d in recovered.donors)
    return (
        f"recovered from position {recovered.from_position} to {recovered.to_position}: "
        f"{how} from {', '.join(donors) or 'nobody'} in {recovered.seconds:.1f} s"
    )
