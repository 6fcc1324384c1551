"""Checks of a machine and of its way to a run, for `atoll doctor`; each says what to do.

Pure checks take what was measured and return a `Finding`. Probes measure: each ends within its
deadline, and none raises because there is no network.

    Finding    one line: a name, how it is, the fact, the remedy
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
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

from atoll.coordinator.rpc import proxies
from atoll.coordinator.run.text import size
from atoll.dht.addresses import TCP, is_public
from atoll.dht.tasks import together

MIN_PYTHON = (3, 11)
LOW_DISK_BYTES = 2 * 10**9  # log and snapshots of a small run; `atoll peer` states what a run needs
NO_DISK_BYTES = 100 * 10**6  # too little for the snapshot of any useful model
LOW_MEMORY_BYTES = 10**9  # a peer of the smallest model takes about 600 MB
MAX_CLOCK_OFF_S = 3.0  # hivemind refuses a node that is further off; the peer corrects its own
DIAL_S = 5.0  # room for two lost SYNs, which are sent again after 1 and 3 s
BEST_ON_LOSS = "bbr"  # TCP's congestion control; most systems use cubic
CONGESTION_CONTROL = Path("/proc/sys/net/ipv4/tcp_congestion_control")
SLOW_MBIT_S = 1.0
NOTHING_MBIT_S = 0.2  # 64 KiB do not pass in the seconds of a measurement
LONG_ROUND_S = 30.0  # hidden behind windows of a minute, with half of it to spare


class Health(StrEnum):
    """The severity of a finding."""

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


def memory_finding(available_bytes: int) -> Finding:
    """Judge the memory that programs may still take."""
    fact = f"{size(available_bytes)} available"
    if available_bytes < LOW_MEMORY_BYTES:
        return note("memory", fact, "close other programs; a peer needs 600 MB and the model")
    return ok("memory", fact)


def tcp_finding(congestion_control: str) -> Finding:
    """Judge how this machine sends on a link that loses packets (docs/benchmarks/links.md)."""
    if congestion_control == BEST_ON_LOSS:
        return ok("tcp", f"sends with {congestion_control}")
    return note(
        "tcp",
        f"sends with {congestion_control}, a tenth as fast as {BEST_ON_LOSS} on a link that loses "
        "0.5% of packets",
        "if rounds are slow: sudo sysctl -w net.core.default_qdisc=fq "
        f"net.ipv4.tcp_congestion_control={BEST_ON_LOSS}",
    )


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
        f"the coordinator gets no answer at {place}: a router or firewall refuses connections",
        "peers reach this machine by hole punching or a relay, which is slower; forward a TCP port "
        "and name it with --listen and --announce",
    )


def upnp_finding(*, is_used: bool, refusal: str) -> Finding:
    """Judge whether the router forwards ports at our request."""
    if is_used:
        return ok("upnp", "the router forwards the peer's port when it is asked to")
    return note(
        "upnp",
        f"the router forwards no port: {refusal}",
        "turn on UPnP in its settings, so that others can dial the peer with nothing to forward "
        "by hand",
    )


def nat_finding(own: Sequence[str], seen: str, observed: Sequence[str] = ()) -> Finding:
    """Judge the kind of router from where others see this machine come from.

    Args:
        own: addresses of this machine.
        seen: the address that the coordinator's dial-back went to; empty if it is not known.
        observed: multiaddrs from which nodes on different hosts see the connections of one port.
    """
    found = [(m["host"], m["port"]) for m in map(TCP.match, observed) if m is not None]
    found = [place for place in found if _is_ip(place[0])]
    public = [place for place in found if is_public(place[0])] or found
    hosts = {host for host, _ in public} or ({seen} if _is_ip(seen) else set())
    if not hosts:
        return note("router", "unknown: no peer reported this machine's address", "try again later")
    here = sorted(host for host in hosts if host in own or ipaddress.ip_address(host).is_loopback)
    if here:
        return ok("router", f"none: others see this machine's own address, {', '.join(here)}")
    fact = (
        f"one translates addresses: others see {', '.join(sorted(hosts))}, this machine has "
        f"{', '.join(own) or 'none'}"
    )
    if len(public) < 2:
        return note(
            "router",
            f"{fact}; its kind is not known, as fewer than two nodes of the run see this machine",
            "nothing to do unless 'reached' reports a problem; check again when more public peers "
            "are online",
        )
    if len(set(public)) == 1:
        return ok(
            "router", f"{fact}, at one port for all (endpoint-independent): hole punching works"
        )
    return note(
        "router",
        f"{fact}, at another port for each (endpoint-dependent, 'symmetric'): hole punching fails",
        "peers behind routers reach this machine through a relay, others directly; forward a TCP "
        "port and name it with --listen and --announce, or use another network",
    )


def _is_ip(host: str) -> bool:
    with suppress(ValueError):
        return bool(ipaddress.ip_address(host))
    return False


def rate_finding(what: str, num_bytes: int, seconds: float) -> Finding:
    """Judge a transfer; so short a one tells little of a fast link."""
    rate = 8e-6 * num_bytes / max(seconds, 1e-6)
    fact = f"{size(num_bytes)} in {seconds:.2f} s from {what}, at least {rate:.1f} Mbit/s"
    if rate < SLOW_MBIT_S:
        return note("rate", fact, "rounds of this run may outlast their windows on this link")
    return ok("rate", fact)


def link_finding(
    what: str, up_mbit_s: float | None, down_mbit_s: float | None, round_bytes: int
) -> Finding:
    """Judge the measured rates of a link by what a round of the run sends and receives.

    Args:
        what: the other end.
        up_mbit_s: rate to it; None if less than a first, small piece passed in time.
        down_mbit_s: rate from it, likewise.
        round_bytes: most bytes of a round, each way.
    """
    up, down = up_mbit_s or NOTHING_MBIT_S, down_mbit_s or NOTHING_MBIT_S
    slowest = min(up, down)
    round_s = 8e-6 * round_bytes / slowest
    fact = (
        f"up {_rate(up_mbit_s)} Mbit/s, down {_rate(down_mbit_s)} Mbit/s, {what}; a round of this "
        f"run takes {'at most ' if round_s < 1 else ''}{max(1, round(round_s))} s at "
        f"{_rate(slowest)} Mbit/s"
    )
    if round_s <= LONG_ROUND_S and slowest >= SLOW_MBIT_S:
        return ok("rate", fact)
    return note(
        "rate",
        fact,
        f"{'uploads' if up <= down else 'downloads'} limit it: stop others on this link, or use a "
        "cable; the organiser can choose fewer bytes or longer windows (`atoll plan`)",
    )


def _rate(mbit_s: float | None) -> str:
    if mbit_s is None or mbit_s <= NOTHING_MBIT_S:
        return f"under {NOTHING_MBIT_S:g}"
    return f"{mbit_s:.2g}" if mbit_s < 10 else f"{mbit_s:.0f}"


def exit_code(findings: Sequence[Finding]) -> int:
    """Return 1 if there is a problem, else 0."""
    return int(any(finding.health is Health.PROBLEM for finding in findings))


# probes


def torch_finding() -> Finding:
    """Find torch and the device that a peer would take; takes seconds, as it imports torch."""
    try:
        from atoll.peer.training.devices import Device

        return ok("torch", f"{version('torch')}, trains on {Device.choose().label}")
    except (ImportError, PackageNotFoundError, OSError) as error:
        return problem("torch", f"cannot be imported: {error}", "install Atoll again")


def congestion_control() -> str:
    """Return how this machine sends over TCP; empty where the system does not say (not Linux)."""
    with suppress(OSError):
        return CONGESTION_CONTROL.read_text(encoding="ascii").strip()
    return ""


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
        remedy = "stop the program there" if in_use else "check whether a sandbox forbids it"
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
    replies = await together(*(answers(host, port) for host, port in places))
    named = [f"{host}:{port}" for host, port in places]
    if any(replies):
        return ok(check, f"answers at {named[replies.index(True)]}")
    by_proxy = next(filter(None, (proxies.remedy(host) for host, _ in places)), "")
    return problem(
        check,
        f"no answer at {', '.join(named) or 'any address'}",
        by_proxy
        or "ask the organiser whether it runs and that port is open; check that this "
        "machine's firewall allows outgoing connections",
    )
