"""Processes of `atoll ...` that end with the one that started them.

Each is the leader of a process group of its own, so that it can be killed together with its libp2p
daemon, and reads a pipe whose other end is held here: if this process is killed, they see the end
of their input and stop (`atoll.peer.daemon.supervised`).

Errors::

    RuntimeError
     +-- ChildFailed     a process ended when it should not have; says how, and what it said last
    ValueError
     +-- ChildRefused    a process found its input to be wrong; says what
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

STOP_S = 20.0
READ_ON_S = 1.0
TAIL_CHARS = 2000
LINE_BYTES = 1 << 20  # far above what a child says in one

ATOLL = (sys.executable, "-m", "atoll.peer.cli.main")
BAD_INPUT = 2  # as the command line ends where the input is wrong


class ChildFailed(RuntimeError):  # noqa: N818
    """A process ended when it should not have."""


class ChildRefused(ValueError):  # noqa: N818
    """A process found its input to be wrong."""


class Child:
    """One `atoll ...` that was started."""

    def __init__(
        self,
        name: str,
        log: Path,
        process: asyncio.subprocess.Process,
        on_line: Callable[[bytes], None],
    ) -> None:
        """Use `start`."""
        self.name = name
        self.log = log
        self._process = process
        self._reading = asyncio.create_task(self._read(on_line))

    @classmethod
    async def start(
        cls,
        name: str,
        log: Path,
        arguments: Sequence[str],
        *,
        on_line: Callable[[bytes], None] = lambda line: None,
        program: Sequence[str] = ATOLL,
        environment: Mapping[str, str] | None = None,
    ) -> Child:
        """Start it.

        Args:
            name: for people.
            log: what it says on stderr is appended to this file.
            arguments: of `atoll`.
            on_line: told each line of its stdout.
            program: what stands for `atoll`.
            environment: added to ours.
        """
        with log.open("ab") as errors:
            process = await asyncio.create_subprocess_exec(
                *program,
                *arguments,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
                limit=LINE_BYTES,
            )
        return cls(name, log, process, on_line)

    @property
    def pid(self) -> int:
        """Also the number of its process group."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; minus the signal that ended it."""
        return self._process.returncode

    @property
    def running(self) -> bool:
        """Whether the process is alive."""
        return self.exit_code is None

    def kill(self) -> None:
        """SIGKILL to the whole group."""
        if self.running:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    async def stop(self) -> None:
        """SIGTERM, and SIGKILL to the group of one that does not heed it."""
        if self.running:
            with suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), STOP_S)
        self.kill()
        await self._process.wait()
        with suppress(TimeoutError):  # whoever inherited its stdout may still hold it
            await asyncio.wait_for(self._reading, READ_ON_S)

    async def _read(self, on_line: Callable[[bytes], None]) -> None:
        lines = self._process.stdout
        while lines is not None and (line := await lines.readline()):
            on_line(line)

    def failure(self) -> ChildFailed | ChildRefused:
        """What its end means to the user, with the end of its log."""
        said = self.log.read_text(encoding="utf-8", errors="replace")[-TAIL_CHARS:].strip()
        if self.exit_code == BAD_INPUT:
            return ChildRefused(f"{self.name}: {said or 'the input is wrong'}")
        told = f":\n{said}" if said else ""
        return ChildFailed(
            f"{self.name} {how(self.exit_code)}; expected it to run until the end of the run; "
            f"its output is in {self.log}{told}"
        )


def how(exit_code: int | None) -> str:
    """How a process ended, in words."""
    if exit_code is not None and exit_code < 0:
        return f"was ended by {signal.Signals(-exit_code).name}"
    return f"ended with exit code {exit_code}"
