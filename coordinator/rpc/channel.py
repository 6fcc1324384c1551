"""A connection to the coordinator named in an invite, and the one call that needs no joining.

    client = StatusClient(invite)
    status = await client.status()
    await client.close()

It loads neither models nor logs, so a command that only asks for the status starts at once. Each
call has a deadline and fails with one of `atoll.coordinator.rpc.client_errors`. A failed call drops
the channel; the next one connects again, to the next address of the invite.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import grpc

from atoll.coordinator.rpc import service_pb2 as pb
from atoll.coordinator.rpc.client_errors import (
    BadReply,
    CoordinatorUnreachable,
    WrongCertificate,
    WrongRunOrVersion,
    from_grpc,
)
from atoll.coordinator.rpc.messages import (
    CALL_TIMEOUT_S,
    MAX_REPLY_BYTES,
    METHODS,
    PROGRESS_TIMEOUT_S,
)
from atoll.coordinator.rpc.tls import pinned_channel
from atoll.coordinator.run.frames import decompress
from atoll.coordinator.run.invite import Invite
from atoll.coordinator.run.relocation import RelocationInvalid, Whereabouts
from atoll.coordinator.run.status import RunStatus

T = TypeVar("T")

EOF: Any = getattr(grpc.aio, "EOF")  # noqa: B009  # type checkers do not see it
"""Read at the end of a stream."""


class StatusClient:
    """Asks the coordinator of an invite for its status.

    The first call connects; everything runs in its event loop.
    """

    def __init__(self, invite: Invite, viewer: bytes = b"") -> None:
        """`viewer` is the secret by which an observer is known again, if it has one."""
        self.invite = invite
        self.whereabouts = Whereabouts(invite)
        """The coordinator's addresses, as it, or anybody else, has told them."""
        self._viewer = viewer
        self.is_reached = False
        """True if the coordinator answered the last call that has ended."""
        self._channel: Any = None
        self._dialed = ""
        """Address of the channel, or of the last one."""
        self._address = 0
        self._connecting = asyncio.Lock()

    async def status(self, module: str = "", *, after: int = 0) -> RunStatus:
        """Return the run's status, with the rounds of a module. Needs no joining.

        Args:
            module: by default the last one.
            after: an earlier round of the last module, after which the status is asked for; 0: now.
        """
        request = pb.StatusRequest(
            token=self.invite.token, module=module, viewer=self._viewer, after=after
        )
        reply = await self._call("Status", request)
        try:
            raw = decompress(reply.packed, most_bytes=MAX_REPLY_BYTES)
            status = RunStatus.from_json(raw)
        except ValueError as error:
            raise BadReply(f"{error}; use the organiser's version of Atoll") from None
        self._expect_run(status.run_id)
        return status

    async def close(self) -> None:
        """Close the connection; idempotent."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    # Inside

    def _expect_run(self, run_id: str) -> None:
        expected = self.invite.run_id.hex()
        if run_id != expected:
            raise WrongRunOrVersion(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"{self._dialed}: expected run {expected[:12]}, got {run_id[:12]}: the invite is "
                "of another run; ask the organiser for the current invite",
            )

    async def _call(self, name: str, request: Any) -> Any:  # noqa: ANN401  # protobuf messages
        async def call(channel: Any) -> Any:  # noqa: ANN401
            return await stub(channel, name)(request, timeout=CALL_TIMEOUT_S)

        return await self._with_channel(call)

    async def _stream_out(self, name: str, request: Any) -> AsyncIterator[Any]:  # noqa: ANN401
        channel = await self._connect()
        stream = stub(channel, name)(request)
        try:
            while (reply := await self._read(stream)) is not EOF:
                yield reply
        finally:
            stream.cancel()

    async def _read(self, stream: Any) -> Any:  # noqa: ANN401
        async def read(_: Any) -> Any:  # noqa: ANN401
            return await asyncio.wait_for(stream.read(), PROGRESS_TIMEOUT_S)

        return await self._with_channel(read)

    async def _with_channel(self, use: Callable[[Any], Awaitable[T]]) -> T:
        channel = await self._connect()
        try:
            result = await use(channel)
            self.is_reached = True
            return result
        except grpc.aio.AioRpcError as error:
            failure = from_grpc(error, self._dialed)
        except TimeoutError:
            failure = CoordinatorUnreachable(f"{self._dialed}: no progress in time")
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # gRPC cancels all calls of a channel that it closes, here because another call failed.
            failure = CoordinatorUnreachable(f"{self._dialed}: the connection was closed")
        if isinstance(failure, CoordinatorUnreachable):
            await self._give_up(channel)
        raise failure

    @property
    def addresses(self) -> Sequence[str]:
        """'host:port' of the coordinator, in the order in which they are tried."""
        return self.whereabouts.addresses

    def recall_relocation(self, record: bytes) -> None:
        """Take a relocation that a process here once got; a damaged one is as good as none."""
        with suppress(RelocationInvalid):
            self.whereabouts.take(record)

    @property
    def _target(self) -> str:
        return self.addresses[self._address % len(self.addresses)]

    async def _connect(self) -> Any:  # noqa: ANN401
        async with self._connecting:
            if self._channel is None:
                self._channel = await self._open_channel()
            return self._channel

    async def _open_channel(self) -> Any:  # noqa: ANN401
        sha256, failures = self.invite.tls_sha256, []
        for _ in self.addresses:
            self._dialed = self._target
            try:
                return await pinned_channel(self._dialed, sha256, timeout_s=CALL_TIMEOUT_S / 2)
            except (CoordinatorUnreachable, WrongCertificate) as error:
                failures.append(error)
                self._address += 1
        self.is_reached = False
        # The finding of an attacker, or of an old invite, outweighs an address without an answer.
        raise next((f for f in failures if isinstance(f, WrongCertificate)), failures[0])

    async def _give_up(self, channel: Any) -> None:  # noqa: ANN401
        self.is_reached = False
        if self._channel is channel:
            self._channel = None
            self._address += 1
            await channel.close()


def stub(channel: Any, name: str) -> Any:  # noqa: ANN401
    """Return the callable of a method of the service."""
    method = next(method for method in METHODS if method.name == name)
    kinds = {
        (False, False): channel.unary_unary,
        (True, True): channel.stream_stream,
        (False, True): channel.unary_stream,
    }
    return kinds[method.streams_in, method.streams_out](
        method.path,
        request_serializer=method.request.SerializeToString,
        response_deserializer=method.reply.FromString,
    )
