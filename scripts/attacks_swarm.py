"""The attacks of `scripts/bench_attacks.py` on four peers in memory, on a virtual clock.

The peers are those of `tests/support/swarm.py`: real rounds, log and votes. The last of them is the
attacker, or a stranger beside them is. Seconds are of the virtual clock; CPU time and memory are of
the process, which has all peers and the attacker. In the rows with keepers, four or seven of them
vote on the work of three trainers, and fewer than a third of them attack.
"""

import asyncio
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from attacks_rows import Phase, Progress, Row, counted, peak_mb, row_of

from atoll.dht.tasks import Tasks, end, together
from atoll.dht.testing import memory
from atoll.optim.log.entry import Entry, max_liars
from atoll.peer.rounds.policies import group_patience_s
from support import attackers, greedy
from support.liar_runs import PATIENCE_S, WINDOW_S
from support.liars import Liar
from support.swarm import (
    SETTINGS,
    Swarm,
    SwarmPeer,
    claim,
    identity_of,
    run_swarm,
)

PHASE_S = 180.0  # 36 windows: each of four peers leads nine positions
STEP_S = 0.25  # between two looks at the peers
JOIN_EVERY_S = 30.0
TRAINERS = 3  # beside keepers
LATER_PATIENCE_S = group_patience_s(
    1, grace_s=SETTINGS.grace_s, stall_s=SETTINGS.stall_s, last_s=WINDOW_S, window_s=WINDOW_S
)
"""of a member with the leader of a later term: an attacker may be the leader of that one too"""


@dataclass(kw_only=True)
class Scene:
    """A swarm under attack."""

    patch: pytest.MonkeyPatch
    """undone when the attack ends"""
    swarm: Swarm
    peers: list[SwarmPeer]
    seen: Counter[str] = field(default_factory=Counter)
    """what the attacker met, and how often"""
    joined_s: list[float] = field(default_factory=list)
    """how long newcomers took, the first of them before the attack"""
    began_at: int = 0
    """position"""
    told: list[int] = field(default_factory=list)
    """how many events each peer had reported when the attack began"""

    @property
    def liar(self) -> SwarmPeer:
        """The attacker, if it is a member."""
        return self.peers[-1]

    def stranger(self) -> Any:
        """Return the transport of somebody without an admission."""
        return self.swarm.network.transport(identity_of(99).peer_id)

    async def let_join(self, begin: Callable[[], object]) -> None:
        """Let a newcomer join and leave, then one after the other once the attack has begun."""
        await self._join()
        begin()
        while True:
            await self._join()
            await asyncio.sleep(JOIN_EVERY_S)

    async def _join(self) -> None:
        newcomer, took_s = await greedy.join_s(self.swarm, role="keeper")
        self.joined_s.append(took_s)
        await newcomer.stop()
        self.swarm.network.kill(newcomer.identity.peer_id, clean=True)
        self.swarm.peers.remove(newcomer)


Begin = Callable[[Scene], Coroutine[Any, Any, None] | None]
"""Starts an attack; a coroutine runs until the attack ends."""
Saw = Callable[[Scene], str]


def met(scene: Scene) -> str:
    """Return what the attacker met."""
    return counted(scene.seen)


def warnings(scene: Scene) -> str:
    """Return how often the honest peers warned."""
    honest = zip(scene.peers[:-1], scene.told, strict=False)
    count = sum(level != "info" for peer, told in honest for level in peer.levels[told:])
    return f"{count} warnings of honest peers"


def electors(scene: Scene) -> str:
    """Return how many vote in the end."""
    known = {peer.ctx.me for peer in scene.peers}
    order = scene.peers[0].replica.electorate
    return f"{len(known & set(order))} of {len(known)} peers vote, {len(set(order) - known)} others"


def newcomers(scene: Scene) -> str:
    """Return how long newcomers took."""
    before_s, *during_s = scene.joined_s
    longest = f"at most {max(during_s):.1f} s" if during_s else "never"
    return f"{len(during_s)} newcomers had the log after {longest}, {before_s:.1f} s before"


def decided(scene: Scene) -> list[Entry]:
    """Return the entries since the attack began."""
    replica = scene.peers[0].replica
    rows = replica.store.headers(scene.began_at, replica.position - scene.began_at)
    return [Entry.decode(row.entry) for row in rows]


def parts(scene: Scene) -> str:
    """Return how many parts were the attacker's, and how many another owner reduced again."""
    cut = [(entry.members[part.owner], part) for entry in decided(scene) for part in entry.parts]
    its = sum(owner.peer_id == scene.liar.identity.peer_id for owner, _ in cut)
    again = sum(part.generation > 0 for _, part in cut)
    return f"{its} of {len(cut)} parts are its own, {again} were repaired; {electors(scene)}"


def share(scene: Scene) -> str:
    """Return the attacker's largest part of an update, by weight, clip factor and norm."""
    most = 0.0
    for entry in decided(scene):
        pull = {m.peer_id: m.weight * m.clip * m.norm for m in entry.members}
        mine = pull.get(scene.liar.identity.peer_id, 0.0)
        most = max(most, mine / sum(pull.values()) if pull else 0.0)
    return f"at most {100 * most:.0f}% of an update is its own"


@dataclass(frozen=True, kw_only=True)
class Attack:
    """The acts of the attacker, and the report of them."""

    what: str
    begin: Begin
    stranger: bool = False
    keepers: int = 0
    """how many vote, and tolerate liars; 0: the four trainers vote"""
    saw: Saw = warnings

    @property
    def liars(self) -> int:
        """How many peers attack, if they are members."""
        return max(1, max_liars(self.keepers))


def _p2(scene: Scene) -> None:
    attackers.drop(scene.patch, scene.liar.ctx.me, 3)
    attackers.close_alone(scene.patch, scene.liar.ctx.me)


def _p4(scene: Scene) -> None:
    attackers.equivocate(scene.patch, scene.liar.ctx.me)


def _p5(scene: Scene) -> None:
    attackers.declare_no_uplink(scene.patch, scene.liar.ctx.link)
    attackers.hold(scene.patch, scene.liar.ctx.me)


def _p9(scene: Scene) -> Coroutine[Any, Any, None]:
    def begin() -> None:
        claim(scene.patch, scene.liar, position=1 << 60)
        greedy.forge_headers(scene.patch, scene.liar, large=True)

    return scene.let_join(begin)


def _p10(what: str) -> Begin:
    def attack(scene: Scene) -> Coroutine[Any, Any, None]:
        def begin() -> None:
            claim(scene.patch, scene.liar, position=1 << 60)
            greedy.trickle(scene.patch, scene.liar, what)

        return scene.let_join(begin)

    return attack


async def _p13(scene: Scene) -> None:
    identity = identity_of(99)
    refused = scene.seen
    await attackers.call_far_terms(scene.stranger(), identity, scene.peers, refused)


async def _p13_keepers(scene: Scene) -> None:
    liars = scene.peers[-max_liars(len(scene.peers) - TRAINERS) :]
    for liar in liars:
        attackers.stop_at(scene.patch, liar.ctx.me, "_form")
    keepers = scene.peers[TRAINERS:]
    await together(*(attackers.preempt(liar, keepers) for liar in liars))


async def _p14(scene: Scene) -> None:
    scene.patch.setattr(memory, "WINDOW_BYTES", 1)  # a donor notices a reader that takes nothing
    async with Tasks() as tasks:
        hog = partial(greedy.hog, scene.liar.transport, scene.peers[:-1])
        await scene.let_join(lambda: tasks.spawn(hog()))


def _p15(scene: Scene) -> None:
    for liar in scene.peers[-2:]:
        greedy.shrink(scene.patch, liar)


def kept(scene: Scene) -> str:
    """Return what the honest half's contributions kept of their norms, at least."""
    honest = {peer.identity.peer_id for peer in scene.peers[:-2]}
    members = [m for entry in decided(scene) for m in entry.members if m.peer_id in honest]
    least = min((m.clip for m in members), default=1.0)
    return f"honest contributions keep {least:.1g} of their norms at least"


def _p19(scene: Scene) -> None:
    others = {peer.identity.peer_id for peer in scene.peers[:-1]}
    attackers.leave_out(scene.patch, scene.liar.ctx.me, others)


def led(scene: Scene) -> str:
    """Return how many entries have no honest member, and whether honest leaders are passed over."""
    entries, mine = decided(scene), scene.liar.identity.peer_id
    alone = sum({m.peer_id for m in entry.members} == {mine} for entry in entries)
    honest = scene.peers[:-1]
    names = {peer.identity.peer_id for peer in honest}
    wrong = sum(bool(names & peer.ctx.failed.passed_over) for peer in honest)
    left = sum(mine in peer.ctx.failed.passed_over for peer in honest)
    return (
        f"{alone} of {len(entries)} rounds are its own alone; in the end {left} of {len(honest)} "
        f"peers pass it over, and {wrong} an honest leader"
    )


def _c4(scene: Scene) -> None:
    honest = scene.peers[:-1]
    attackers.evict(scene.patch, honest, scene.liar)
    attackers.stay(scene.patch, scene.liar, honest[0])


ATTACKS: dict[str, Attack] = {
    "none": Attack(what="no attack", begin=lambda scene: None),
    "p1": Attack(
        what="an owner reports that nobody else sent anything",
        begin=lambda scene: attackers.deny_others(scene.patch, scene.liar.ctx.me),
        saw=parts,
    ),
    "p2": Attack(what="a leader drops all other electors", begin=_p2, saw=electors),
    "p3": Attack(
        what="a leader never closes the group",
        begin=lambda scene: attackers.stop_at(scene.patch, scene.liar.ctx.me, "_form"),
    ),
    "p3-vote": Attack(
        what="a leader never counts the votes",
        begin=lambda scene: attackers.stop_at(scene.patch, scene.liar.ctx.me, "_count_votes"),
    ),
    "p4": Attack(
        what="a leader proposes two entries at one ballot",
        begin=_p4,
    ),
    "p5": Attack(what="a member declares no uplink, and sends signs of life alone", begin=_p5),
    "p5-owner": Attack(
        what="an owner takes all chunks, sends signs of life, and finishes no part",
        begin=lambda scene: attackers.finish_no_parts(scene.patch, scene.liar.ctx.me),
        saw=parts,
    ),
    "p6": Attack(
        what="five keys report a weight of 0 to each leader",
        begin=lambda scene: greedy.crowd(scene.swarm, scene.peers, 5, scene.seen),
        saw=electors,
    ),
    "p7": Attack(
        what="a leader gives a member an absurd weight",
        begin=lambda scene: attackers.falsify(
            scene.patch, scene.liar.ctx.me, {"weight": 999999995904.0}
        ),
    ),
    "p8": Attack(
        what="a member claims 16 times its tokens and sends 8 times its norm",
        begin=lambda scene: greedy.work_more(scene.patch, scene.liar),
        saw=share,
    ),
    "p9": Attack(
        what="a donor claims to be far ahead, and forges entries", begin=_p9, saw=newcomers
    ),
    "p9-part": Attack(
        what="an owner reports a part that decodes to nothing",
        begin=lambda scene: attackers.spoil_parts(scene.patch, scene.liar.ctx.me),
        saw=parts,
    ),
    "p10": Attack(what="a donor sends a header every 5 s", begin=_p10("headers"), saw=newcomers),
    "p11": Attack(
        what="a member sends entries that take seconds to parse",
        begin=lambda scene: greedy.send_costly(scene.liar.transport, scene.peers[:-1], scene.seen),
        saw=met,
    ),
    "p12": Attack(
        what="a member leaves parts up front that no round asks for",
        begin=lambda scene: greedy.hoard(scene.liar, scene.peers[:-1], scene.seen),
        saw=met,
    ),
    "p13": Attack(what="a stranger reports for the last term", begin=_p13, stranger=True, saw=met),
    "p13-lone": Attack(
        what="a stranger calls the leaders of later terms",
        begin=lambda scene: greedy.call_alone(scene.swarm, scene.peers, seen=scene.seen),
        stranger=True,
        saw=met,
    ),
    "p13-keeper": Attack(
        what="one keeper of four asks for promises of its next terms at once",
        begin=_p13_keepers,
        keepers=4,
    ),
    "p13-keepers": Attack(
        what="two keepers of seven ask for promises of their next terms at once",
        begin=_p13_keepers,
        keepers=7,
    ),
    "p14": Attack(what="a member reads bulk data slowly in all slots", begin=_p14, saw=newcomers),
    "c4-elector": Attack(
        what="an evicted elector says that it stands at the head, and leads in silence",
        begin=_c4,
        saw=electors,
    ),
    "p17": Attack(
        what="a member says that it is ready, and never reports",
        begin=lambda scene: attackers.never_report(scene.patch, scene.liar.ctx.me),
    ),
    "p15": Attack(
        what="two members of four declare norms of 1e-30, and send as little",
        begin=_p15,
        saw=kept,
    ),
    "p18": Attack(
        what="an elector ends the terms of other leaders, and decides its own work alone",
        begin=lambda scene: attackers.usurp(scene.patch, scene.liar),
        saw=led,
    ),
    "p19": Attack(what="a leader leaves all others out of its groups", begin=_p19, saw=led),
    "random": Attack(what="an elector lies at random (seed 2)", begin=lambda scene: None),
}
"""By name; the liar at random takes over its peer before the run starts."""


class _Watch:
    """Rounds of the honest peers on the virtual clock."""

    def __init__(self, scene: Scene, *, liars: int) -> None:
        self._swarm, self._attacker = scene.swarm, scene.liar
        self.honest = scene.peers[: len(scene.peers) - liars]
        self.cpu_s = 0.0
        """per round, of the last phase"""
        self.out_at: float | None = None

    def least(self) -> int:
        return min(peer.replica.position for peer in self.honest)

    def _is_out(self) -> bool:
        name, now_s = self._attacker.identity.peer_id, self._swarm.now()
        return all(
            peer.ctx.conduct.is_out(name)
            or peer.ctx.lags.barred(name, now_s) is not None
            or not peer.ctx.promises.believes(name)
            or name not in {elector.peer_id for elector in peer.replica.electorate}
            for peer in self.honest
        )

    async def phase(self) -> Phase:
        """Watch for the length of a phase."""
        began_s, cpu_s = self._swarm.now(), time.process_time()
        progress = Progress(began_s=began_s, first=self.least())
        while self._swarm.now() < began_s + PHASE_S:
            progress.note(self._swarm.now(), self.least())
            if self.out_at is None and self._is_out():
                self.out_at = self._swarm.now()
            for peer in self._swarm.peers:  # what tests look up later, and no real peer keeps
                peer.handed_in.clear()
                peer.offers.clear()
                peer.settled.clear()
            await asyncio.sleep(STEP_S)
        self.cpu_s = time.process_time() - cpu_s
        return progress.phase()


async def _end(tasks: list[asyncio.Task[None]]) -> None:
    """Cancel what the attacker does; raise what it failed with."""
    await end(*tasks, expected=(Exception,))
    for task in tasks:
        if task.done() and not task.cancelled():
            task.result()


def measure(name: str) -> Row:
    """Run one attack, from a time without it to a time after it."""
    torch.set_num_threads(1)
    attack = ATTACKS[name]

    async def scenario(swarm: Swarm) -> Row:
        peers = [swarm.add(window_s=WINDOW_S) for _ in range(TRAINERS if attack.keepers else 4)]
        peers += [swarm.add(role="keeper") for _ in range(attack.keepers)]
        liar = Liar(peers[-1], peers[:-1], 2) if name == "random" else None
        await swarm.begin(peers)
        with pytest.MonkeyPatch.context() as patch:
            scene = Scene(patch=patch, swarm=swarm, peers=peers)
            watch = _Watch(scene, liars=0 if attack.stranger or name == "none" else attack.liars)
            await swarm.until(lambda: watch.least() >= 2)
            before = await watch.phase()
            cpu_s, peak, began_s = watch.cpu_s, peak_mb(), swarm.now()
            scene.began_at, scene.told = watch.least(), [len(peer.events) for peer in peers]
            work = attack.begin(scene)
            tasks = liar.begin() if liar is not None else []
            if work is not None:
                tasks.append(asyncio.create_task(work))
            during = await watch.phase()
            memory_mb, cpu = peak_mb() - peak, watch.cpu_s / cpu_s
            await _end(tasks)
            saw = attack.saw(scene)
        if liar is not None:
            liar.lying = False
        return row_of(
            name,
            attack.what,
            [before, during, await watch.phase()],
            stranger=attack.stranger,
            deadline_s=LATER_PATIENCE_S if attack.keepers else PATIENCE_S,
            memory_mb=memory_mb,
            cpu=cpu,
            out_s=None if watch.out_at is None else watch.out_at - began_s,
            saw=saw,
        )

    with tempfile.TemporaryDirectory() as folder:
        voting: dict[str, str] = {"electors": "keepers", "trust": "byzantine"}
        options = voting if attack.keepers else {}
        return run_swarm(Path(folder), scenario, codec="int8", **options)
