"""The passes of one peer, in all the places where they are noted."""

from __future__ import annotations

from collections.abc import Iterator

from atoll.peer.pipeline.jobs import Jobs
from atoll.peer.pipeline.ledger import PassLedger, PassState
from atoll.peer.pipeline.messages import Outward, PassKey
from atoll.peer.pipeline.passes import HopRules, Pass, Phase
from atoll.peer.pipeline.steps import Steps

LINGER_SHARE = 1.0  # of the lifetime: what was sent at the last moment arrives within another one


class Books:
    """Passes by key, the ledger, the next step's microbatches, and the trainer's jobs."""

    def __init__(self, rules: HopRules) -> None:
        """Begin empty and draining."""
        self._rules = rules
        self._passes: dict[PassKey, Pass] = {}
        self._open: dict[PassKey, Pass] = {}
        self.ledger = PassLedger(
            max_passes=rules.max_passes,
            max_bytes=rules.max_bytes,
            linger_s=LINGER_SHARE * rules.lifetime_s,
        )
        self.steps = Steps(step_microbatches=rules.step_microbatches, staleness=rules.staleness)
        self.jobs = Jobs(rules.compute_ahead)
        self.is_draining = True

    def __iter__(self) -> Iterator[Pass]:
        """Return the open passes; they may be closed meanwhile."""
        return iter(list(self._open.values()))

    def __len__(self) -> int:
        """Return how many passes are open."""
        return len(self._open)

    def known(self, key: PassKey) -> Pass | None:
        """Return a pass that the ledger remembers."""
        return self._passes.get(key)

    def open(self, key: PassKey) -> Pass | None:
        """Return a pass that is in work."""
        return self._open.get(key)

    def has_room(self, direction: Outward) -> bool:
        """Return whether a new pass may be taken, as far as other work goes."""
        if self.is_draining or len(self._open) >= self._rules.max_in_flight:
            return False
        return direction == "evaluate" or self.steps.has_room

    def enter(self, one: Pass, *, sender: str) -> bool:
        """Take a new pass, if there is memory for it."""
        state = self.ledger.enter(
            one.key,
            sender=sender,
            num_bytes=self._rules.shape.held_bytes(one.rows, one.sequences),
            deadline_s=one.deadline_s,
        )
        if state is not PassState.NEW:
            return False
        self._passes[one.key] = self._open[one.key] = one
        if one.key.trains:
            self.steps.admit(one.key)
        return True

    def ended_job(self, key: PassKey) -> Pass | None:
        """Note that the trainer has ended a pass's job; return the pass if it is still in work."""
        return self._open.get(key) if self.jobs.end(key) else None

    def adds_gradients(self, one: Pass) -> bool:
        """Return whether the trainer is about to add up gradients of a pass."""
        return self.jobs.running(one.key) in ("loss", "backward")

    def close(self, one: Pass, phase: Phase) -> None:
        """End a pass as done or omitted; its name is remembered."""
        del self._open[one.key]
        one.phase = phase
        one.free()
        self.jobs.drop(one.key)
        if phase is Phase.OMITTED:
            self.steps.drop(one.key)
            self.ledger.spend(one.key)
            return
        if self.ledger.look(one.key) is PassState.IN_FLIGHT:
            self.ledger.spend(one.key)  # nobody will ask for a return of it
        if one.key.trains:
            self.steps.count(one.key)

    def forget(self, one: Pass) -> None:
        """Drop a pass of which nothing has arrived."""
        del self._open[one.key], self._passes[one.key]
        self.steps.drop(one.key)
        self.ledger.forget(one.key)

    def sweep(self, now_s: float) -> tuple[list[Pass], list[PassKey]]:
        """Return the passes whose time is over, and the names that are remembered no longer."""
        swept = self.ledger.sweep(now_s)
        expired = [self._passes[key] for key in swept.expired]
        for key in swept.forgotten:
            del self._passes[key]
        return expired, swept.forgotten
