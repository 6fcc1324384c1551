"""`streaming`: fragments that sync one after the other while training continues (arXiv:2501.18512).

Fragment p hands in its pseudo-gradient every H steps, at its own offset. The reduction travels
for tau inner steps; then

    local = alpha local + (1 - alpha) synced_new

With one fragment, tau 0 and alpha 0 this is DiLoCo. The paper's settings are the defaults, with
E3M0 pseudo-gradients. Departures: the mean is sent back in the same codec, and both legs have
error feedback.
"""

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from atoll.compression import Codec, Fp4
from atoll.optim.methods.base import register, require
from atoll.optim.methods.diloco import DiLoCo, DiLoCoMethod
from atoll.optim.methods.worker import Worker


class Streaming(DiLoCo):
    """DiLoCo by fragments, which merges by alpha where its contribution is in."""

    method: "StreamingMethod"

    def _merge_(self, local: Tensor, new: Tensor, submitted: Tensor) -> None:
        alpha = self.method.alpha
        local.mul_(alpha).add_(new * (1.0 - alpha))


@register
@dataclass(frozen=True, kw_only=True)
class StreamingMethod(DiLoCoMethod):
    """Streaming DiLoCo."""

    name: ClassVar[str] = "streaming"
    worker_class: ClassVar[type[Worker]] = Streaming
    factors: ClassVar[bool] = False  # it cuts the model its own way

    codec: Codec = field(default_factory=Fp4)

    count: int = 2
    """Number of fragments; about three layers each in the paper."""

    tau: int = 5
    """Inner steps that a reduction travels."""

    alpha: float = 0.5
    """Share of its own parameters that a peer keeps."""

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            MethodError: when one is out of range.
        """
        super().__post_init__()
        require(0 <= self.alpha <= 1, "an alpha between 0 and 1", self.alpha)
