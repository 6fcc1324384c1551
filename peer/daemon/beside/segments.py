"""Memory that two processes of this machine share, and tensors that one lends the other.

A segment is memory without a name (`memfd_create`; elsewhere POSIX shared memory whose name is
removed at once). Its descriptor travels over a socket, and the system frees it with the last
process that maps it, however that one ends: nothing is left in /dev/shm.

Long vectors lie in segments (`use_for_vectors`), so to lend one costs a message, not a copy. Those
of an outer state on a disk lie in segments that are files (`Segment.of_file`), which the other
process maps as well: the system could not take a copy in memory back. The lender keeps a reference
until the other side has dropped its last one, and says so with its next message; then the memory is
used again, as within one process. What is lent is read only, but for a contribution that is spent
(`atoll.optim.state.layout.Difference`).
"""

from __future__ import annotations

import importlib
import itertools
import mmap
import os
import queue
import secrets
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from atoll.optim.state import vectors

INLINE_BYTES = 1 << 20  # shorter tensors travel in the message: a descriptor costs two calls
_numbers = itertools.count()
_by_address: weakref.WeakValueDictionary[int, Segment] = weakref.WeakValueDictionary()


class Segment(mmap.mmap):
    """Shared memory, mapped here until the last array over it is gone."""

    number: int
    """Names it among the segments of the process that has made it."""
    descriptor: int | None
    """To be sent to others; None of one that is borrowed."""
    lender: LentTensors | None
    """The end of the channel that borrowed it; None if this process has made it."""

    @classmethod
    def make(cls, num_bytes: int) -> Segment:
        """Return new memory, of zeros.

        Raises:
            OSError: the system has none, or no descriptor for it.
        """
        descriptor = _nameless()
        try:
            os.ftruncate(descriptor, num_bytes)
        except BaseException:
            os.close(descriptor)
            raise
        return cls._own(descriptor, num_bytes)

    @classmethod
    def of_file(cls, descriptor: int, num_bytes: int) -> Segment:
        """Map an open file that has so many bytes; the caller closes the descriptor.

        Raises:
            OSError: the system has no descriptor, or no addresses, for it.
        """
        return cls._own(os.dup(descriptor), num_bytes)

    @classmethod
    def _own(cls, descriptor: int, num_bytes: int) -> Segment:
        """Map what this process has made, and close its descriptor with it."""
        try:
            segment = cls._mapped(descriptor, num_bytes, next(_numbers))
        except BaseException:
            os.close(descriptor)
            raise
        segment.descriptor = descriptor
        weakref.finalize(segment, os.close, descriptor).atexit = False
        return segment

    @classmethod
    def borrowed(
        cls, descriptor: int, num_bytes: int, *, number: int, lender: LentTensors
    ) -> Segment:
        """Map what another process has made; the caller closes the descriptor."""
        segment = cls._mapped(descriptor, num_bytes, number)
        segment.lender = lender
        return segment

    @classmethod
    def _mapped(cls, descriptor: int, num_bytes: int, number: int) -> Segment:
        segment = cls(descriptor, num_bytes)
        segment.number, segment.descriptor, segment.lender = number, None, None
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without large pages: small ones then
                segment.madvise(mmap.MADV_HUGEPAGE)
        _by_address[segment.bytes().ctypes.data] = segment
        return segment

    def bytes(self) -> np.ndarray:
        """Return an array of its bytes, which keeps it."""
        return np.frombuffer(self, dtype=np.uint8)


def _nameless() -> int:
    """Return the descriptor of new shared memory that has no name."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("atoll", os.MFD_CLOEXEC)
    posix: Any = importlib.import_module("_posixshmem")  # what multiprocessing itself uses
    name = f"/atoll-{secrets.token_hex(8)}"
    descriptor: int = posix.shm_open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR, mode=0o600)
    posix.shm_unlink(name)
    return descriptor


def use_for_vectors() -> None:
    """Let the long vectors of this process lie in segments from now on."""
    vectors.take_memory_from(_array)


def _array(length: int) -> np.ndarray:
    return Segment.make(4 * length).bytes().view(np.float32)


def segment_of(tensor: Tensor) -> Segment | None:
    """Return the segment in which a tensor lies."""
    return _by_address.get(tensor.untyped_storage().data_ptr())


class LentTensors:
    """The tensors that the two ends of one channel lend each other."""

    def __init__(self) -> None:
        """Begin without any."""
        self._tokens = itertools.count()
        self._lent: dict[int, Tensor] = {}
        """By the number under which the other end knows each."""
        self._made: weakref.WeakValueDictionary[int, Segment] = weakref.WeakValueDictionary()
        """Own segments that the other end maps, by their number."""
        self._borrowed: dict[int, Segment] = {}
        """The other end's segments, by their number there."""
        self._notices: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
        """For the other end. Finalizers fill it, which may run inside any other call."""

    @property
    def has_notices(self) -> bool:
        """Return whether the other end waits for memory."""
        return not self._notices.empty()

    @property
    def lent(self) -> int:
        """Return the number of tensors that the other end has not given back."""
        return len(self._lent)

    def notices(self) -> list[tuple[str, int]]:
        """Return what was dropped here since the last call, for the other end."""
        found = []
        while not self._notices.empty():
            found.append(self._notices.get())
        return found

    def heed(self, notices: Iterable[Sequence[Any]]) -> None:
        """Drop what the other end has dropped."""
        for kind, number in notices:
            if kind == "returned":
                self._lent.pop(number, None)
            else:
                self._borrowed.pop(number, None)

    def lend(self, tensor: Tensor, descriptors: list[int]) -> list[Any]:
        """Return the fields by which the other end borrows a tensor; a short one's hold its values.

        One thread at a time, in the order of the messages.

        Args:
            tensor: on any device; it has to stay as it is until it is returned.
            descriptors: of the message; that of a segment is added the first time.
        """
        tensor = tensor.detach().cpu()
        dtype, shape = str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
        if tensor.numel() * tensor.element_size() < INLINE_BYTES:
            return [dtype, shape, _bytes_of(tensor)]
        segment = segment_of(tensor)
        # What another process has lent to this one can't be shown to a third.
        is_ours = segment is not None and segment.lender in (None, self)
        if segment is None or not is_ours or not tensor.is_contiguous():
            tensor = _copied(tensor)
            segment = segment_of(tensor)
            assert segment is not None, "long vectors lie in segments: `use_for_vectors`"
        token = next(self._tokens)
        self._lent[token] = tensor
        is_theirs, new = segment.lender is self, -1
        if not is_theirs and segment.number not in self._made:
            new = self._introduce(segment, descriptors)
        start = tensor.storage_offset() * tensor.element_size()
        return [dtype, shape, [segment.number, is_theirs, len(segment), new, start, token]]

    def _introduce(self, segment: Segment, descriptors: list[int]) -> int:
        """Add a segment's descriptor to those of a message; return its place there."""
        assert segment.descriptor is not None, "it was made here"
        self._made[segment.number] = segment
        notice = ("freed", segment.number)
        weakref.finalize(segment, self._notices.put, notice).atexit = False
        descriptors.append(segment.descriptor)
        return len(descriptors) - 1

    def borrow(self, fields: Sequence[Any], descriptors: Sequence[int]) -> Tensor:
        """Return the tensor that the other end has lent, given what its `lend` returned."""
        name, shape, place = fields
        dtype = getattr(torch, name)
        if isinstance(place, bytes):
            flat = torch.frombuffer(bytearray(place), dtype=torch.uint8) if place else None
            return torch.empty(shape, dtype=dtype) if flat is None else flat.view(dtype).view(shape)
        number, is_mine, num_bytes, new, start, token = place
        if new >= 0:
            self._borrowed[number] = Segment.borrowed(
                descriptors[new], num_bytes, number=number, lender=self
            )
        segment = self._made[number] if is_mine else self._borrowed[number]
        lease = segment.bytes()[:]  # an object of its own, which all tensors of it keep alive
        weakref.finalize(lease, self._notices.put, ("returned", token)).atexit = False
        width = torch.empty(0, dtype=dtype).element_size()
        stop = start + width * int(np.prod(shape))
        return torch.from_numpy(lease)[start:stop].view(dtype).view(shape)


def _bytes_of(tensor: Tensor) -> bytes:
    flat = tensor.contiguous().view(-1).view(torch.uint8) if tensor.numel() else None
    return b"" if flat is None else flat.numpy().tobytes()


def _copied(tensor: Tensor) -> Tensor:
    """Return a copy in a segment."""
    num_bytes = tensor.numel() * tensor.element_size()
    room = vectors.empty(max(vectors.LONG, -(-num_bytes // 4)))
    copy = room.view(torch.uint8)[:num_bytes].view(tensor.dtype).view(tensor.shape)
    return copy.copy_(tensor)
