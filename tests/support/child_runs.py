"""Runs of real child processes: their spec, the options of their peers, and waiting for them."""

import asyncio
import os
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from atoll.coordinator.rpc.client_errors import Busy
from atoll.coordinator.run.invite import Invite
from atoll.coordinator.run.spec import RunSpec, template
from atoll.coordinator.run.status import RunStatus
from atoll.peer.cli.watching import asking
from atoll.peer.lab.children import Child
from support.forks import Forked
from support.limits import DEADLINE_S

PEER = ("--listen", "/ip4/127.0.0.1/tcp/0", "--device", "cpu", "--yes", "--stop-with-stdin")


class _Process:
    """A forked process, used as one of asyncio's; it reads a pipe of this one."""

    stdout = None

    def __init__(self, log: Path, arguments: Sequence[str]) -> None:
        stdin, self._held = os.pipe()
        with log.open("ab") as errors:
            self._forked = Forked(*arguments, stdin=stdin, stdout=subprocess.DEVNULL, stderr=errors)
        os.close(stdin)
        self.pid = self._forked.pid
        self.send_signal = self._forked.send_signal

    @property
    def returncode(self) -> int | None:
        return self._forked.returncode

    async def wait(self) -> int:
        while (code := self.returncode) is None:
            await asyncio.sleep(0.02)
        if self._held is not None:
            os.close(self._held)
            self._held = None
        return code


async def start_child(name: str, log: Path, arguments: Sequence[object]) -> Child:
    """Start a child without an interpreter of its own, which takes 2 s of a processor or 4."""
    return Child(name, log, _Process(log, list(map(str, arguments))), lambda line: None)


async def until(condition: Callable[[], Any], *children: Child) -> Any:
    """Wait until a condition holds, while children run; return what it returned."""
    async with asyncio.timeout(DEADLINE_S):
        while not (found := condition()):
            for child in children:
                assert child.running, child.failure()
            await asyncio.sleep(0.1)
    return found


async def status_when(
    invite: str,
    condition: Callable[[RunStatus], Any],
    children: Sequence[Child],
    *,
    patience_s: float,
    look_s: float = 0.5,
) -> RunStatus:
    """Wait for a status of the run, while children run; return it."""
    async with asyncio.timeout(patience_s):
        while True:
            with suppress(Busy):  # all processes here are of one address
                async with asking(Invite.decode(invite)) as client:
                    now = await client.status()
                if condition(now):
                    return now
            for child in children:
                assert child.running, child.failure()
            await asyncio.sleep(look_s)


def write_spec(
    folder: Path,
    *,
    text: str,
    run: dict[str, Any],
    round: dict[str, Any],
    data: dict[str, Any] | None = None,
    inner_steps: int = 4,
) -> Path:
    """Write text.txt, and the RUN.toml of a tiny run on it, whose path is returned."""
    (folder / "text.txt").write_text(text)
    spec = RunSpec.from_dict(
        {
            "run": run,
            "model": {"overrides": {"dim": 16, "num_layers": 1, "num_heads": 2, "ffn_dim": 32}},
            "data": {"source": str(folder / "text.txt"), "seq_len": 32} | (data or {}),
            "inner": {"batch_size": 2, "warmup_steps": 2},
            "outer": {"inner_steps": inner_steps},
            "round": {"min_peers": 2, "stall_s": 5.0} | round,
            "coordinator": {"listen": "127.0.0.1:0", "dht_listen": "127.0.0.1:0"},
        }
    )
    path = folder / "RUN.toml"
    path.write_text(template(spec))
    return path
