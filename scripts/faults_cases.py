"""The faults of `scripts/bench_faults.py`: which hosts they strike, how, and the outcome.

A case takes a `Scene` of hosts that have just met, lets them reduce undisturbed, strikes in the
middle of a reduction, and reports when the survivors had their result and what it contained.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from allreduce_host import vector
from faults_host import SAMPLE_STEP
from faults_lab import Scene, SceneError

WINDOW_S = 3.0  # leaves a returning peer time to catch up between rounds of 2 s
WARM = 3  # positions; the first has no measured rate
STRIKE_AT = 0.4  # fraction of an undisturbed reduction
AWAY_S = 12.0  # duration of a freeze or a partition
PATIENCE_S = 60.0  # after this a survivor counts as stuck
SLOW = 1 / 20

Facts = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Strike:
    """The result of one repeat."""

    seconds: float | None
    late_s: float | None = None
    back_s: float | None = None
    outcome: str = ""


@dataclass(frozen=True, kw_only=True)
class Struck:
    """A position whose reduction was struck."""

    position: int
    victims: tuple[int, ...]
    began_s: float
    at_s: float
    normal_s: float
    """duration of an undisturbed reduction of this scene"""


Pick = Callable[[Scene, int], tuple[int, ...] | None]
"""(scene, leader) -> the hosts to strike; None: wait for another position"""
Fault = Callable[[Scene, tuple[int, ...]], None]


# choice of hosts, and faults


def a_member(scene: Scene, leader: int) -> tuple[int, ...]:
    return (next(i for i in scene.everyone if i != leader),)


def the_leader(scene: Scene, leader: int) -> tuple[int, ...]:
    return (leader,)


def the_sender(scene: Scene, leader: int) -> tuple[int, ...] | None:
    """Pick the last host, whose slow link leaves it owner of nothing."""
    last = scene.everyone[-1]
    return None if leader == last else (last,)


def half_of_all(scene: Scene, leader: int) -> tuple[int, ...]:
    return tuple(i for i in scene.everyone if i != leader)[: len(scene.everyone) // 2]


def all_but_the_first(scene: Scene) -> tuple[int, ...]:
    return tuple(scene.everyone[1:])


def the_last(scene: Scene) -> tuple[int, ...]:
    return tuple(scene.everyone[-1:])


def kill(scene: Scene, victims: tuple[int, ...]) -> None:
    for victim in victims:
        scene.hosts[victim].kill()


def freeze(scene: Scene, victims: tuple[int, ...]) -> None:
    for victim in victims:
        scene.hosts[victim].freeze()


def thaw(scene: Scene, victims: tuple[int, ...]) -> None:
    for victim in victims:
        scene.hosts[victim].thaw()


def split(scene: Scene, victims: tuple[int, ...]) -> None:
    scene.lab.far = frozenset(victims)


def heal(scene: Scene, victims: tuple[int, ...]) -> None:
    scene.lab.far = frozenset()


def kill_p2pd(scene: Scene, victims: tuple[int, ...]) -> None:
    for victim in victims:
        scene.hosts[victim].kill_p2pd()


def slow_down(scene: Scene, victims: tuple[int, ...]) -> None:
    for victim in victims:
        link = scene.lab.links[victim]
        scene.lab.links[victim] = replace(link, up=link.up * SLOW, down=link.down * SLOW)


# atoll


def normal_s(scene: Scene, before: int) -> float:
    """Return the median seconds of the undisturbed reductions before a position but the first."""
    everyone = scene.everyone
    spans = [
        scene.committed_s(everyone, position) - scene.first_reduce(position)["at_s"]
        for position in range(1, before)
    ]
    return statistics.median(spans)


def strike(scene: Scene, pick: Pick, fault: Fault, normal: float) -> Struck:
    """Strike in the next reduction that offers a victim."""
    position = scene.position() + 2
    while True:
        began = scene.first_reduce(position)
        victims = pick(scene, scene.ids.index(began["leader"]))
        if victims is not None:
            break
        position += 1
    time.sleep(max(0.0, began["at_s"] + STRIKE_AT * normal - time.monotonic()))
    at_s = time.monotonic()
    fault(scene, victims)
    return Struck(
        position=position, victims=victims, began_s=began["at_s"], at_s=at_s, normal_s=normal
    )


def begun(scene: Scene) -> float:
    """Let the hosts reduce; return the seconds of an undisturbed reduction."""
    scene.tell_all({"go": WINDOW_S})
    if scene.committed_s(scene.everyone, WARM - 1, timeout_s=120) is None:
        raise SceneError("the hosts did not complete the undisturbed rounds")
    return normal_s(scene, WARM)


def judged(scene: Scene, struck: Struck, survivors: Sequence[int], back_s: float | None) -> Strike:
    """Return the outcome for a position that was struck."""
    done_s = scene.committed_s(survivors, struck.position, PATIENCE_S)
    if done_s is None:
        return Strike(seconds=None, outcome="nothing committed")
    return Strike(
        seconds=done_s - struck.at_s,
        late_s=done_s - struck.began_s - struck.normal_s,
        back_s=back_s,
        outcome=words(scene, struck, survivors[0]),
    )


def words(scene: Scene, struck: Struck, survivor: int) -> str:
    """Describe the entry."""
    entry = scene.hosts[survivor].find("commit", position=struck.position)
    if entry["kind"] != "update":
        return "a NULL entry: the next round includes everything"
    names = [scene.ids[victim] for victim in struck.victims]
    counted = sum(name in entry["members"] for name in names)
    owned = sum(entry["cells"].get(name, 0) for name in names)
    agree = "" if scene.chains_agree() else "; CHAINS DIFFER"
    who = {0: "without it", len(names): "with all its cells"}.get(counted, "with some of them")
    return f"committed {who}; it owns {owned} of {sum(entry['cells'].values())} cells{agree}"


def once(pick: Pick, fault: Fault) -> Callable[[Scene], Strike]:
    """Return a fault that is not undone."""

    def measure(scene: Scene) -> Strike:
        struck = strike(scene, pick, fault, begun(scene))
        return judged(scene, struck, scene.others(*struck.victims), None)

    return measure


def for_a_while(
    pick: Pick, fault: Fault, undo: Fault, away_s: float = AWAY_S
) -> Callable[[Scene], Strike]:
    """Return a fault that is undone after a while."""

    def measure(scene: Scene) -> Strike:
        struck = strike(scene, pick, fault, begun(scene))
        survivors = scene.others(*struck.victims)
        scene.committed_s(survivors, struck.position, PATIENCE_S)
        time.sleep(max(0.0, struck.at_s + away_s - time.monotonic()))
        furthest, over_s = scene.position(), time.monotonic()
        undo(scene, struck.victims)
        again = [scene.member_again_s(victim, furthest, PATIENCE_S) for victim in struck.victims]
        back_s = max(again) - over_s if all(again) else None
        found = judged(scene, struck, survivors, back_s)
        missed = furthest - struck.position + 1
        return replace(found, outcome=f"{found.outcome}; {missed} entries decided meanwhile")

    return measure


def without_p2pd(scene: Scene) -> Strike:
    """Strike the libp2p daemon of a host, which the host restarts."""
    struck = strike(scene, a_member, kill_p2pd, begun(scene))
    found = judged(scene, struck, scene.others(*struck.victims), None)
    again_s = scene.member_again_s(struck.victims[0], struck.position - 1, PATIENCE_S)
    return replace(found, back_s=again_s - struck.at_s if again_s else None)


def split_in_two(scene: Scene) -> Strike:
    """Split the hosts in halves; at most one side continues."""
    struck = strike(scene, half_of_all, split, begun(scene))
    sides = (list(struck.victims), scene.others(*struck.victims))

    def decided() -> tuple[list[int], float] | None:
        for side in sides:
            done_s = scene.committed_s(side, struck.position, timeout_s=0.02)
            if done_s is not None:
                return side, done_s
        return None

    went_on = scene.until(decided, PATIENCE_S)
    time.sleep(max(0.0, struck.at_s + AWAY_S - time.monotonic()))
    furthest, over_s = scene.position(), time.monotonic()
    heal(scene, struck.victims)
    again = [scene.member_again_s(host, furthest, PATIENCE_S) for host in scene.everyone]
    back_s = max(again) - over_s if all(again) else None
    agree = "the same entries afterwards" if scene.chains_agree() else "CHAINS DIFFER"
    if went_on is None:
        return Strike(seconds=None, back_s=back_s, outcome=f"neither side decides; {agree}")
    side, done_s = went_on
    return Strike(
        seconds=done_s - struck.at_s,
        late_s=done_s - struck.began_s - struck.normal_s,
        back_s=back_s,
        outcome=f"one side of {len(side)} continues; {agree}",
    )


def leader_dies(moment: str) -> Callable[[Scene], Strike]:
    """Kill the leader at the first vote, or when it alone holds the certificate."""

    def measure(scene: Scene) -> Strike:
        normal = begun(scene)
        position = scene.position() + 2
        began = scene.first_reduce(position)
        leader = scene.ids.index(began["leader"])
        scene.tell(leader, {"die_at": moment})
        death = scene.until(lambda: scene.hosts[leader].find("dies"), PATIENCE_S)
        if death is None:
            raise SceneError(f"the leader never reached its {moment}")
        struck = Struck(
            position=position,
            victims=(leader,),
            began_s=began["at_s"],
            at_s=death["at_s"],
            normal_s=normal,
        )
        return judged(scene, struck, scene.others(leader), None)

    return measure


def slow_for_good(scene: Scene) -> Strike:
    """Return the struck round, and how the following rounds treat the slow host."""
    struck = strike(scene, a_member, slow_down, begun(scene))
    survivors, (slow,) = scene.others(*struck.victims), struck.victims
    found = judged(scene, struck, survivors, None)
    later = struck.position + 4
    if scene.committed_s(survivors, later, PATIENCE_S) is None:
        return replace(found, outcome=f"{found.outcome}; the rounds after it do not complete")
    entry = scene.hosts[survivors[0]].find("commit", position=later)
    span_s = scene.committed_s(survivors, later) - scene.first_reduce(later)["at_s"]
    cells, counted = entry["cells"].get(scene.ids[slow], 0), scene.ids[slow] in entry["members"]
    return replace(
        found,
        outcome=f"{found.outcome}; four rounds later it owns {cells} cells, its own "
        f"{'count' if counted else 'do not count in full'}, and a round takes {span_s:.1f} s",
    )


def nan_sent(scene: Scene) -> Strike:
    """Let one window of a host contain a cell of NaN."""
    normal = begun(scene)
    liar = scene.everyone[-1]
    first = scene.position() + 1
    scene.tell(liar, {"lie": True})

    def refused() -> Facts | None:
        return next((c for c in scene.hosts[0].commits() if is_without(c, first)), None)

    def is_without(commit: Facts, first: int) -> bool:
        return commit["position"] >= first and scene.ids[liar] not in commit["members"]

    entry = scene.until(refused, PATIENCE_S)
    scene.tell(liar, {"lie": False})
    if entry is None:
        return Strike(seconds=None, outcome="counted!")
    position = entry["position"]
    span_s = scene.committed_s(scene.everyone, position) - scene.first_reduce(position)["at_s"]
    why = {
        reason
        for host in scene.hosts
        for c in host.commits()
        if c["position"] == position
        for name, reason in c["left_out"].items()
        if name == scene.ids[liar]
    }
    again_s = scene.member_again_s(liar, position, PATIENCE_S)
    return Strike(
        seconds=span_s,
        late_s=span_s - normal,
        back_s=again_s - entry["at_s"] if again_s else None,
        outcome=f"its earlier cells count; refused: {', '.join(sorted(why)) or 'unnamed'}",
    )


# the other systems


def rival(
    fault: Fault | None, victims_of: Callable[[Scene], tuple[int, ...]] = the_last
) -> Callable[[Scene], Strike]:
    """Strike the second reduction of a group. Without a fault the victims send NaN."""

    def measure(scene: Scene) -> Strike:
        victims = victims_of(scene)
        scene.tell_all({"round": 0})
        began_s, ends = scene.first_reduce(0)["at_s"], ended(scene, scene.everyone, 0, PATIENCE_S)
        if len(ends) < len(scene.everyone):
            raise SceneError("the undisturbed reduction did not end")
        normal = ends[-1]["at_s"] - began_s
        if fault is None:
            for victim in victims:
                scene.tell(victim, {"lie": True})
        scene.tell_all({"round": 1})
        began_s = scene.first_reduce(1)["at_s"]
        at_s = began_s
        if fault is not None:
            time.sleep(max(0.0, began_s + STRIKE_AT * normal - time.monotonic()))
            at_s = time.monotonic()
            fault(scene, victims)
        return rival_outcome(scene, scene.others(*victims), at_s, began_s + normal)

    return measure


def ended(scene: Scene, hosts: Sequence[int], number: int, timeout_s: float) -> list[Facts]:
    """Return the ends of a reduction that came in time, in order."""

    def all_ended() -> list[Facts] | None:
        found = [e for i in hosts if (e := scene.hosts[i].find("ended", position=number))]
        return found if len(found) == len(hosts) else None

    scene.until(all_ended, timeout_s)
    found = [e for i in hosts if (e := scene.hosts[i].find("ended", position=number))]
    return sorted(found, key=lambda e: e["at_s"])


def rival_outcome(scene: Scene, survivors: Sequence[int], at_s: float, due_s: float) -> Strike:
    """Return the outcome for the survivors."""
    ends = ended(scene, survivors, 1, PATIENCE_S)
    failures = [e["failed"] for e in ends if e["failed"]]
    if len(ends) < len(survivors):
        stuck = len(survivors) - len(ends)
        return Strike(
            seconds=None,
            outcome=f"{stuck} of {len(survivors)} survivors still stuck after {PATIENCE_S:.0f} s, "
            f"{len(failures)} raised an error",
        )
    done_s = ends[-1]["at_s"]
    outcome = (
        f"{len(failures)} of {len(survivors)} survivors raise an error, nothing is reduced"
        if failures
        else quality(scene, survivors)
    )
    return Strike(seconds=done_s - at_s, late_s=done_s - due_s, outcome=outcome)


def quality(scene: Scene, survivors: Sequence[int]) -> str:
    """Describe the vectors of the hosts that reported success."""
    results = []
    for host in survivors:
        results.append(scene.tell(host, {"result": True}))
    if not all(result["finite"] for result in results):
        return "all report success, and all hold NaN"
    samples = [torch.tensor(result["sample"]) for result in results]
    apart = max(float((a - b).norm() / a.norm()) for a in samples for b in samples)
    inputs = [vector(i, scene.params)[::SAMPLE_STEP] for i in scene.everyone]
    wanted = [torch.stack(inputs).mean(0), torch.stack([inputs[i] for i in survivors]).mean(0)]
    error = max(min(float((s - w).norm() / w.norm()) for w in wanted) for s in samples)
    untouched = max(result["untouched"] for result in results)
    return (
        f"all report success; error {100 * error:.1f}%, up to {100 * apart:.1f}% apart from one "
        f"another, {100 * untouched:.0f}% of the values not reduced"
    )
