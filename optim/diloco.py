"""DiLoCo in the user's own loop: train alone for a window, then meet the others.

    drift    synced - local; at the end of a window it is the pseudo-gradient delta

Each commit moves local, and counts a contribution once:

    pieces with my contribution   local = synced_new + (local - local at submission)
    all other pieces              local += synced_new - synced_old
"""

from dataclasses import replace

from torch import Tensor

from atoll.optim.fragments import Fragment
from atoll.optim.reducer import Commit
from atoll.optim.worker import Window, Worker


class DiLoCo(Worker):
    """DiLoCo (arXiv:2311.08105): inner steps by any optimizer, outer steps by the reducer.

    Departures: the outer optimizer lives with the log, so that all replicas apply the same
    bytes; a peer whose contribution is left out trains on and contributes both windows at once.
    """

    def _delta(self, fragment: Fragment, local_N: Tensor) -> Tensor:
        return fragment.take(self._synced_N) - fragment.take(local_N)

    def _follow(self, commit: Commit, window: Window) -> None:
        """Move local by the two rules at the top of this module."""
        fragment, pending = self.fragments[commit.fragment], window.pending
        mine = [False] * len(fragment.pieces)
        if commit.included is not None and pending is not None:
            mine = commit.included.tolist()
        local_N = self.layout.flatten(self.model)
        local_F = fragment.take(local_N)
        new_F, old_F = fragment.take(commit.params_N), fragment.take(self._synced_N)
        pending_F = None if pending is None else pending.local_N.clone()
        for piece, included in zip(fragment.slices, mine, strict=True):
            if included and pending_F is not None:
                local_F[piece] = self._merged(new_F[piece], local_F[piece], pending_F[piece])
                continue
            local_F[piece] += new_F[piece] - old_F[piece]
            if pending_F is not None:
                pending_F[piece] += new_F[piece] - old_F[piece]
        fragment.put_(local_N, local_F)
        self.layout.load_(self.model, local_N)
        if pending is not None and pending_F is not None:
            window.pending = replace(pending, local_N=pending_F)

    def _merged(self, new: Tensor, local: Tensor, submitted: Tensor) -> Tensor:
        """Local where my contribution is in: the new synced values and what was trained since."""
        return new + (local - submitted)
