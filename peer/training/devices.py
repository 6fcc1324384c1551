"""Choice of the device and the number format for training.

Parameters and optimizer state are float32 on every device; `bfloat16` and `float16` mean autocast
in the forward and backward pass, `float16` with a scaled loss. The outer state always stays on the
CPU. Nothing on a device is float64, which MPS lacks.
"""

import gc
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.peer.errors import DeviceError
from atoll.peer.training.machine import memory_total

PRECISIONS = ("auto", "float32", "bfloat16", "float16")
FAST_FLOAT16 = (7, 0)  # compute capability; older cards multiply float16 no faster than float32

# torch raises `OutOfMemoryError` on CUDA alone; elsewhere, and within CUDA's libraries, only the
# text of a RuntimeError names the reason.
_OUT_OF_MEMORY = (
    "MPS backend out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
)


@dataclass(frozen=True, kw_only=True)
class Device:
    """An available device and the precision to use on it."""

    device: torch.device
    """Device of the parameters and batches."""
    precision: str
    """`"float32"`, `"bfloat16"` or `"float16"`."""

    @classmethod
    def choose(cls, name: str = "auto", precision: str = "auto") -> "Device":
        """Choose a device of this machine.

        Args:
            name: `auto` (the first available of cuda, mps and cpu) or a torch device name.
            precision: one of `PRECISIONS`; `auto` is bfloat16 on CUDA devices that compute in it,
                float16 on those that compute in that one alone, float32 elsewhere.

        Raises:
            DeviceError: the device or precision is unknown or not available.
        """
        device = _device(_best_name() if name == "auto" else name)
        if precision not in PRECISIONS:
            raise DeviceError(
                f"unknown precision {precision!r}; expected one of {', '.join(PRECISIONS)}"
            )
        has_bfloat16 = device.type != "cuda" or _has_bfloat16(device)
        if precision == "auto":
            precision = _best_precision(device, has_bfloat16)
        if precision == "bfloat16" and not has_bfloat16:
            raise DeviceError(
                f"{device} does not compute in bfloat16; set precision to auto in [inner]"
            )
        return cls(device=device, precision=precision)

    @property
    def label(self) -> str:
        """Short name for display, such as `cpu` or `NVIDIA H200`."""
        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        return self.device.type

    @property
    def memory_bytes(self) -> int:
        """Memory that programs share on this device: a GPU's own, else the machine's."""
        return _memory_of(self.device)

    @property
    def encodes_on(self) -> torch.device:
        """The device on which contributions are encoded: a CUDA device, else the CPU.

        On MPS nobody has compared the bits of codecs with the CPU's.
        """
        return self.device if self.device.type == "cuda" else torch.device("cpu")

    def activate(self) -> None:
        """Make the device the current one of this thread: some kernels look at nothing else."""
        if self.device.type == "cuda" and self.device.index is not None:
            torch.cuda.set_device(self.device)

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context manager for a forward pass."""
        if self.precision == "float32":
            return nullcontext()
        dtype = torch.bfloat16 if self.precision == "bfloat16" else torch.float16
        return torch.autocast(self.device.type, dtype=dtype)

    def scaler(self) -> torch.amp.GradScaler | None:
        """Return what keeps gradients within the range of float16; None where nothing is needed."""
        return torch.amp.GradScaler(self.device.type) if self.precision == "float16" else None

    def put(self, tokens_BT: Tensor) -> Tensor:
        """Copy tokens to the device; the copy may still be under way."""
        if self.device.type == "cuda":
            return tokens_BT.pin_memory().to(self.device, non_blocking=True)
        return tokens_BT.to(self.device)

    def release(self) -> None:
        """Give back memory that the process no longer uses: torch keeps it in pieces."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        elif self.device.type == "mps":
            torch.mps.empty_cache()


def is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether a device, or the host, had too little memory."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return any(text in str(error) for text in _OUT_OF_MEMORY)


def gpu_memory(name: str, *, ranks: int = 1) -> int | None:
    """Return the memory of the GPUs on which so many ranks train; None if they use another device.

    A device that does not exist has none either; choosing it says so.
    """
    try:
        device = _device(_best_name() if name == "auto" else name)
    except DeviceError:
        return None
    return ranks * _memory_of(device) if device.type == "cuda" else None


def gpu_uuids(name: str, *, gpus: int = 0) -> list[str]:
    """Return what NVIDIA's library calls the GPUs of a peer, as 'GPU-...'.

    Args:
        name: device name, as for `Device.choose`.
        gpus: number of GPUs that train together; 0 for the one of `name`.

    Raises:
        DeviceError: it trains on none.
    """
    device = _device(_best_name() if name == "auto" else name)
    if device.type != "cuda" or torch.version.cuda is None:
        raise DeviceError(f"expected an NVIDIA GPU for --yield-gpu, got {device}; leave it out")
    indices = range(gpus) if gpus else [device.index or 0]
    return [f"GPU-{torch.cuda.get_device_properties(index).uuid}" for index in indices]


def free_memory() -> None:
    """Return the memory of models that are gone to the GPU; some 0.5 GB stay with the process."""
    gc.collect()
    torch.cuda.empty_cache()


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


def _memory_of(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return memory_total()


def _best_name() -> str:
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def _has_bfloat16(device: torch.device) -> bool:
    # torch asks the current device, and by default counts cards that emulate it, slowly.
    with nullcontext() if device.index is None else torch.cuda.device(device):
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))


def _best_precision(device: torch.device, has_bfloat16: bool) -> str:
    if device.type != "cuda":
        return "float32"
    if has_bfloat16:
        return "bfloat16"
    fast = torch.cuda.get_device_capability(device) >= FAST_FLOAT16
    return "float16" if fast else "float32"


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
