"""The fit with which several ranks start again, as one of them was out of memory.

A process that trains alone just goes on with less; ranks that wait for each other start again.
"""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from atoll.peer.errors import SavedStateError
from atoll.peer.training import saved
from atoll.peer.training.fit import Fit
from atoll.peer.training.ranks import OneRank

KIND = "fit"


class RankFits:
    """Keeps a file a rank beside the trainer's state."""

    def __init__(
        self, state_path: Path | None, ranks: OneRank, *, device: str, run: Callable[[], str]
    ) -> None:
        """Keep nothing where nothing is saved, or for one process.

        Args:
            state_path: the file of the trainer's state.
            ranks: the processes that train as this peer.
            device: name of this rank's device; the fit is that of a device.
            run: returns the digest of the run that the file belongs to.
        """
        self._ranks, self._device, self._run = ranks, device, run
        self._path: Path | None = None
        if state_path is not None and ranks.size > 1:
            name = f"{state_path.stem}.{ranks.rank}.fit{state_path.suffix}"
            self._path = state_path.with_name(name)

    def remember(self, fit: Fit) -> None:
        """Let the next start of all ranks begin with a fit."""
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            tree = {"device": self._device, "fit": fit.to_dict()}
            saved.save(self._path, tree, kind=KIND, run=self._run())

    def least(self, own: Fit, batch_size: int) -> Fit:
        """Return the least fit that a rank remembers; `own` for one process. All ranks ask.

        Args:
            own: with which this rank would start.
            batch_size: sequences of a whole micro-batch of the run.
        """
        if self._path is None:
            return own
        if self._path.exists():
            with suppress(SavedStateError):  # it is found again
                tree = saved.load(self._path, kind=KIND, run=self._run())
                if tree["device"] == self._device:
                    own = Fit.least([own, Fit.from_dict(tree["fit"], batch_size)])
        found = [Fit.from_dict(plain, batch_size) for plain in self._ranks.gathered(own.to_dict())]
        agreed = self._ranks.agreed(Fit.least(found).to_dict() if found else None)
        return Fit.from_dict(agreed, batch_size)
