"""Choice of the device and the number format for training.

Parameters and optimizer state are float32 on every device; `bfloat16` means autocast in the
forward and backward pass. The outer state always stays on the CPU.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from atoll.peer.errors import DeviceError

PRECISIONS = ("auto", "float32", "bfloat16")


@dataclass(frozen=True, kw_only=True)
class Device:
    """An available device and the precision to use on it."""

    device: torch.device
    """Device of the parameters and batches."""
    precision: str
    """`"float32"` or `"bfloat16"`."""

    @classmethod
    def choose(cls, name: str = "auto", precision: str = "auto") -> "Device":
        """Choose a device of this machine.

        Args:
            name: `auto` (the first available of cuda, mps and cpu) or a torch device name.
            precision: one of `PRECISIONS`; `auto` is bfloat16 on CUDA devices that support it,
                float32 elsewhere.

        Raises:
            DeviceError: the device or precision is unknown or not available.
        """
        device = _device(_best_name() if name == "auto" else name)
        if precision not in PRECISIONS:
            raise DeviceError(
                f"unknown precision {precision!r}; expected one of {', '.join(PRECISIONS)}"
            )
        has_bfloat16 = device.type != "cuda" or torch.cuda.is_bf16_supported()
        if precision == "auto":
            precision = "bfloat16" if device.type == "cuda" and has_bfloat16 else "float32"
        if precision == "bfloat16" and not has_bfloat16:
            raise DeviceError(f"{device} has no bfloat16; set precision to float32 in [inner]")
        return cls(device=device, precision=precision)

    @property
    def label(self) -> str:
        """Short name for display, such as `cpu` or `NVIDIA H200`."""
        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        return self.device.type

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context manager for a forward pass."""
        lower = self.precision == "bfloat16"
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=lower)


def number_of_gpus(wanted: int, *, device: str) -> int:
    """Return how many GPUs of this machine train together.

    Args:
        wanted: their number; 0 for all.
        device: name of the device that was asked for, which must leave the choice open.

    Raises:
        DeviceError: there are fewer, or one device was named.
    """
    if device not in ("auto", "cuda"):
        raise DeviceError(f"expected --gpus or --device {device}, got both; name one of them")
    _check_cuda(torch.device("cuda"))
    count = torch.cuda.device_count()
    if wanted > count:
        raise DeviceError(
            f"asked for {wanted} GPUs, but there are {count}; use --gpus all, or check "
            "CUDA_VISIBLE_DEVICES"
        )
    return wanted or count


def _best_name() -> str:
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise DeviceError(f"unknown device {name!r}; expected auto, cuda, mps or cpu") from error
    if device.type == "cuda":
        _check_cuda(device)
    elif device.type == "mps" and not torch.backends.mps.is_available():
        raise DeviceError("asked for mps, but this machine has none; use --device auto")
    elif device.type not in ("mps", "cpu"):
        raise DeviceError(f"unknown device {name!r}; expected auto, cuda, mps or cpu")
    return device


def _check_cuda(device: torch.device) -> None:
    if not torch.cuda.is_available():
        built = (
            f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        )
        raise DeviceError(
            f"asked for {device}, but torch {torch.__version__} ({built}) sees no CUDA device; "
            "use --device auto, or install a CUDA build of torch and check the driver"
        )
    count = torch.cuda.device_count()
    if device.index is not None and device.index >= count:
        raise DeviceError(f"asked for {device}, but there are {count} CUDA devices, from cuda:0")
