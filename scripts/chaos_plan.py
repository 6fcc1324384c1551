"""The faults of a run under chaos, drawn from one seed before it begins."""

import random
from dataclasses import dataclass
from typing import Literal, get_args

FaultKind = Literal["kill", "freeze", "cut", "slow", "move", "leave", "coordinator"]
KINDS: tuple[FaultKind, ...] = get_args(FaultKind)
WORDS: dict[FaultKind, str] = {
    "kill": "SIGKILL of a peer's process, which is started again",
    "freeze": "SIGSTOP of all processes of a peer",
    "cut": "every packet from and to a host is lost",
    "slow": "a tenth of the rate, 100 ms more delay and 1% loss",
    "move": "another public address for a host or its router",
    "leave": "a peer leaves (SIGTERM), and a newcomer joins from its host",
    "coordinator": "SIGKILL of the coordinator's process, which is started again",
}
# Seconds of the shortest and the longest. Away or frozen for less, nobody would notice; for longer,
# few faults would fit into a run.
LASTS_S: dict[FaultKind, tuple[float, float]] = {
    "kill": (2.0, 20.0),
    "freeze": (5.0, 30.0),
    "cut": (5.0, 30.0),
    "slow": (20.0, 60.0),
    "move": (0.0, 0.0),
    "leave": (5.0, 30.0),
    "coordinator": (2.0, 30.0),
}
MOST_SHARE = 3 / 8  # of the peers that are disturbed at once: a majority stays
RECOVERS_S = 20.0  # after a fault, in which its host is not struck again: a peer starts and joins
GAPS = (0.5, 1.5)  # shortest and longest time between two faults, in parts of the mean


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault. Times are seconds after the start."""

    at_s: float
    kind: FaultKind
    host: int
    """0 is the coordinator's; peers have the others"""
    lasts_s: float

    @property
    def ends_s(self) -> float:
        """When it ends."""
        return self.at_s + self.lasts_s

    def __str__(self) -> str:
        """Say what it is."""
        host = "coordinator" if self.host == 0 else f"peer-{self.host}"
        return f"{self.kind} {host} for {self.lasts_s:.0f} s"


def draw(seed: int, *, seconds: float, peers: int, every_s: float) -> list[Fault]:
    """Return the faults of a run, in order.

    Each kind comes once before any comes again, so that a short run has them all. A host has one
    fault at a time. The last one is over early enough for its peer to be back at the end.

    Args:
        seed: of everything random.
        seconds: length of the run.
        peers: hosts, from 1 on.
        every_s: mean time between two faults.
    """
    rng, found, kinds = random.Random(seed), list[Fault](), list[FaultKind]()
    at_s = 0.0
    while True:
        at_s += every_s * rng.uniform(*GAPS)
        if at_s > seconds - RECOVERS_S:
            return found
        if not kinds:
            kinds = rng.sample(KINDS, len(KINDS))
        kind = kinds[-1]
        lasts_s = min(rng.uniform(*LASTS_S[kind]), seconds - RECOVERS_S - at_s)
        free = [host for host in _hosts(kind, peers) if not _is_busy(found, host, at_s)]
        disturbed = {each.host for each in found if each.ends_s + RECOVERS_S > at_s} - {0}
        if free and (kind == "coordinator" or len(disturbed) + 1 <= MOST_SHARE * peers):
            kinds.pop()
            found.append(Fault(at_s=at_s, kind=kind, host=rng.choice(free), lasts_s=lasts_s))


def _hosts(kind: FaultKind, peers: int) -> range:
    return range(1) if kind == "coordinator" else range(1, peers + 1)


def _is_busy(faults: list[Fault], host: int, at_s: float) -> bool:
    return any(each.host == host and each.ends_s + RECOVERS_S > at_s for each in faults)
