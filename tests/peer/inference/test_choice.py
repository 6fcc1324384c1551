import random
from collections import Counter
from dataclasses import replace

import pytest

from atoll.peer.inference.choice import Servers, serves
from support.live_texts import record

STAGE = "stage-2"


def servers(**rates):
    made = Servers(STAGE, random.Random(1))
    made.look([record(name, STAGE, tokens_per_s=rate) for name, rate in rates.items()])
    return made


def chosen(made, *, position=None, now_s=0.0):
    found = made.choose(position, now_s)
    return found and found.peer_id


def shares(made, draws=2000):
    counts = Counter(chosen(made) for _ in range(draws))
    return {name: count / draws for name, count in counts.items()}


def test_peers_are_chosen_by_announced_throughput():
    found = shares(servers(slow=100.0, fast=300.0))
    assert 0.2 < found["slow"] < 0.3 and 0.7 < found["fast"] < 0.8


def test_no_claim_attracts_all_texts():
    found = shares(servers(a=100.0, b=100.0, liar=1e12))
    assert found["liar"] < 0.72  # four times the median: four of six parts
    assert shares(servers(a=100.0, b=100.0, modest=1e-9))["modest"] > 0.05


def test_a_peer_that_announces_nothing_counts_as_usual():
    found = shares(servers(a=100.0, new=0.0))
    assert 0.45 < found["new"] < 0.55
    assert set(shares(servers(a=0.0, b=0.0))) == {"a", "b"}


def test_only_peers_that_serve_the_stage_are_asked():
    here = record("a", STAGE)
    assert serves(here, (STAGE,))
    for other in (
        record("b", "stage-1"),
        record("c", STAGE, duty="moving"),
        record("d", STAGE, duty="leaving"),
        replace(here, role="keeper"),
        replace(here, place=None),
    ):
        assert not serves(other, (STAGE,))


def test_a_busy_peer_is_passed_over_for_a_moment():
    made = servers(a=1.0)
    made.was_busy("a", 0.5, now_s=0.0)
    assert chosen(made, now_s=0.1) is None
    assert chosen(made, now_s=0.8) == "a"
    for _ in range(100):
        made.was_busy("a", 1e9, now_s=10.0)  # whatever it asks for
    assert chosen(made, now_s=20.0) == "a"


def test_bans_double_and_end_with_an_answer():
    made = servers(a=1.0)
    lengths, now_s = [], 0.0
    for _ in range(5):
        made.was_lost("a", now_s)
        began_s = now_s
        while chosen(made, now_s=now_s) is None:
            now_s += 0.05
        lengths.append(now_s - began_s)
    assert lengths[0] <= 1.6 and lengths[-1] >= 8.0
    made.answered("a")
    made.was_lost("a", now_s)
    assert chosen(made, now_s=now_s + 1.6) == "a"


def test_a_silent_peer_is_banned_for_longer_than_a_lost_one():
    made = servers(a=1.0)
    made.was_silent("a", 0.0)
    assert chosen(made, now_s=1.9) is None
    assert chosen(made, now_s=6.1) == "a"


@pytest.mark.parametrize("trouble", ["is_off", "refuses", "lied"])
def test_who_refuses_or_lies_is_asked_again_as_another_process(trouble):
    made = servers(a=1.0)
    getattr(made, trouble)("a")
    made.look([record("a", STAGE)])
    assert chosen(made, now_s=1e6) is None
    made.look([record("a", STAGE, incarnation="2" * 32)])
    assert chosen(made, now_s=1e6) == "a"


def test_a_peer_at_another_position_is_asked_for_its_own():
    made = servers(a=1.0, b=1.0)
    made.has_moved("a", 7)
    assert {chosen(made, position=7) for _ in range(50)} == {"b"}
    assert {chosen(made) for _ in range(50)} == {"a", "b"}
    assert made.have_moved(7) and not made.have_moved(8) and not made.have_moved(None)


def test_the_account_names_what_is_wrong():
    made = servers(a=1.0, b=1.0, c=1.0)
    made.is_off("a")
    made.is_off("b")
    made.was_busy("c", 1.0, 0.0)
    assert made.account() == f"{STAGE} has 3 peers: 2 serving no texts, 1 busy"
    assert not made.all_are_off
    made.refuses("c")
    assert made.account().endswith("1 refusing this text") and not made.all_are_off
    made.is_off("c")
    assert made.all_are_off
    assert servers().account() == f"no peer of {STAGE} is in the run"


def test_a_peer_that_has_left_is_forgotten():
    made = servers(a=1.0)
    made.look([])
    for tell in (made.answered, made.is_off, made.refuses, made.lied):
        tell("a")
    made.was_lost("a", 0.0)
    assert chosen(made) is None and not made.all_are_off
