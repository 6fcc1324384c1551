"""Other ways to reduce, for `scripts/bench_allreduce.py`, on the same hosts as atoll.

    hivemind        its averager, fp16
    hivemind-8bit   its averager, uniform 8 bit, with the TypeError under numpy 2 patched
    gloo            torch.distributed's ring, fp32
    naive           int8 parts over TCP: whole parts to owners, whole results back, unpaced
    tcp             only the bytes that each pair of hosts exchanges in a round, at TCP's own pace
    tcp-paced       the same, at 97% of the uplink, in pieces of 64 KiB, receivers in turn

`tcp` and `tcp-paced` reduce nothing; they measure what the links can carry.
"""

import asyncio
import ctypes
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
from allreduce_host import Facts, Host, Place, vector
from torch import Tensor

from atoll.compression import parse
from atoll.optim.reduction.cells import Cells, body_of

PIECE_BYTES = 64 * 1024
PACED_SHARE = 0.97  # of the uplink: headers take 0.6% at the lab's packet size
STEP_S = 120.0


class HivemindHost:
    """`DecentralizedAverager`, timed from the group's start to the averaged tensors."""

    def __init__(self, place: Place, compression: str) -> None:
        self.place = place
        self.compression = compression

    async def hello(self) -> Facts:
        from hivemind import DHT

        self._patch()
        if self.place.host:
            return {}
        self.dht = DHT(start=True, host_maddrs=[f"/ip4/{self.place.ip}/tcp/4001"])
        return {"maddrs": [str(maddr) for maddr in self.dht.get_visible_maddrs()]}

    def _patch(self) -> None:
        from hivemind.compression import quantization

        quantization.int = lambda array: int(array[0])  # type: ignore[attr-defined]

    async def meet(self, everyone: Sequence[Facts], told: Facts) -> None:
        from hivemind import DHT
        from hivemind.compression import Float16Compression, Uniform8BitQuantization

        if self.place.host:
            self.dht = DHT(
                start=True,
                host_maddrs=[f"/ip4/{self.place.ip}/tcp/4001"],
                initial_peers=everyone[0]["maddrs"],
            )
        kinds = {"fp16": Float16Compression, "8bit": Uniform8BitQuantization}
        self.averager = timed_averager()(
            [vector(self.place.host, self.place.params)],
            self.dht,
            start=True,
            prefix="bench",
            target_group_size=self.place.hosts,
            min_group_size=self.place.hosts,
            min_matchmaking_time=3.0,
            compression=kinds[self.compression](),
            bandwidth=self.place.mbit_s[self.place.host],
            allreduce_timeout=STEP_S,
        )

    async def round(self, number: int) -> Facts:
        with self.averager.get_tensors() as tensors:
            tensors[0].copy_(vector(self.place.host, self.place.params))
        try:
            group = self.averager.step(timeout=STEP_S)
        except Exception as error:
            return {"failed": repr(error)[:200]}
        started_s, ended_s = self.averager.times
        return {"started_s": started_s, "ended_s": ended_s, "members": len(group or ())}

    def mean_N(self) -> Tensor:  # noqa: N802
        with self.averager.get_tensors() as tensors:
            return tensors[0].clone()

    def facts(self) -> Facts:
        return {}

    async def close(self) -> None:
        self.averager.shutdown()
        self.dht.shutdown()


def timed_averager() -> type:
    """hivemind's averager, which records when its reduction starts and ends."""
    from hivemind import DecentralizedAverager

    class TimedAverager(DecentralizedAverager):  # type: ignore[misc]
        _rpc_handlers = None  # otherwise it serves the handlers of an earlier class

        def __init__(self, *args: object, **kwargs: object) -> None:
            self.times = multiprocessing.Array(ctypes.c_double, 2)
            super().__init__(*args, **kwargs)

        async def _run_allreduce_inplace_(self, *args: object, **kwargs: object) -> object:
            self.times[0] = time.monotonic()
            result = await super()._run_allreduce_inplace_(*args, **kwargs)
            self.times[1] = time.monotonic()
            return result

    return TimedAverager


class GlooHost:
    """torch.distributed's all_reduce."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.sum_N = torch.zeros(0)

    async def hello(self) -> Facts:
        return {}

    async def meet(self, everyone: Sequence[Facts], told: Facts) -> None:
        device = next(name for name in os.listdir("/sys/class/net") if name != "lo")
        os.environ["GLOO_SOCKET_IFNAME"] = device
        torch.distributed.init_process_group(
            "gloo",
            init_method=f"tcp://{self.place.ips[0]}:29500",
            rank=self.place.host,
            world_size=self.place.hosts,
            timeout=timedelta(seconds=STEP_S),
        )

    async def round(self, number: int) -> Facts:
        self.sum_N = vector(self.place.host, self.place.params)
        torch.distributed.barrier()
        started_s = time.monotonic()
        torch.distributed.all_reduce(self.sum_N)
        return {"started_s": started_s, "ended_s": time.monotonic()}

    def mean_N(self) -> Tensor:  # noqa: N802
        return self.sum_N / self.place.hosts

    def facts(self) -> Facts:
        return {}

    async def close(self) -> None:
        torch.distributed.destroy_process_group()


Line = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class TcpHost:
    """One warm TCP connection to every other host; subclasses implement the exchange."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.codec = parse(place.codec)
        self.lines: dict[int, Line] = {}
        self.ready = asyncio.Event()
        self.sum_N = torch.zeros(place.params)

    @property
    def others(self) -> list[int]:
        """The receivers in order, beginning with this host's successor."""
        me, hosts = self.place.host, self.place.hosts
        return [(me + step) % hosts for step in range(1, hosts)]

    async def hello(self) -> Facts:
        self.server = await asyncio.start_server(self._accept, self.place.ip, 5000, limit=1 << 20)
        return {}

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._keep((await reader.readexactly(1))[0], (reader, writer))

    def _keep(self, host: int, line: Line) -> None:
        self.lines[host] = line
        if len(self.lines) == self.place.hosts - 1:
            self.ready.set()

    async def meet(self, everyone: Sequence[Facts], told: Facts) -> None:
        for host in range(self.place.host):
            line = await asyncio.open_connection(self.place.ips[host], 5000, limit=1 << 20)
            line[1].write(bytes([self.place.host]))
            self._keep(host, line)
        await self.ready.wait()

    async def send(self, host: int, data: bytes) -> None:
        writer = self.lines[host][1]
        writer.write(len(data).to_bytes(8) + data)
        await writer.drain()

    async def recv(self, host: int) -> bytes:
        reader = self.lines[host][0]
        return await reader.readexactly(int.from_bytes(await reader.readexactly(8)))

    def part(self, owner: int) -> slice:
        """Return the range of values of an owner's part."""
        cells = -(-self.place.params // 65_536)
        cuts = [round(i * cells / self.place.hosts) * 65_536 for i in range(self.place.hosts + 1)]
        return slice(cuts[owner], min(cuts[owner + 1], self.place.params))

    async def round(self, number: int) -> Facts:
        started_s = time.monotonic()
        await self.exchange()
        return {"started_s": started_s, "ended_s": time.monotonic()}

    async def exchange(self) -> None:
        raise NotImplementedError

    def mean_N(self) -> Tensor:  # noqa: N802
        return self.sum_N

    def facts(self) -> Facts:
        return {}

    async def close(self) -> None:
        for _, writer in self.lines.values():
            writer.close()


class NaiveHost(TcpHost):
    """An owner waits for whole parts, then sends the whole result."""

    async def exchange(self) -> None:
        x_N, me = vector(self.place.host, self.place.params), self.place.host
        sending = [self.send(to, self.encode(x_N[self.part(to)])) for to in self.others]
        receiving = [self.recv(host) for host in self.others]
        got = (await asyncio.gather(*receiving, *sending))[: len(receiving)]
        mean_N = x_N[self.part(me)].clone()
        for data in got:
            mean_N += self.decode(data or b"", mean_N.numel())
        body = self.encode(mean_N / self.place.hosts)
        self.sum_N[self.part(me)] = self.decode(body, mean_N.numel())
        await asyncio.gather(
            *(self.send(to, body) for to in self.others), *map(self.take, self.others)
        )

    async def take(self, host: int) -> None:
        part = self.part(host)
        self.sum_N[part] = self.decode(await self.recv(host), part.stop - part.start)

    def encode(self, x_N: Tensor) -> bytes:
        return body_of(Cells.of_vector(self.codec, x_N.numel()).encode(x_N))

    def decode(self, data: bytes, numel: int) -> Tensor:
        return Cells.of_vector(self.codec, numel).decode_body(data, members=1)


class BytesHost(TcpHost):
    """Transfers only: each receiver's part, then this host's own reduced part to every other."""

    paced = False

    async def exchange(self) -> None:
        receiving = asyncio.gather(*map(self.recv_both, self.others))
        await (self.send_paced() if self.paced else self.send_all())
        await receiving

    def num_bytes(self, to: int) -> int:
        parts = (self.part(to), self.part(self.place.host))
        return sum(self.codec.wire_bytes(65_536) * ((p.stop - p.start) / 65_536) for p in parts)

    async def recv_both(self, host: int) -> None:
        left = int(self.num_bytes(host))
        while left:
            left -= len(await self.lines[host][0].read(min(left, 1 << 20)))

    async def send_all(self) -> None:
        await asyncio.gather(*(self.write(to, int(self.num_bytes(to))) for to in self.others))

    async def write(self, to: int, num_bytes: int) -> None:
        writer = self.lines[to][1]
        writer.write(bytes(num_bytes))
        await writer.drain()

    async def send_paced(self) -> None:
        left = {to: int(self.num_bytes(to)) for to in self.others}
        bytes_s = PACED_SHARE * self.place.mbit_s[self.place.host] * 1e6 / 8
        due_s = time.monotonic()
        while left:
            for to in list(left):
                piece = min(PIECE_BYTES, left[to])
                await self.write(to, piece)
                left[to] -= piece
                if not left[to]:
                    del left[to]
                due_s += piece / bytes_s
                await asyncio.sleep(due_s - time.monotonic())


class PacedBytesHost(BytesHost):
    """The transfers of `BytesHost`, paced."""

    paced = True


RIVALS: dict[str, Callable[[Place], Host]] = {
    "hivemind": lambda place: HivemindHost(place, "fp16"),
    "hivemind-8bit": lambda place: HivemindHost(place, "8bit"),
    "gloo": GlooHost,
    "naive": NaiveHost,
    "tcp": BytesHost,
    "tcp-paced": PacedBytesHost,
}
