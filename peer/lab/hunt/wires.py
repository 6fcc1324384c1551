"""gRPC between peers and the coordinator, over the network in memory.

The real client and the real service meet here: messages are serialised, sent as a stream of
`MemoryNetwork`, and parsed. A stream carries the messages of a call in one direction; in the other
one each message has a first byte: `REPLY`, or `STATUS`, after which the code's name, a line feed
and the text follow.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import grpc

from atoll.coordinator.rpc.channel import EOF
from atoll.coordinator.rpc.client_errors import CoordinatorUnreachable
from atoll.coordinator.rpc.messages import METHODS
from atoll.coordinator.service.service import Service
from atoll.dht.testing.memory import MemoryStream, MemoryTransport
from atoll.dht.transport import DeadlineExceeded, Stream, TransportError

REPLY, STATUS = b"r", b"s"
IDLE_S = 3600.0  # of a stream whose deadline is the caller's

OnReply = Callable[[Any], None]
"""Sees every reply of the coordinator that reaches a client."""


class Aborted(Exception):
    """A service has ended a call with a status."""


def serve(transport: MemoryTransport, service: Service) -> None:
    """Let a coordinator's service answer on its machine."""
    handlers = service.handler()
    for method in METHODS:
        found = handlers.service(SimpleNamespace(method=method.path, invocation_metadata=()))
        transport.serve_stream(method.name, _answering(found))


def _answering(method: Any) -> Callable[[str, Stream], Awaitable[None]]:  # noqa: ANN401
    async def answer(remote: str, stream: Stream) -> None:
        context = ServedCall(stream, method.response_serializer)
        try:
            if method.stream_stream is not None:
                await method.stream_stream(_requests(stream, method), context)
            else:
                await context.write(await method.stream_unary(_requests(stream, method), context))
            await stream.end(timeout_s=IDLE_S)
        except Aborted:
            pass

    return answer


async def _requests(stream: Stream, method: Any) -> AsyncIterator[Any]:  # noqa: ANN401
    while (raw := await stream.recv(timeout_s=IDLE_S)) is not None:
        yield method.request_deserializer(raw)


class ServedCall:
    """A call, as a service sees it."""

    def __init__(self, stream: Stream, serialize: Callable[[Any], bytes]) -> None:
        self._stream = stream
        self._serialize = serialize

    def peer(self) -> str:
        """Return gRPC's name of the caller: each machine has an address of its own."""
        return f"ipv4:10.0.{int.from_bytes(self._stream.remote[-2:].encode()) % 250}.7:4000"

    async def write(self, reply: Any) -> None:  # noqa: ANN401
        """Send a reply."""
        await self._stream.send(REPLY + self._serialize(reply), timeout_s=IDLE_S)

    async def abort(self, code: grpc.StatusCode, text: str) -> None:
        """End the call with a status."""
        await self._stream.send(STATUS + f"{code.name}\n{text}".encode(), timeout_s=IDLE_S)
        raise Aborted(text)


class MemoryChannel:
    """A channel of gRPC, as far as clients of Atoll use it."""

    def __init__(self, transport: MemoryTransport, callee: str, on_reply: OnReply) -> None:
        self._transport = transport
        self._callee = callee
        self._on_reply = on_reply

    @classmethod
    async def open(
        cls, caller: MemoryTransport, callee: str, on_reply: OnReply, *, timeout_s: float
    ) -> MemoryChannel:
        """Connect to a coordinator's machine.

        Raises:
            CoordinatorUnreachable: it is away.
        """
        try:
            await caller.connect(callee, (), timeout_s=timeout_s)
        except (TransportError, TimeoutError) as error:
            raise CoordinatorUnreachable(f"{callee}: {error}") from None
        return cls(caller, callee, on_reply)

    async def close(self) -> None:
        """Do nothing: a channel holds no more than its streams."""

    def unary_unary(
        self,
        path: str,
        request_serializer: Callable[[Any], bytes],
        response_deserializer: Callable[[bytes], Any],
    ) -> Callable[..., Awaitable[Any]]:
        """Return a call with one request and one reply."""

        async def call(request: Any, *, timeout: float) -> Any:  # noqa: ANN401
            each = self._call(path, request_serializer, response_deserializer)
            try:
                async with asyncio.timeout(timeout):
                    await each.write(request)
                    await each.done_writing()
                    reply = await each.read()
            except TimeoutError:
                raise _error(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded") from None
            finally:
                each.cancel()
            if reply is EOF:
                raise _error(grpc.StatusCode.UNAVAILABLE, "the connection was closed")
            return reply

        return call

    def unary_stream(
        self,
        path: str,
        request_serializer: Callable[[Any], bytes],
        response_deserializer: Callable[[bytes], Any],
    ) -> Callable[[Any], MemoryCall]:
        """Return a call with one request and a stream of replies."""

        def call(request: Any) -> MemoryCall:  # noqa: ANN401
            return self._call(path, request_serializer, response_deserializer, request)

        return call

    def stream_stream(
        self,
        path: str,
        request_serializer: Callable[[Any], bytes],
        response_deserializer: Callable[[bytes], Any],
    ) -> Callable[[], MemoryCall]:
        """Return a call with a stream of requests and a stream of replies."""
        return lambda: self._call(path, request_serializer, response_deserializer)

    def _call(
        self,
        path: str,
        serialize: Callable[[Any], bytes],
        parse: Callable[[bytes], Any],
        request: Any = None,  # noqa: ANN401
    ) -> MemoryCall:
        def parsed(raw: bytes) -> Any:  # noqa: ANN401
            reply = parse(raw)
            self._on_reply(reply)
            return reply

        ends = self._transport, self._callee
        return MemoryCall(ends, path, serialize, parsed, request)


class MemoryCall:
    """A call under way, at the client."""

    def __init__(
        self,
        ends: tuple[MemoryTransport, str],
        path: str,
        serialize: Callable[[Any], bytes],
        parse: Callable[[bytes], Any],
        request: Any = None,  # noqa: ANN401
    ) -> None:
        self._transport, self._callee = ends
        self._method = path.rpartition("/")[2]
        self._serialize, self._parse = serialize, parse
        self._only = request
        self._stream: MemoryStream | None = None
        self._closing: asyncio.Task[None] | None = None

    async def write(self, request: Any) -> None:  # noqa: ANN401
        """Send a request."""
        try:
            stream = await self._opened()
            await stream.send(self._serialize(request), timeout_s=IDLE_S)
        except TransportError as error:
            raise _failure(error) from None

    async def done_writing(self) -> None:
        """Send nothing more."""
        try:
            await (await self._opened()).end(timeout_s=IDLE_S)
        except TransportError as error:
            raise _failure(error) from None

    async def read(self) -> Any:  # noqa: ANN401
        """Return the next reply, or `EOF`."""
        if self._only is not None:
            request, self._only = self._only, None
            await self.write(request)
            await self.done_writing()
        try:
            raw = await (await self._opened()).recv(timeout_s=IDLE_S)
        except TransportError as error:
            raise _failure(error) from None
        if raw is None:
            return EOF
        if raw[:1] == STATUS:
            code, _, text = raw[1:].decode().partition("\n")
            raise _error(grpc.StatusCode[code], text)
        return self._parse(raw[1:])

    def cancel(self) -> None:
        """End the call."""
        if self._stream is not None and self._closing is None:
            self._closing = asyncio.ensure_future(self._stream.close())

    async def _opened(self) -> MemoryStream:
        if self._stream is None:
            transport, callee = self._transport, self._callee
            self._stream = await transport.open(callee, self._method, timeout_s=IDLE_S)
        return self._stream


def _failure(error: TransportError) -> grpc.aio.AioRpcError:
    if isinstance(error, DeadlineExceeded):
        return _error(grpc.StatusCode.DEADLINE_EXCEEDED, str(error))
    return _error(grpc.StatusCode.UNAVAILABLE, str(error))


def _error(code: grpc.StatusCode, text: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), text)
