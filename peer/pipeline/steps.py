"""When a peer of a stage takes an inner step, and how many microbatches it may have in flight.

A step is due after `step_microbatches` have been counted. With `staleness` k no gradient is added
at a version of the parameters more than k steps newer than that of its forward. At k = 0 a peer
takes only as many forwards as the step still lacks, and so has none in flight when it steps.
"""

from __future__ import annotations

from atoll.peer.pipeline.messages import PassKey


class Steps:
    """The microbatches of the next step, by the version of their forward."""

    def __init__(self, *, step_microbatches: int, staleness: int) -> None:
        """Begin at version 0."""
        if step_microbatches < 1 or staleness < 0:
            raise ValueError(
                "expected step_microbatches >= 1 and staleness >= 0, "
                f"got {step_microbatches} and {staleness}"
            )
        self._size, self._staleness = step_microbatches, staleness
        self._version_of: dict[PassKey, int | None] = {}
        """of the passes in flight; None before their forward"""
        self.version = 0
        self.counted = 0
        """microbatches since the last step"""
        self._is_being_taken = False

    @property
    def has_room(self) -> bool:
        """Return whether another microbatch may be taken."""
        most = self._size * (1 + self._staleness)
        return self.counted + len(self._version_of) < most

    @property
    def stands_still(self) -> bool:
        """Return whether a microbatch would wait until a step is taken, and a round with it.

        Others of the stage may still lack it for theirs, and would wait for it in vain.
        """
        return self._is_being_taken and not self._staleness

    @property
    def is_due(self) -> bool:
        """Return whether a step may be taken now."""
        if self.counted < self._size:
            return False
        oldest = min((v for v in self._version_of.values() if v is not None), default=None)
        return oldest is None or self.version + 1 - oldest <= self._staleness

    @property
    def num_in_flight(self) -> int:
        """Return how many microbatches are neither counted nor dropped."""
        return len(self._version_of)

    def admit(self, key: PassKey) -> None:
        """Take a microbatch."""
        self._version_of[key] = None

    def begin_forward(self, key: PassKey) -> None:
        """Note that its forward runs at the present version."""
        if key in self._version_of:
            self._version_of[key] = self.version

    def count(self, key: PassKey) -> None:
        """Add a microbatch to the step."""
        if key in self._version_of:
            del self._version_of[key]
            self.counted += 1

    def drop(self, key: PassKey) -> None:
        """Give a microbatch up."""
        self._version_of.pop(key, None)

    def take(self) -> int:
        """Take the step; return how many microbatches are in it."""
        taken, self.counted = self.counted, 0
        self.version += 1
        self._is_being_taken = True
        return taken

    def taken(self) -> None:
        """Note that the step is taken."""
        self._is_being_taken = False
