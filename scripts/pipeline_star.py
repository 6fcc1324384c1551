#!/usr/bin/env python3
"""One host of a star of trainers, for `bench_pipeline.py`: how SWARM lets activations travel.

    pipeline_star.py HOST ADDRESS,ADDRESS,... TRAINERS

Host h serves stage h % 3; the first TRAINERS hosts have a trainer each. A trainer leads each of its
microbatches through the stages by itself (arXiv:2301.11913, and the code of yandex-research/swarm):
it asks a server of a stage, waits for the answer, and sends it on to a server of the next one. So
each activation, and each gradient, crosses a trainer's link twice. A server keeps nothing: the way
back brings the stage's input again, and may go to another server than the way out.

What is better here than there: int8 by rows, as ours, in both directions; the last stage takes one
question instead of two; a trainer passes frames on without decoding them; gradients leave and are
computed first, two messages leave at a time, and all of it overlaps with computing. If every host
has a trainer, the links of all hosts carry what trainers pass on. A trainer asks the server that
would be done first by what is under way there and how long answers took, and leaves one alone for a
minute that it cannot reach.

A message (little endian): number, kind and tokens' and payload's bytes, then these. Prints the time
and the tokens of each microbatch whose way is over.
"""

import asyncio
import itertools
import socket
import struct
import sys
import time
from asyncio import StreamReader, StreamWriter
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from enum import IntEnum
from queue import PriorityQueue
from threading import Thread
from typing import Any

import torch
from pipeline_lab import BATCH, CODEC, ROWS, SEQ_LEN, WIDTH
from pipeline_rivals import LEARNING_RATE, MICROBATCHES, STAGES, VOCAB, loss_of, slice_of
from torch import Tensor

from atoll.compression.activations import parse_activations

PORT = 29600
IN_WORK = 48  # microbatches of all trainers; the servers always have work
HEADER = struct.Struct("<IBII")
AT_ONCE = 2  # messages that leave
SEND_BUFFER = 1 << 18  # bytes in the kernel: more would queue in front of what is more urgent
BAN_S = 60.0
GIVE_UP_S = 60.0  # of a question, many times what one takes here
SMOOTH = 0.1  # weight of the newest answer's time, as in SWARM
SHAPE = (BATCH, SEQ_LEN, WIDTH)


class Kind(IntEnum):
    """The kind of a message; the smaller, the more urgent."""

    GRADIENT = 0  # an answer
    BACKWARD = 1
    LOSS = 2
    FORWARD = 3
    ACTIVATIONS = 4  # an answer


Message = tuple[int, Kind, bytes, bytes]


async def read(reader: StreamReader) -> Message:
    """Return the next message of a connection."""
    number, kind, first, second = HEADER.unpack(await reader.readexactly(HEADER.size))
    return number, Kind(kind), await reader.readexactly(first), await reader.readexactly(second)


class Uplink:
    """Sends what is most urgent first, and few messages at a time."""

    def __init__(self) -> None:
        """Start the senders."""
        self._waiting: asyncio.PriorityQueue[tuple[Kind, int, StreamWriter, Message]] = (
            asyncio.PriorityQueue()
        )
        self._order = itertools.count()
        self._senders = [asyncio.create_task(self._send()) for _ in range(AT_ONCE)]

    def put(self, writer: StreamWriter, message: Message) -> None:
        """Let a message wait for its turn."""
        self._waiting.put_nowait((message[1], next(self._order), writer, message))

    async def _send(self) -> None:
        while True:
            _, _, writer, (number, kind, first, second) = await self._waiting.get()
            writer.write(HEADER.pack(number, kind, len(first), len(second)) + first + second)
            with suppress(ConnectionError):  # whoever asked there is told by the reader
                await writer.drain()


def tune(writer: StreamWriter) -> None:
    """Keep little in the buffers of a connection."""
    sock: socket.socket = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    writer.transport.set_write_buffer_limits(high=0)


class Server:
    """A stage: one thread computes, gradients first; others encode and decode."""

    def __init__(self, number: int, uplink: Uplink) -> None:
        """Build the stage."""
        self._number, self._uplink = number, uplink
        self.model = slice_of(number)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)
        self._codec = parse_activations(CODEC)
        self._coding = ThreadPoolExecutor(2)
        self._jobs: PriorityQueue[tuple[Kind, int, Any]] = PriorityQueue()
        self._order, self._counted = itertools.count(), 0
        self._loop = asyncio.get_running_loop()
        Thread(target=self._compute, daemon=True).start()

    async def serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        """Answer the questions of one trainer."""
        tune(writer)
        answers: set[asyncio.Task[None]] = set()
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                answer = asyncio.create_task(self._answer(writer, await read(reader)))
                answers.add(answer)
                answer.add_done_callback(answers.discard)
        writer.close()

    async def _answer(self, writer: StreamWriter, message: Message) -> None:
        number, kind, tokens, payload = message
        run = self._loop.run_in_executor
        inputs, gradient = await run(self._coding, self._decoded, kind, tokens, payload)
        done: asyncio.Future[Tensor | None] = self._loop.create_future()
        self._jobs.put((kind, next(self._order), (inputs, gradient, done)))
        found = await done
        back = b"" if found is None else await run(self._coding, self._encoded, found)
        self._uplink.put(
            writer,
            (number, Kind.ACTIVATIONS if kind is Kind.FORWARD else Kind.GRADIENT, b"", back),
        )

    def _decoded(self, kind: Kind, tokens: bytes, payload: bytes) -> tuple[Tensor, Tensor | None]:
        """Return a stage's input, and the targets or the gradient of its output."""
        ids_BT = torch.frombuffer(bytearray(tokens), dtype=torch.int32).long() if tokens else None
        ids_BT = None if ids_BT is None else ids_BT.view(BATCH, -1)
        size = self._codec.frame_bytes(ROWS, WIDTH)
        frames = [payload[at : at + size] for at in range(0, len(payload), size)]
        decoded = [self._codec.decode(frame, ROWS, WIDTH).view(SHAPE) for frame in frames]
        if self._number == 0:
            assert ids_BT is not None
            return ids_BT[:, :-1], decoded[0] if decoded else None
        if kind is Kind.LOSS:
            assert ids_BT is not None
            return decoded[0], ids_BT[:, 1:]
        return decoded[0], decoded[1] if kind is Kind.BACKWARD else None

    def _encoded(self, x_BTD: Tensor) -> bytes:
        return self._codec.encode(x_BTD.flatten(0, 1)).numpy().tobytes()

    def _compute(self) -> None:
        while True:
            kind, _, (inputs, other, done) = self._jobs.get()
            found = self._forward(inputs) if kind is Kind.FORWARD else self._backward(inputs, other)
            self._loop.call_soon_threadsafe(done.set_result, found)

    @torch.no_grad()
    def _forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.model(inputs)
        return found

    def _backward(self, inputs: Tensor, other: Tensor) -> Tensor | None:
        """Add the gradients of a microbatch; return that of the input, if it is no tokens."""
        if self._number:
            inputs = inputs.requires_grad_()
        output = self.model(inputs)
        if self._number == STAGES - 1:
            loss_of(output, other).backward()
        else:
            output.backward(other)
        self._counted += 1
        if self._counted % MICROBATCHES == 0:
            self._optimizer.step()
            self._optimizer.zero_grad()
        return inputs.grad


class Link:
    """A trainer's connection to a server."""

    def __init__(self, address: str, uplink: Uplink) -> None:
        """Connect later, when it is first used."""
        self.address, self._uplink = address, uplink
        self.under_way, self.answer_s, self.banned_until_s = 0, 0.1, 0.0
        self._writer: StreamWriter | None = None
        self._lock = asyncio.Lock()
        self._numbers = itertools.count()
        self._asked: dict[int, asyncio.Future[bytes]] = {}
        self._reading: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Connect, as soon as the server listens."""
        while self._writer is None:
            with suppress(OSError):
                await self._connected()
            await asyncio.sleep(0.2)

    async def close(self) -> None:
        """Close the connection."""
        if self._writer and self._reading:
            self._writer.close()
            await self._reading

    @property
    def cost(self) -> float:
        """Return when another question would be answered, as far as the trainer knows."""
        return (self.under_way + 1) * self.answer_s

    async def ask(self, kind: Kind, tokens: bytes, payload: bytes) -> bytes:
        """Return the answer to a question.

        Raises:
            OSError: the server cannot be reached, or does not answer.
        """
        self.under_way += 1
        began_s, beside = time.monotonic(), self.under_way
        number = next(self._numbers)
        try:
            writer = await self._connected()
            answer = self._asked[number] = asyncio.get_running_loop().create_future()
            self._uplink.put(writer, (number, kind, tokens, payload))
            found = await asyncio.wait_for(answer, GIVE_UP_S)
        finally:
            self.under_way -= 1
            self._asked.pop(number, None)
        took_s = (time.monotonic() - began_s) / beside
        self.answer_s += SMOOTH * (took_s - self.answer_s)
        return found

    async def _connected(self) -> StreamWriter:
        async with self._lock:
            if self._writer is None:
                reader, self._writer = await asyncio.open_connection(self.address, PORT)
                tune(self._writer)
                self._reading = asyncio.create_task(self._read(reader))
            return self._writer

    async def _read(self, reader: StreamReader) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                number, _, _, payload = await read(reader)
                if number in self._asked and not self._asked[number].done():
                    self._asked[number].set_result(payload)
        self._writer = None
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(ConnectionError(f"{self.address} left"))


class Trainer:
    """Leads microbatches through the stages."""

    def __init__(self, addresses: Sequence[str], uplink: Uplink) -> None:
        """Know the servers of each stage."""
        self._stages: defaultdict[int, list[Link]] = defaultdict(list)
        for host, address in enumerate(addresses):
            self._stages[host % STAGES].append(Link(address, uplink))

    async def run(self, in_work: int) -> None:
        """Lead so many microbatches at a time, without an end, once all servers listen."""
        for link in (link for stage in self._stages.values() for link in stage):
            await link.open()
        async with asyncio.TaskGroup() as group:
            for _ in range(in_work):
                group.create_task(self._lead_more())

    async def close(self) -> None:
        """Close all connections."""
        for link in (link for stage in self._stages.values() for link in stage):
            await link.close()

    async def _lead_more(self) -> None:
        while True:
            await self.lead(torch.randint(VOCAB, (BATCH, SEQ_LEN + 1), dtype=torch.int32))
            print(time.time(), ROWS, flush=True)

    async def lead(self, tokens_BT: Tensor) -> None:
        """Lead a microbatch through all stages, there and back."""
        tokens, inputs = tokens_BT.numpy().tobytes(), [b""]
        for stage in range(STAGES - 1):
            ids = tokens if stage == 0 else b""
            inputs.append(await self._ask(stage, Kind.FORWARD, ids, inputs[-1]))
        gradient = await self._ask(STAGES - 1, Kind.LOSS, tokens, inputs.pop())
        for stage in reversed(range(STAGES - 1)):
            ids = tokens if stage == 0 else b""
            gradient = await self._ask(stage, Kind.BACKWARD, ids, inputs.pop() + gradient)

    async def _ask(self, stage: int, kind: Kind, tokens: bytes, payload: bytes) -> bytes:
        """Return the answer of a server of a stage, of another one if the first fails."""
        while True:
            now_s = time.monotonic()
            known = [link for link in self._stages[stage] if link.banned_until_s <= now_s]
            if not known:
                await asyncio.sleep(0.5)
                continue
            link = min(known, key=lambda each: each.cost)
            try:
                return await link.ask(kind, tokens, payload)
            except OSError:
                link.banned_until_s = time.monotonic() + BAN_S


async def main() -> None:
    """Serve and train until this process is ended."""
    host, addresses, trainers = int(sys.argv[1]), sys.argv[2].split(","), int(sys.argv[3])
    torch.set_num_threads(1)
    uplink = Uplink()
    server = Server(host % STAGES, uplink)
    listening = await asyncio.start_server(server.serve, addresses[host], PORT)
    async with listening:
        if host < trainers:
            await Trainer(addresses, uplink).run(IN_WORK // trainers)
        await listening.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
