"""The books of a microbatch's origin: who counted it, and whom it has told to count it."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from math import inf

from atoll.peer.pipeline.actions import Tell
from atoll.peer.pipeline.messages import Microbatch, SettleNote
from atoll.peer.pipeline.wiring import Backoff

MAX_COUNTERS = 8  # peers of one stage that counted one microbatch; more are not believed
FIRST_PAUSE_S, MAX_PAUSE_S = 0.2, 5.0  # before a note that did not arrive is sent again


class CountedBy:
    """The peers that counted each microbatch, by stage, from the paths of its returns."""

    def __init__(self, stages: int) -> None:
        """Begin without microbatches."""
        self._last_stage = stages - 1
        self._peers: dict[Microbatch, dict[int, set[str]]] = {}
        self.doubles: Counter[int] = Counter()
        """by stage: how often a microbatch was counted at one more peer than at one"""

    def __len__(self) -> int:
        return len(self._peers)

    def begin(self, name: Microbatch) -> None:
        """Remember a microbatch of this origin."""
        self._peers[name] = {}

    def note(self, name: Microbatch, path: tuple[str, ...]) -> None:
        """Note who counted a microbatch, from the last stage on; ignore those not remembered."""
        stages = self._peers.get(name)
        if stages is None:
            return
        for stage, peer in zip(range(self._last_stage, 0, -1), path, strict=False):
            peers = stages.setdefault(stage, set())
            if peer in peers or len(peers) == MAX_COUNTERS:
                continue
            self.doubles[stage] += bool(peers)
            peers.add(peer)

    def forget(self, name: Microbatch) -> None:
        """Forget a microbatch."""
        self._peers.pop(name, None)


@dataclass(kw_only=True, eq=False)
class _UntoldNote:
    tell: Tell
    deadline_s: float
    pause: Backoff
    due_s: float = inf


class Settlements:
    """The notes by which the origin settles microbatches (`exact`), sent until they arrive."""

    def __init__(self, rng: random.Random) -> None:
        """Begin without any; `rng` spreads retries."""
        self._rng = rng
        self._waiting: dict[tuple[str, Microbatch], _UntoldNote] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def due_s(self) -> float:
        """Return when the next one is sent again."""
        return min((each.due_s for each in self._waiting.values()), default=inf)

    def settle(self, name: Microbatch, path: tuple[str, ...], *, until_s: float) -> list[Tell]:
        """Tell all peers of a path that a microbatch counts; give up at `until_s`."""
        note = SettleNote(
            origin=name.origin,
            incarnation=name.incarnation,
            sequence=name.sequence,
            nonce=name.nonce,
        )
        tells = [Tell(peer=peer, note=note) for peer in dict.fromkeys(path)]
        for tell in tells:
            self._waiting[tell.peer, name] = _UntoldNote(
                tell=tell,
                deadline_s=until_s,
                pause=Backoff(first_s=FIRST_PAUSE_S, max_s=MAX_PAUSE_S),
                due_s=until_s,
            )
        return tells

    def told(self, tell: Tell) -> None:
        """Note that a note has arrived."""
        self._waiting.pop((tell.peer, tell.note.microbatch), None)

    def untold(self, tell: Tell, now_s: float) -> None:
        """Note that it has not."""
        each = self._waiting.get((tell.peer, tell.note.microbatch))
        if each is not None:
            each.pause.fail(now_s, self._rng)
            each.due_s = min(each.pause.until_s, each.deadline_s)

    def tick(self, now_s: float) -> list[Tell]:
        """Return the notes that are sent again; forget those whose time is over."""
        for key, each in list(self._waiting.items()):
            if each.deadline_s <= now_s:
                del self._waiting[key]
        due = [each for each in self._waiting.values() if each.due_s <= now_s]
        for each in due:
            each.due_s = each.deadline_s
        return [each.tell for each in due]
