"""The rows of `scripts/bench_faults.py`: each fault, its hosts, and the systems it strikes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from faults_cases import (
    Strike,
    a_member,
    all_but_the_first,
    for_a_while,
    freeze,
    heal,
    kill,
    kill_p2pd,
    leader_dies,
    nan_sent,
    once,
    rival,
    slow_down,
    slow_for_good,
    split,
    split_in_two,
    thaw,
    the_leader,
    the_sender,
    without_p2pd,
)
from faults_lab import Scene
from faults_run import (
    RunScene,
    TwoNodes,
    clock_is_wrong,
    hivemind_with_a_wrong_clock,
    most_die_at_once,
    one_after_another,
)

from atoll.dht.testing.wan import WanLink

HOSTS = 4
SENDER_PARAMS = 1_000_000  # 16 cells: a host with 4 of 304 Mbit/s owns none of them
SENDER_MBIT_S = 4.0

ALIKE = tuple([WanLink(up=100.0, down=100.0, delay_ms=25.0)] * HOSTS)
FIVE = (*ALIKE, ALIKE[0])
ONE_SLOW = (*ALIKE[1:], WanLink(up=SENDER_MBIT_S, down=100.0, delay_ms=25.0))


@dataclass(frozen=True, kw_only=True)
class Case:
    """A row of the table."""

    fault: str
    ours: Callable[[Any], Strike]
    """takes a `scene`"""
    rivals: Callable[[Any], Strike] | None = None
    """takes a `rival_scene`"""
    scene: type[Scene | RunScene] = Scene
    rival_scene: type[Scene | TwoNodes] = Scene
    not_for: tuple[str, ...] = ()
    target_s: float | None = None
    links: tuple[WanLink, ...] = ALIKE
    params: int = 0
    """0: the number given on the command line"""


def cases() -> list[Case]:
    """Return the cases; targets are for owners and exclude the transfer of a part."""
    sender = {"links": ONE_SLOW, "params": SENDER_PARAMS}
    return [
        Case(fault="sender killed", ours=once(the_sender, kill), target_s=1.0, **sender),
        Case(fault="sender frozen", ours=once(the_sender, freeze), target_s=3.0, **sender),
        Case(fault="member killed", ours=once(a_member, kill), rivals=rival(kill), target_s=1.0),
        Case(
            fault="member frozen",
            ours=for_a_while(a_member, freeze, thaw),
            rivals=rival(freeze),
            target_s=3.0,
        ),
        Case(fault="leader killed in reduce", ours=once(the_leader, kill), target_s=1.0),
        Case(fault="leader killed during votes", ours=leader_dies("vote"), target_s=1.0),
        Case(fault="leader killed after votes", ours=leader_dies("commit"), target_s=1.0),
        Case(
            fault="leader frozen",
            ours=for_a_while(the_leader, freeze, thaw),
            target_s=3.0,
        ),
        Case(
            fault="one of four cut off and healed",
            ours=for_a_while(a_member, split, heal),
            rivals=rival(split),
            target_s=3.0,
        ),
        Case(fault="split two and two and healed", ours=split_in_two),
        Case(
            fault="split one and one and healed",
            ours=split_in_two,
            rivals=rival(split),
            links=ALIKE[:2],
        ),
        Case(
            fault="frozen for two minutes",
            ours=for_a_while(a_member, freeze, thaw, away_s=120.0),
            target_s=3.0,
        ),
        Case(
            fault="four of five killed at once",
            ours=most_die_at_once,
            scene=RunScene,
            rivals=rival(kill, all_but_the_first),
            links=FIVE,
        ),
        Case(fault="killed one after another", ours=one_after_another, scene=RunScene, links=FIVE),
        Case(
            fault="clock an hour ahead",
            ours=clock_is_wrong,
            scene=RunScene,
            rivals=hivemind_with_a_wrong_clock,
            rival_scene=TwoNodes,
            not_for=("gloo",),
            links=ALIKE[:3],
        ),
        Case(fault="slow: 1/20 of the link", ours=slow_for_good, rivals=rival(slow_down)),
        Case(
            fault="p2pd killed",
            ours=without_p2pd,
            rivals=rival(kill_p2pd),
            not_for=("gloo",),
        ),
        Case(fault="NaN sent", ours=nan_sent, rivals=rival(None)),
    ]
