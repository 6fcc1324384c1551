"""Which codecs have fused kernels on a device: on CUDA, where Triton is installed and works.

Triton comes with torch for CUDA. It compiles at first use and needs a C compiler for that, which
not every box has; then codecs take torch operations, at about a quarter of the speed.
"""

from __future__ import annotations

import importlib
import logging
from functools import cache
from typing import Protocol, cast

import torch
from torch import Tensor

from atoll.compression.scratch import TILE

_log = logging.getLogger(__name__)


class Kernels(Protocol):
    """Encodes and decodes on a GPU: whole tiles of a `BlockCodec`, and any number of `bf16`."""

    def takes(self, name: str, block: int) -> bool:
        """Return whether there are kernels for a codec with blocks of this size."""
        ...

    def write_tiles(
        self,
        codec: object,
        x_M: Tensor,
        measures_BM: Tensor,
        scales_BS: Tensor,
        codes_M: Tensor,
    ) -> None:
        """Store codes, scales (bf16), and measures as `BlockCodec._measure` does."""

    def read_tiles(self, codec: object, codes_M: Tensor, scales_BS: Tensor, out_M: Tensor) -> None:
        """Decode to `out_M`, given scales in fp32 that are finite."""

    def write_bf16(self, x_N: Tensor, codes_N: Tensor) -> Tensor:
        """Store values as bf16; return the largest magnitude, NaN or infinite if there is one."""
        ...

    def read_bf16(self, codes_N: Tensor, out_N: Tensor) -> Tensor:
        """Store values as fp32; return the largest magnitude, NaN or infinite if there is one."""
        ...


def kernels(device: torch.device) -> Kernels | None:
    """Return the kernels for a device; None if there are none, or if they do not work there."""
    if device.type != "cuda" or torch.version.hip:  # AMD's, which nobody has tried
        return None
    return _kernels(device)


@cache
def _kernels(device: torch.device) -> Kernels | None:
    try:
        module = cast(Kernels, importlib.import_module("atoll.compression.kernels.triton_kernels"))
        values = torch.ones(TILE, device=device)
        module.write_bf16(values, torch.empty_like(values, dtype=torch.bfloat16))
    except Exception as error:  # a compiler's, of any kind: without kernels all goes on
        _log.warning(
            "no fused kernels on %s (%s: %s); codecs go on without them, slower. "
            "They need Triton and a C compiler, such as gcc",
            device,
            type(error).__name__,
            str(error).partition("\n")[0],
        )
        return None
    return module
