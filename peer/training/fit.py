"""The share of a step's batch that a device holds at once: the run's batch stays what it is.

The batch of a step is cut into pieces of whole sequences. The gradients of the pieces add up to
that of the batch, each weighted by its sequences, so it equals the gradient of the whole batch up
to rounding, however small the pieces are and however short the last one is.

A device that runs out of memory takes pieces of half the size. If single sequences are too much, it
recomputes the activations of blocks in the backward pass, and starts again from whole batches.

# B sequences, T positions
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from atoll.peer.errors import SavedStateError


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A way to compute the gradient of a step in the memory of a device."""

    sequences: int
    """Sequences of a piece, at most."""
    recompute: bool = False
    """Whether blocks compute their activations again in the backward pass, instead of keeping
    them."""

    def smaller(self, batch_size: int, *, can_recompute: bool) -> "Fit | None":
        """Return what needs less memory; None if this is the least.

        Args:
            batch_size: sequences of a whole micro-batch of the run.
            can_recompute: whether the model has blocks that can.
        """
        if self.sequences > 1:
            return replace(self, sequences=self.sequences // 2)
        if can_recompute and not self.recompute:
            return Fit(sequences=batch_size, recompute=True)
        return None

    @staticmethod
    def least(fits: "Sequence[Fit]") -> "Fit":
        """Return the one that needs the least memory."""
        return max(fits, key=lambda fit: (fit.recompute, -fit.sequences))

    def __str__(self) -> str:
        """Name it for a person."""
        noun = "sequence" if self.sequences == 1 else "sequences"
        again = ", activations recomputed" if self.recompute else ""
        return f"{self.sequences} {noun} at a time{again}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for a saved state."""
        return asdict(self)

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any], batch_size: int) -> "Fit":
        """Return what `to_dict` gave.

        Raises:
            SavedStateError: it is something else, or of another batch.
        """
        sequences, recompute = plain.get("sequences"), plain.get("recompute")
        if type(sequences) is not int or type(recompute) is not bool:
            raise SavedStateError(f"expected sequences and recompute of a fit, got {dict(plain)}")
        if not 1 <= sequences <= batch_size:
            raise SavedStateError(f"expected 1 to {batch_size} sequences, got {sequences}")
        return cls(sequences=sequences, recompute=recompute)


def pieces(batches: Sequence[Tensor], sequences: int) -> list[Tensor]:
    """Cut the micro-batches of a step into pieces of at most so many sequences."""
    return [piece for batch in batches for piece in torch.split(batch, sequences)]
