"""Messages between the trainer's process and the network process.

    message   u32 length | u8 number of descriptors | msgpack of [kind, values, notices]

over a pair of local sockets; descriptors of shared memory travel beside the first byte. Values are
plain (None, bool, int, float, str, bytes, tuples, maps with names), tensors, the records, named
tuples and enums that are listed in `RECORDS`, and errors. Nothing is unpickled: an error is made
again if its class is one of Atoll's or is loaded here, and is an error; else a RuntimeError names
it.
"""

from __future__ import annotations

import array
import dataclasses
import importlib
import select
import socket
import struct
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import msgpack
import numpy as np
import torch
from torch import Tensor

from atoll.compression.sparse import Sparse
from atoll.coordinator.run.outcome import Outcome
from atoll.optim.ranks.residuals import Settlement
from atoll.optim.reducer import Commit, Course
from atoll.optim.reduction.contribution import Offer
from atoll.optim.schedules import WindowEnd
from atoll.optim.state import vectors
from atoll.peer.daemon.beside.segments import LentTensors
from atoll.peer.daemon.options import StageMove
from atoll.peer.daemon.tally import Account
from atoll.peer.daemon.views import PeerView, RunFacts, TrainerView
from atoll.peer.pipeline.actions import MicrobatchEnded, RunJob, SettleHeld, TakeStep
from atoll.peer.pipeline.messages import Microbatch, PassKey, Payload
from atoll.peer.pipeline.placement import StageNeeds

MAX_BYTES = 1 << 30  # tensors are not in it; the longest is a frame of activations
MAX_DESCRIPTORS = 250  # segments that one message shows for the first time; Linux sends 253
BYTES = "surrogateescape"  # names of files need not be UTF-8
HEADER = struct.Struct("=IB")
RECORDS: dict[str, type[Any]] = {
    record.__name__: record
    for record in (
        *(Account, Commit, Course, Outcome, PeerView, RunFacts, Settlement, Sparse, StageMove),
        *(StageNeeds, TrainerView, WindowEnd),
        *(Microbatch, MicrobatchEnded, PassKey, Payload, RunJob, SettleHeld, TakeStep),
    )
}
# What else is like a plain value: msgpack takes the others as they are.
PLAIN: dict[type[Any], type[Any] | tuple[type[Any], ...]] = {
    list: (tuple, list, deque),
    dict: Mapping,
    str: str,
    int: int,
    float: float,
}
_TENSOR, _RECORD, _ERROR, _OFFER = range(4)


class ChannelClosed(ConnectionError):
    """The process at the other end is gone, or has closed."""


class Channel:
    """One end of the messages between two processes."""

    def __init__(self, connection: socket.socket) -> None:
        """Take over a connected local socket."""
        self.tensors = LentTensors()
        self._socket = connection
        self._sending = threading.Lock()
        self._descriptors: list[int] = []
        """The descriptors of the message that is being packed, under the lock."""

    def send(self, kind: str, *values: Any) -> None:  # noqa: ANN401 - plain values and the above
        """Send a message, in any thread.

        Raises:
            ChannelClosed: the other end is gone.
            TypeError: a value is none that travels.
        """
        with self._sending:
            descriptors: list[int] = []
            self._descriptors = descriptors
            message = (kind, values, self.tensors.notices())
            body = self._packed(message)
            header = HEADER.pack(len(body), len(descriptors))
            try:
                self._send_all(header, descriptors)
                self._socket.sendall(body)
            except OSError as error:
                raise ChannelClosed("expected a process at the other end, it is gone") from error

    def send_notices(self) -> None:
        """Let the other end use again what is no longer used here; send nothing without need."""
        if self.tensors.has_notices:
            self.send("notices")

    def receive(self) -> tuple[str, tuple[Any, ...]]:
        """Wait for the next message, in one thread; return its kind and its values.

        Raises:
            ChannelClosed: the other end is gone, or out of step.
        """
        header, descriptors = self._receive_header()
        try:
            length, count = HEADER.unpack(header)
            if length > MAX_BYTES or count != len(descriptors):
                raise ChannelClosed(
                    f"expected at most {MAX_BYTES} bytes and {count} descriptors, got {length} and "
                    f"{len(descriptors)}"
                )
            body = self._receive_exactly(length)
            kind, values, notices = msgpack.unpackb(
                body,
                use_list=False,
                unicode_errors=BYTES,
                ext_hook=lambda code, data: self._unpack(code, data, descriptors),
            )
        finally:
            for descriptor in descriptors:
                socket.close(descriptor)
        self.tensors.heed(notices)
        return kind, values

    @property
    def has_room(self) -> bool:
        """Return whether a short message would leave at once."""
        poll = select.poll()  # select() takes no descriptor above 1023
        poll.register(self._socket, select.POLLOUT)
        return bool(poll.poll(0))

    def shut(self) -> None:
        """End `receive` at both ends; what was sent before still arrives there."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it is already

    def close(self) -> None:
        """Close this end, once nobody receives."""
        self._socket.close()

    # the socket

    def _send_all(self, header: bytes, descriptors: Sequence[int]) -> None:
        if not descriptors:
            self._socket.sendall(header)
            return
        beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
        sent = self._socket.sendmsg([header], beside)
        self._socket.sendall(header[sent:])

    def _receive_header(self) -> tuple[bytes, list[int]]:
        descriptors = array.array("i")
        room = socket.CMSG_SPACE(MAX_DESCRIPTORS * descriptors.itemsize)
        header = b""
        while len(header) < HEADER.size:
            try:
                some, beside, *_ = self._socket.recvmsg(HEADER.size - len(header), room)
            except OSError as error:
                raise ChannelClosed("the other end is gone") from error
            for level, kind, data in beside:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
            if not some:
                raise ChannelClosed("the other end is gone")
            header += some
        return header, descriptors.tolist()

    def _receive_exactly(self, length: int) -> bytearray:
        body, came = bytearray(length), 0
        view = memoryview(body)
        while came < length:
            try:
                some = self._socket.recv_into(view[came:])
            except OSError as error:
                raise ChannelClosed("the other end is gone") from error
            if not some:
                raise ChannelClosed("the other end is gone")
            came += some
        return body

    # values

    def _pack(self, value: Any) -> Any:  # noqa: ANN401 - of msgpack
        if isinstance(value, Tensor):
            return self._extended(_TENSOR, self.tensors.lend(value, self._descriptors))
        if isinstance(value, Offer):
            return self._extended(_OFFER, _offer_fields(value))
        if RECORDS.get(type(value).__name__) is type(value):
            return self._extended(_RECORD, [type(value).__name__, _fields_of(value)])
        if isinstance(value, BaseException):
            return self._extended(_ERROR, _error_fields(value))
        for plain, kinds in PLAIN.items():
            if isinstance(value, kinds):
                return plain(value)
        raise TypeError(f"expected a value that travels between processes, got {value!r:.200}")

    def _extended(self, code: int, fields: Sequence[Any]) -> msgpack.ExtType:
        return msgpack.ExtType(code, self._packed(fields))

    def _packed(self, value: Sequence[Any]) -> Any:  # noqa: ANN401 - bytes, of a package without types
        # Strict: a named tuple is not packed as a list, nor an enum as a string.
        return msgpack.packb(value, default=self._pack, unicode_errors=BYTES, strict_types=True)

    def _unpack(self, code: int, data: bytes, descriptors: Sequence[int]) -> Any:  # noqa: ANN401
        fields = msgpack.unpackb(
            data,
            use_list=False,
            unicode_errors=BYTES,
            ext_hook=lambda code, data: self._unpack(code, data, descriptors),
        )
        if code == _TENSOR:
            return self.tensors.borrow(fields, descriptors)
        if code == _OFFER:
            return _offer(*fields)
        if code == _RECORD:
            name, values = fields
            return RECORDS[name](**values)
        return _error(*fields)


def _fields_of(record: Any) -> dict[str, Any]:  # noqa: ANN401 - one of `RECORDS`
    if isinstance(record, Enum):
        return {"value": record.value}
    if isinstance(record, tuple):
        named: Any = record
        return dict(named._asdict())
    return {each.name: getattr(record, each.name) for each in dataclasses.fields(record)}


def _offer_fields(offer: Offer) -> list[Any]:
    """Return a contribution's fields, its frames in one tensor: they are a byte a parameter."""
    lengths = torch.tensor([len(frame) for frame in offer.frames], dtype=torch.int64)
    total = int(lengths.sum())
    room = vectors.empty(-(-total // 4)).view(torch.uint8)[:total]
    if total:
        values, at = room.numpy(), 0
        for frame in offer.frames:
            values[at : at + len(frame)] = np.frombuffer(frame, dtype=np.uint8)
            at += len(frame)
    squares = torch.tensor(offer.squares, dtype=torch.float64)
    return [offer.weight, room, lengths, squares, offer.after_N]


def _offer(
    weight: float, joined: Tensor, lengths: Tensor, squares: Tensor, after_N: Tensor | None
) -> Offer:
    values, frames, at = joined.numpy().data.toreadonly(), list[memoryview](), 0
    for length in lengths.tolist():
        frames.append(values[at : at + length])  # the memory is lent until the last one is gone
        at += length
    return Offer(
        weight=weight, frames=tuple(frames), squares=tuple(squares.tolist()), after_N=after_N
    )


def _error_fields(error: BaseException) -> list[Any]:
    arguments = list(error.args)
    if isinstance(error, OSError) and error.filename is not None:
        arguments.append(str(error.filename))
    if not all(isinstance(each, str | int | float | None) for each in arguments):
        arguments = [str(error)]
    return [type(error).__module__, type(error).__qualname__, arguments, str(error)]


def _error(module: str, name: str, arguments: Sequence[Any], text: str) -> BaseException:
    """Return an error of the same class, or a RuntimeError that names it."""
    if module.startswith("atoll."):
        importlib.import_module(module)
    kind: Any = getattr(sys.modules.get(module), name, None)
    if isinstance(kind, type) and issubclass(kind, BaseException):
        try:
            error = kind(*arguments)
        except TypeError:  # its class takes other arguments than those that it keeps
            error = kind.__new__(kind)
            error.args = tuple(arguments)
        if str(error) == text:
            return error
        error.args = (text,)
        return error
    return RuntimeError(f"{name}: {text}")
