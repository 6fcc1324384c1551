"""Copies between a GPU and the host's memory, through memory that the GPU reads by itself.

To and from ordinary memory the driver copies in small pieces, and the device waits for each: 1 GB/s
into pages that nobody has touched yet, where the link does 50. Here two pinned buffers take turns:
one is on its way while the CPU fills or empties the other. The copies run in a stream of their own,
after what the calling thread's stream was given before.

Other devices copy as torch does.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch
from torch import Tensor

BUFFER_BYTES = 32 << 20  # long enough that starting a copy costs nothing
BUFFERS = 2

Pair = tuple[Tensor, Tensor]
"""source and target, of one shape; each contiguous"""
Pairs = Iterable[Pair]


def to_host(pairs: Pairs) -> None:
    """Copy tensors to tensors on the CPU, and convert them there if their dtypes differ."""
    _copy(pairs, lambda pair: pair[0].device, _Ring.to_host)


def to_device(pairs: Pairs) -> None:
    """Copy tensors on the CPU to other tensors, and convert them before if their dtypes differ."""
    _copy(pairs, lambda pair: pair[1].device, _Ring.to_device)


def on_device(device: torch.device, tensor: Tensor) -> Tensor:
    """Return a tensor of the CPU on a device: itself, or a copy."""
    if device.type == "cpu":
        return tensor
    moved = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    to_device([(tensor, moved)])
    return moved


def beside(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which work on a GPU runs beside what other threads have given to it.

    In the common stream each wait for a result would be one for the training step that was
    given before. Values come from the host and go back to it, so nothing else has to be waited for.
    """
    return torch.cuda.stream(_stream(device)) if device.type == "cuda" else nullcontext()


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class _Ring:
    """The pinned buffers of one device, and the stream that copies."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._turns = itertools.cycle(
            (
                torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=True),
                torch.cuda.Event(),  # type: ignore[no-untyped-call]
            )
            for _ in range(BUFFERS)
        )
        self._lock = threading.Lock()
        """held by the thread whose copies take the buffers' turns"""

    def to_host(self, pairs: Pairs) -> None:
        """Copy from the device; the targets are complete on return."""
        arriving = deque[tuple[torch.cuda.Event, Tensor, Tensor, Tensor]]()

        def arrive() -> None:
            event, staged, target, _ = arriving.popleft()  # the source lives until here
            event.synchronize()
            target.copy_(staged)

        with self._lock, torch.cuda.device(self._device):
            for source, target in _pieces(pairs):
                if len(arriving) == BUFFERS:
                    arrive()
                buffer, event = next(self._turns)
                staged = _view(buffer, source)
                self._stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(self._stream):
                    staged.copy_(source, non_blocking=True)
                    event.record()
                arriving.append((event, staged, target, source))
            while arriving:
                arrive()

    def to_device(self, pairs: Pairs) -> None:
        """Copy to the device; what the calling thread's stream is given next comes after it."""
        with self._lock, torch.cuda.device(self._device):
            self._stream.wait_stream(torch.cuda.current_stream())
            for source, target in _pieces(pairs):
                buffer, event = next(self._turns)
                event.synchronize()  # its last copy has left the buffer
                staged = _view(buffer, target).copy_(source)
                with torch.cuda.stream(self._stream):
                    target.copy_(staged, non_blocking=True)
                    event.record()
            torch.cuda.current_stream().wait_stream(self._stream)


def _copy(
    pairs: Pairs, device_of: Callable[[Pair], torch.device], by_ring: Callable[[_Ring, Pairs], None]
) -> None:
    """Copy pairs: those of a GPU by its ring, others as torch does."""
    for device, of_device in itertools.groupby(pairs, key=device_of):
        if device.type == "cuda":
            by_ring(_ring(device), of_device)
        else:
            for source, target in of_device:
                target.copy_(source)


@cache
def _ring(device: torch.device) -> _Ring:
    return _Ring(device)


def _pieces(pairs: Pairs) -> Iterator[tuple[Tensor, Tensor]]:
    """Cut pairs so that either side of each fits into a buffer."""
    for source, target in pairs:
        most = BUFFER_BYTES // max(source.dtype.itemsize, target.dtype.itemsize)
        sources, targets = torch.split(source.view(-1), most), torch.split(target.view(-1), most)
        yield from zip(sources, targets, strict=True)


def _view(buffer: Tensor, like: Tensor) -> Tensor:
    """Return as many values of a buffer as a vector has, in its dtype."""
    return buffer[: like.numel() * like.dtype.itemsize].view(like.dtype)
