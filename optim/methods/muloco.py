"""`muloco`: DiLoCo with Muon inside (arXiv:2505.23725).

Matrices are trained by Muon, everything else by AdamW; the outer step is DiLoCo's. The paper's
outer constants for one worker are the defaults, its H is 30. Its 4-bit pseudo-gradients lose
nothing: `codec=int4`; 2 bits need bins by statistics: `codec=2bit`.
"""

from dataclasses import dataclass
from typing import ClassVar

from atoll.optim.methods.base import InnerName, register
from atoll.optim.methods.diloco import DiLoCoMethod


@register
@dataclass(frozen=True, kw_only=True)
class MuLoCoMethod(DiLoCoMethod):
    """DiLoCo whose inner optimizer is Muon."""

    name: ClassVar[str] = "muloco"
    inner: ClassVar[InnerName] = "muon"

    lr: float = 0.7
    """Outer learning rate."""

    momentum: float = 0.6
    """Outer momentum."""

    @classmethod
    def defaults_for(cls, *, rounds: int, inner_steps: int, peers: int) -> dict[str, object]:
        """Return none: the paper's constants hold for its runs of all lengths."""
        return {}
