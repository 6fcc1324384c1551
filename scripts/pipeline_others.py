"""Other systems on hosts of the lab, doing the work of our pipeline, for `bench_rivals.py`.

Six hosts, and no coordinator. Each process prints the time and the tokens of what it has finished.
"""

import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bench_nat import ATOLL
from pipeline_lab import MODEL, ONE_THREAD, PACE

from atoll.dht.testing.wan import WanLab

HOSTS = 6
MAX_WAIT_S = 240.0
PROGRAMS = {
    "GPipe": ("pipeline_rivals.py", "GPipe"),
    "1F1B": ("pipeline_rivals.py", "1F1B"),
    "star": ("pipeline_star.py", str(HOSTS)),
    "star, one trainer": ("pipeline_star.py", "1"),
}
Mark = tuple[float, int]
"""Time, and tokens that were finished then."""


class Others:
    """The processes of another system, one on each host."""

    def __init__(self, lab: WanLab, folder: Path, name: str, pace_s: Sequence[float]) -> None:
        """Start them.

        Args:
            lab: the hosts.
            folder: for what they print.
            name: of `PROGRAMS`.
            pace_s: that each host waits in a forward pass.
        """
        self.lab, self._folder = lab, folder
        (folder / "paced.py").write_text(MODEL)
        self.children = [self._start(name, host, each) for host, each in enumerate(pace_s)]

    def _start(self, name: str, host: int, pace_s: float) -> subprocess.Popen[bytes]:
        program, kind = PROGRAMS[name]
        words = ["env", f"{PACE}={pace_s}", ONE_THREAD, ATOLL[0]]
        words += [str(Path(__file__).resolve().with_name(program)), str(host)]
        words += [",".join(self.lab.ip(each) for each in range(HOSTS)), kind]
        with self._out(host).open("w") as out, self._errors(host).open("w") as errors:
            return self.lab.popen(host, words, cwd=self._folder, stdout=out, stderr=errors)

    def _out(self, host: int) -> Path:
        return self._folder / f"{host}.out"

    def _errors(self, host: int) -> Path:
        return self._folder / f"{host}.err"

    def marks(self, host: int) -> list[Mark]:
        """Return what a host has finished so far."""
        lines = self._out(host).read_text().splitlines(keepends=True)
        words = [line.split() for line in lines if line.endswith("\n")]
        return [(float(at_s), int(tokens)) for at_s, tokens in words]

    def since(self, from_s: float) -> list[list[Mark]]:
        """Return what each host that prints has finished since a time."""
        found = [[mark for mark in self.marks(host) if mark[0] >= from_s] for host in range(HOSTS)]
        return [each for each in found if each]

    def kill(self, host: int) -> None:
        """Kill a host's process at once."""
        self.children[host].kill()
        self.children[host].wait()

    def ended(self) -> list[int]:
        """Return the hosts whose processes are over."""
        return [host for host, child in enumerate(self.children) if child.poll() is not None]

    def words(self) -> str:
        """Return the last words of each process."""
        return "\n".join(self._errors(host).read_text()[-500:] for host in range(HOSTS))

    def wait(self, from_s: float, marks: int) -> None:
        """Wait until the hosts that print have finished something so many times.

        Raises:
            RuntimeError: a process ended, or it takes too long.
        """
        while True:
            found = self.since(from_s)
            if found and min(map(len, found)) >= marks:
                return
            if self.ended() or time.time() > from_s + MAX_WAIT_S:
                raise RuntimeError(f"a process ended, or nothing comes:\n{self.words()}")
            time.sleep(0.2)

    def end(self) -> None:
        """End all processes."""
        for child in self.children:
            child.kill()
        for child in self.children:
            child.wait()


def rate(marks: Sequence[Sequence[Mark]]) -> float:
    """Return the tokens a second of some hosts, from the first time they finished something."""
    return sum(
        sum(tokens for _, tokens in each[1:]) / (each[-1][0] - each[0][0])
        for each in marks
        if len(each) > 1
    )


@contextmanager
def others(lab: WanLab, folder: Path, name: str, pace_s: Sequence[float]) -> Iterator[Others]:
    """Run another system until the block ends."""
    case = Others(lab, folder, name, pace_s)
    try:
        yield case
    finally:
        case.end()
