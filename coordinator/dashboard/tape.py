"""A replay's place in a run: a machine that is told how much time has passed."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Final

SPEEDS: Final = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 500.0, 2000.0)
"""Rounds a second."""
SCREENS_PER_S: Final = 8.0  # at most; a faster replay skips rounds
CPU_SHARE: Final = 0.12  # of a core, for a replay that plays: hundreds of peers take 50 ms a screen
LONGEST_S: Final = 2.0  # between two screens, however much keys have cost in between
_JUMP = re.compile(r"(?P<sign>[+-]?)(?P<number>\d{1,12}(?:\.\d+)?)(?P<percent>%?)")


@dataclass
class Thrift:
    """Spaces screens so that drawing them takes at most a share of a core."""

    share: float = CPU_SHARE
    _at_s: float = -math.inf
    _cpu_s: float = 0.0

    def allows(self, now_s: float, cpu_s: float) -> bool:
        """Return whether the next screen may be drawn, and count from here if so.

        Args:
            now_s: on any steady clock.
            cpu_s: that the process has used so far.
        """
        waited_s = now_s - self._at_s
        if cpu_s - self._cpu_s > self.share * waited_s and waited_s < LONGEST_S:
            return False
        self._at_s, self._cpu_s = now_s, cpu_s
        return True


@dataclass
class Tape:
    """Where a replay is, and how fast it goes."""

    total: int
    """Rounds that there are."""
    at: float = 0.0
    speed: float = 5.0
    is_playing: bool = False

    @property
    def position(self) -> int:
        """The round after which the run is shown; 0 before the first."""
        return int(self.at)

    @property
    def done(self) -> float:
        """The part of the run that is behind, 0 to 1."""
        return self.position / self.total if self.total else 0.0

    def advance(self, seconds: float) -> None:
        """Let time pass; at the end the replay stops."""
        if self.is_playing:
            self.go_to(self.at + self.speed * seconds)
            self.is_playing = self.at < self.total

    def extend(self, total: int) -> None:
        """Take note of the rounds that there are now."""
        self.total = max(self.total, total)

    def toggle(self) -> None:
        """Play or pause; from the end, play again from the start."""
        self.is_playing = not self.is_playing
        if self.is_playing and self.position >= self.total:
            self.at = 0.0

    def step(self, rounds: int) -> None:
        """Pause, and go some rounds on or back."""
        self.is_playing = False
        self.go_to(self.position + rounds)

    def go_to(self, position: float) -> None:
        """Go to a round within the run."""
        self.at = min(max(0.0, position), float(self.total))

    def change_speed(self, by: int) -> None:
        """Choose the next speed up or down."""
        index = SPEEDS.index(self.speed) + by
        self.speed = SPEEDS[min(max(0, index), len(SPEEDS) - 1)]

    def jump(self, told: str) -> bool:
        """Go where a text says: 120, 40%, +10 or -5%; return whether it could be read."""
        found = _JUMP.fullmatch(told.replace(" ", "").replace(",", ""))
        if found is None:
            return False
        number = float(found["number"])
        rounds = number / 100 * self.total if found["percent"] else number
        if found["sign"]:
            rounds = self.position + (rounds if found["sign"] == "+" else -rounds)
        self.go_to(round(rounds))
        return True
