"""A keeper: it leads and votes, and serves the log; it needs no model, no data and no trainer.

A trainer draws a new incarnation at each start, as it forgets what it voted for. A keeper keeps its
incarnation with the furthest place at which it may have voted or proposed, so that a restart costs
at most its vote at one position, and no epoch. `ballots.json` in the state directory, synced before
anything is signed at a further place:

    incarnation    drawn when the file was made
    epoch          of the furthest place; -1 before the first vote
    position       of the furthest place; -1 before the first vote

Without the file, or if it is damaged, the keeper is a new elector, which votes from the next epoch
on. A copy of an older file, put back, makes the keeper sign twice, and the others bar it for good.
"""

from __future__ import annotations

import json
import os
import random
from dataclasses import dataclass
from pathlib import Path

from atoll.peer.rounds.consensus.ballots import NOWHERE, Ballots, Place


def new_incarnation() -> str:
    """Return what tells one start of an elector from all others."""
    return f"{random.SystemRandom().getrandbits(128):032x}"


@dataclass(frozen=True, kw_only=True)
class KeptBallots:
    """The incarnation of a keeper and its furthest place, in a file."""

    path: Path
    incarnation: str
    left: Place

    @classmethod
    def open(cls, path: Path) -> KeptBallots:
        """Read the file, or begin one.

        Raises:
            OSError: it cannot be read or written.
        """
        try:
            fields = json.loads(path.read_bytes())
            left = Place(int(fields["epoch"]), int(fields["position"]))
            return cls(path=path, incarnation=str(fields["incarnation"]), left=left)
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            kept = cls(path=path, incarnation=new_incarnation(), left=NOWHERE)
            kept.keep(NOWHERE)
            return kept

    def ballots(self) -> Ballots:
        """Return the memory of a process that starts now."""
        return Ballots(left=self.left, keep=self.keep)

    def keep(self, place: Place) -> None:
        """Write a place, whole or not at all, and sync it. Raises OSError."""
        fields = {
            "incarnation": self.incarnation,
            "epoch": place.epoch,
            "position": place.position,
        }
        partial = self.path.with_suffix(".new")
        with partial.open("wb") as file:
            file.write(json.dumps(fields).encode())
            file.flush()
            os.fsync(file.fileno())
        partial.replace(self.path)
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # or a loss of power could bring the old name back
        finally:
            os.close(folder)
