"""DiLoCo in the user's own loop: train alone for a window, then meet the others.

    drift    synced - local; at the end of a window it is the pseudo-gradient delta. Of parameters
             in bf16 it is what they lack of synced as bf16 holds it

Each commit moves local, and counts a contribution once:

    pieces with my contribution   local = synced_new + (local - local at submission)
    all other pieces              local += synced_new - synced_old
"""

from dataclasses import replace

import torch
from torch import Tensor

from atoll.optim.reducer import Commit
from atoll.optim.state.difference import Difference
from atoll.optim.workers.windows import Window
from atoll.optim.workers.worker import Worker


class DiLoCo(Worker):
    """DiLoCo (arXiv:2311.08105): inner steps by any optimizer, outer steps by the reducer.

    Departures: the outer optimizer lives with the log, so that all replicas apply the same
    bytes; a peer whose contribution is left out trains on and contributes both windows at once.
    """

    def _delta(self, index: int, local_F: Tensor) -> Difference:
        return Difference(self.fragments[index], self._held(index), local_F)

    def _follow(self, commit: Commit, new_F: Tensor, window: Window) -> None:
        """Move local by the two rules at the top of this module, parameter by parameter."""
        fragment, pending = self.fragments[commit.fragment], window.pending
        old_F = self._held(commit.fragment)
        vectors = [new_F, old_F]
        if pending is not None and commit.included is not None:
            vectors.append(pending.local_N)
            if not bool(commit.included.all()):
                vectors.append(fragment.mask(commit.included))
        with torch.no_grad():
            for param, place in self.layout.parameters_in(self.model, fragment.spans):
                self._move_(param, *(v[place].view(param.shape).to(param.device) for v in vectors))
        if pending is not None and not commit.settles:
            window.pending = replace(pending, local_N=pending.local_N + (new_F - old_F))

    def _move_(
        self,
        param: Tensor,
        new: Tensor,
        old: Tensor,
        submitted: Tensor | None = None,
        mine: Tensor | None = None,
    ) -> None:
        local = param.to(torch.float32)
        if submitted is None:
            local.add_(new - old)
        elif mine is None:
            self._merge_(local, new, submitted)
        else:
            others = local + (new - old)
            self._merge_(local, new, submitted)
            local.copy_(torch.where(mine, local, others))
        if local is not param:
            param.copy_(local)

    def _merge_(self, local: Tensor, new: Tensor, submitted: Tensor) -> None:
        """Local where my contribution is in: the new synced values and what was trained since."""
        local.sub_(submitted).add_(new)
