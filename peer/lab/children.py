"""`atoll` processes that end with the process that started them.

Each child leads its own process group, so that it can be killed together with its libp2p daemon. It
reads a pipe whose other end this process holds: if this process is killed, the child reads the end
of its input and stops (`atoll.peer.daemon.supervised`).

    ChildFailed (RuntimeError)     a process ended too early; the message ends with its output
    ChildRefused (ValueError)      a process rejected its input; the message tells why
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

STOP_S = 20.0  # from SIGTERM to SIGKILL: a leaving peer may take 13 s for its goodbyes
READ_ON_S = 1.0  # to read the rest of the output of an ended process
TAIL_CHARS = 2000  # of its log, quoted in an error
LINE_BYTES = 1 << 20  # far longer than any line that a child prints

ATOLL = (sys.executable, "-m", "atoll.peer.cli.main")
BAD_INPUT = 2  # exit code of the command line for invalid input


class ChildFailed(RuntimeError):
    """A process ended too early."""


class ChildRefused(ValueError):
    """A process rejected its input."""


class Child:
    """One running `atoll` process; `start` makes it."""

    def __init__(
        self,
        name: str,
        log: Path,
        process: asyncio.subprocess.Process,
        on_line: Callable[[bytes], None],
    ) -> None:
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
        """Start a process.

        Args:
            name: name in messages.
            log: file that its stderr is appended to.
            arguments: arguments of `atoll`.
            on_line: called with each line of its stdout.
            program: command instead of `atoll`.
            environment: variables added to this process's environment.
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
        """Process id, which is also the id of its process group."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Exit code, negative for a signal; None while the process runs."""
        return self._process.returncode

    @property
    def running(self) -> bool:
        """Return whether the process is alive."""
        return self.exit_code is None

    def kill(self) -> None:
        """Send SIGKILL to the whole process group."""
        if self.running:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    async def stop(self) -> None:
        """Send SIGTERM, then SIGKILL to the process group after `STOP_S`; wait for the end."""
        if self.running:
            with suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), STOP_S)
        self.kill()
        await self._process.wait()
        with suppress(TimeoutError):  # another process may have inherited its stdout
            await asyncio.wait_for(self._reading, READ_ON_S)

    async def _read(self, on_line: Callable[[bytes], None]) -> None:
        lines = self._process.stdout
        while lines is not None and (line := await lines.readline()):
            on_line(line)

    def failure(self) -> ChildFailed | ChildRefused:
        """Return the error for this process's end, with the end of its log."""
        output = self.log.read_text(encoding="utf-8", errors="replace")[-TAIL_CHARS:].strip()
        if self.exit_code == BAD_INPUT:
            return ChildRefused(f"{self.name}: {output or 'invalid input'}")
        quoted = f":\n{output}" if output else ""
        return ChildFailed(
            f"{self.name} {how(self.exit_code)} before the end of the run; "
            f"its output is in {self.log}{quoted}"
        )


def how(exit_code: int | None) -> str:
    """Return how a process ended, as the end of a sentence."""
    if exit_code is not None and exit_code < 0:
        return f"was ended by {signal.Signals(-exit_code).name}"
    return f"ended with exit code {exit_code}"
