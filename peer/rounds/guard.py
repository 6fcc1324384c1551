"""Bytes of strangers that are no valid message get a named refusal, whichever handler they meet."""

from __future__ import annotations

from collections.abc import Callable

from atoll.compression import CodecError
from atoll.dht.refusals import RefusalCode
from atoll.dht.transport import CallHandler, Refused, Stream, StreamHandler
from atoll.optim.log.entry import LogError
from atoll.optim.reduction.cells import UpdateError
from atoll.optim.reduction.contribution import WorkRefused
from atoll.peer.rounds.conduct import Fault

BAD_INPUT = (LogError, UpdateError, CodecError, WorkRefused)


OnFault = Callable[[str, Fault], None]
"""(peer, fault): called for every message that breaks the rules."""


def guarded_call(handler: CallHandler, on_fault: OnFault) -> CallHandler:
    """`handler`, answering bad input with `Refused`."""

    async def handle(remote: str, body: bytes) -> bytes:
        try:
            return await handler(remote, body)
        except BAD_INPUT as error:
            on_fault(remote, Fault.BAD_MESSAGE)
            raise Refused(RefusalCode.BAD_MESSAGE, str(error)) from error

    return handle


def guarded_stream(handler: StreamHandler, on_fault: OnFault) -> StreamHandler:
    """`handler`, ending a stream of bad input with `Refused`."""

    async def handle(remote: str, stream: Stream) -> None:
        try:
            await handler(remote, stream)
        except BAD_INPUT as error:
            on_fault(remote, Fault.BAD_MESSAGE)
            raise Refused(RefusalCode.BAD_MESSAGE, str(error)) from error

    return handle
