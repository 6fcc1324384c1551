"""Checks of a machine and of its way to a run, for `atoll doctor`; each says what to do.

Pure checks take what was measured and return a `Finding`. Probes measure: each ends within its
deadline, and none raises because there is no network.

    Finding    one line: a name, how it is, the fact, the remedy
"""

from __future__ import annotations

import asyncio
import errno
import os
import platform
import shutil
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from atoll.coordinator.report.text import size
from atoll.coordinator.rpc import proxies

MIN_PYTHON = (3, 11)
LOW_DISK_BYTES = 2 * 10**9  # log and snapshots of a small run; `atoll peer` states what a run needs
NO_DISK_BYTES = 100 * 10**6
LOW_MEMORY_BYTES = 10**9  # a peer of the smallest model takes about 600 MB
MAX_CLOCK_OFF_S = 3.0  # hivemind refuses a node that is further off; the peer corrects its own
DIAL_S = 5.0
SLOW_MBIT_S = 1.0


class Health(StrEnum):
    """How a finding is."""

    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the report."""

    check: str
    health: Health
    fact: str
    remedy: str = ""

    @property
    def line(self) -> str:
        """Return the finding for people."""
        remedy = f"; {self.remedy}" if self.remedy else ""
        return f"{self.health:<8} {self.check:<12} {self.fact}{remedy}"

    def fields(self) -> dict[str, str]:
        """Return the finding for programs."""
        return asdict(self)


def ok(check: str, fact: str) -> Finding:
    """Return a finding that needs nothing."""
    return Finding(check=check, health=Health.OK, fact=fact)


def note(check: str, fact: str, remedy: str) -> Finding:
    """Return a finding that costs something, or may."""
    return Finding(check=check, health=Health.NOTE, fact=fact, remedy=remedy)


def problem(check: str, fact: str, remedy: str) -> Finding:
    """Return a finding with which a peer does not work."""
    return Finding(check=check, health=Health.PROBLEM, fact=fact, remedy=remedy)


# pure


def python_finding(found: Sequence[int]) -> Finding:
    """Judge the version of Python."""
    shown = ".".join(map(str, found[:3]))
    if tuple(found[:2]) < MIN_PYTHON:
        return problem("python", shown, "install Python 3.11 or later")
    return ok("python", f"{shown} on {platform.system()} {platform.machine()}")


def disk_finding(free_bytes: int, folder: Path) -> Finding:
    """Judge the free space of the state directory."""
    fact = f"{size(free_bytes)} free in {folder}"
    remedy = "free some space, or choose another folder with --state-dir"
    if free_bytes < NO_DISK_BYTES:
        return problem("disk", fact, remedy)
    return note("disk", fact, remedy) if free_bytes < LOW_DISK_BYTES else ok("disk", fact)


def memory_finding(available_bytes: int | None) -> Finding:
    """Judge the memory that programs may still take; None if the system does not report it."""
    if available_bytes is None:
        return note("memory", "not known on this system", "a peer needs about 600 MB and the model")
    fact = f"{size(available_bytes)} available"
    if available_bytes < LOW_MEMORY_BYTES:
        return note("memory", fact, "close other programs; a peer needs 600 MB and the model")
    return ok("memory", fact)


def clock_finding(off_s: float) -> Finding:
    """Judge how far the clock is from the coordinator's."""
    fact = f"{abs(off_s):.1f} s {'behind' if off_s > 0 else 'ahead of'} the coordinator's"
    if abs(off_s) > MAX_CLOCK_OFF_S:
        return note("clock", fact, "turn on time synchronisation (NTP); the peer corrects for it")
    return ok("clock", fact)


def reach_finding(address: str, port: int, *, is_dialed: bool) -> Finding:
    """Judge a dial-back of the coordinator to a port of this machine."""
    place = f"{address}:{port}"
    if is_dialed:
        return ok("reached", f"the coordinator dials this machine back at {place}")
    return note(
        "reached",
        f"the coordinator gets no answer at {place}: a router or firewall lets nobody in",
        "peers come through holes or a relay, which is slower; forward a TCP port and name it with "
        "--listen and --announce",
    )


def nat_finding(own: Sequence[str], seen: str) -> Finding:
    """Tell from the own addresses and the one that the coordinator sees whether a router is there.

    Whether it keeps a port for all destinations cannot be told with one observer.
    """
    if not seen:
        return note("router", "not known: the coordinator saw no address", "try again later")
    if seen in own:
        return ok("router", f"none: the coordinator sees this machine's own address, {seen}")
    return note(
        "router",
        f"one translates addresses: the coordinator sees {seen}, this machine has "
        f"{', '.join(own) or 'none'}",
        "nothing to do unless 'reached' says so",
    )


def rate_finding(what: str, num_bytes: int, seconds: float) -> Finding:
    """Judge a transfer; so short a one tells little of a fast link."""
    rate = 8e-6 * num_bytes / max(seconds, 1e-6)
    fact = f"{size(num_bytes)} in {seconds:.2f} s from {what}, at least {rate:.1f} Mbit/s"
    if rate < SLOW_MBIT_S:
        return note("rate", fact, "rounds of this run may outlast their windows on this link")
    return ok("rate", fact)


def exit_code(findings: Sequence[Finding]) -> int:
    """Return 1 if there is a problem, else 0."""
    return int(any(finding.health is Health.PROBLEM for finding in findings))


# probes


def available_memory() -> int | None:
    """Return the bytes that programs may still take; None if the system does not report it."""
    with suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    with suppress(AttributeError, OSError, ValueError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def torch_finding() -> Finding:
    """Find torch and the device that a peer would take; takes seconds, as it imports torch."""
    try:
        from atoll.peer.training.devices import Device

        return ok("torch", f"{version('torch')}, trains on {Device.choose().label}")
    except (ImportError, PackageNotFoundError, OSError) as error:
        return problem("torch", f"cannot be imported: {error}", "install Atoll again")


def free_disk(folder: Path) -> Finding:
    """Measure the file system of a folder that may not exist yet."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        if not os.access(there, os.W_OK):
            return problem("disk", f"{there} cannot be written", "choose another --state-dir")
        return disk_finding(shutil.disk_usage(there).free, folder)
    except OSError as error:
        return problem("disk", f"{there}: {error.strerror}", "choose another --state-dir")


def bind_finding(host: str, port: int) -> Finding:
    """Try to listen on a port, as a peer does."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host, port), family=family) as server:
            return ok("listen", f"port {server.getsockname()[1]} on {host} can be listened on")
    except (OSError, OverflowError) as error:
        in_use = getattr(error, "errno", None) == errno.EADDRINUSE
        remedy = "stop what listens there" if in_use else "see whether a sandbox forbids it"
        return problem("listen", f"cannot listen on {host}:{port}: {error}", remedy)


def own_addresses() -> list[str]:
    """Return the addresses from which this machine's packets leave; nothing is sent."""
    found = []
    for family, target in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))
            found.append(str(probe.getsockname()[0]))
    return found


async def answers(host: str, port: int) -> bool:
    """Return whether a TCP port takes a connection within `DIAL_S`."""
    try:
        async with asyncio.timeout(DIAL_S):
            _, writer = await asyncio.open_connection(host, port)
    except (OSError, TimeoutError, UnicodeError):
        return False
    writer.transport.abort()
    return True


async def port_finding(check: str, places: Sequence[tuple[str, int]]) -> Finding:
    """Dial one server at all of its addresses; one that answers is enough."""
    replies = await asyncio.gather(*(answers(host, port) for host, port in places))
    named = [f"{host}:{port}" for host, port in places]
    if any(replies):
        return ok(check, f"answers at {named[replies.index(True)]}")
    by_proxy = next(filter(None, (proxies.remedy(host) for host, _ in places)), "")
    return problem(
        check,
        f"no answer at {', '.join(named) or 'any address'}",
        by_proxy
        or "ask the organiser whether it runs and that port is open; see that this machine's "
        "firewall lets connections out",
    )
