"""How loudly to say what keeps a peer waiting: most waits are over before anyone has to act."""

from atoll.coordinator.run.levels import Level

LASTS_S = 15.0  # a run that begins, or an epoch, has given everybody what is missing by then
AGAIN_S = 60.0


class Patience:
    """Of one wait, which may come again."""

    def __init__(self) -> None:
        """Nothing is waited for."""
        self._since_s: float | None = None
        self._warn_at_s = 0.0

    def level(self, now_s: float) -> Level | None:
        """At which level to say that the wait goes on; None where there is no need to.

        At first it is a fact, a warning once it lasts, and then again now and then.
        """
        if self._since_s is None:
            self._since_s, self._warn_at_s = now_s, now_s + LASTS_S
            return "info"
        if now_s < self._warn_at_s:
            return None
        self._warn_at_s = now_s + AGAIN_S
        return "warning"

    def over(self) -> None:
        """What was waited for has come."""
        self._since_s = None
