from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.peer.pipeline.ledger import PassLedger, PassState, Returned
from atoll.peer.pipeline.messages import Payload
from support.pipelines import pass_key

NEW, IN_FLIGHT, CACHED = PassState.NEW, PassState.IN_FLIGHT, PassState.CACHED
SPENT, FULL = PassState.SPENT, PassState.FULL


def ledger(**changes):
    return PassLedger(**{"max_passes": 100, "max_bytes": 1000, "linger_s": 10.0} | changes)


def enter(into, key, *, sender="a0", num_bytes=10, deadline_s=20.0):
    return into.enter(key, sender=sender, num_bytes=num_bytes, deadline_s=deadline_s)


def result(size=4):
    return Returned(payload=Payload.of(b"", b"r" * size), path=("c0",), loss=1.0)


def test_a_pass_is_new_once():
    passes, key = ledger(), pass_key(1)
    assert [enter(passes, key) for _ in range(3)] == [NEW, IN_FLIGHT, IN_FLIGHT]


def test_a_pass_and_an_evaluation_of_one_name_are_two():
    passes = ledger()
    assert enter(passes, pass_key(1)) is NEW
    assert enter(passes, pass_key(1, "evaluate")) is NEW


def test_a_return_is_kept_until_the_deadline():
    passes, key = ledger(), pass_key(1)
    enter(passes, key)
    passes.cache(key, result())
    assert enter(passes, key) is CACHED and passes.result(key) == result()
    assert passes.num_bytes == 4  # the reservation has ended
    assert passes.sweep(20.0).expired == [key]
    assert enter(passes, key) is SPENT and passes.result(key) is None
    assert passes.num_bytes == 0


def test_a_spent_pass_is_remembered_for_a_while():
    passes, key = ledger(), pass_key(1)
    enter(passes, key)
    passes.sweep(20.0)
    assert passes.sweep(29.9).forgotten == [] and passes.look(key) is SPENT
    assert passes.sweep(30.0).forgotten == [key]
    assert len(passes) == 0 and enter(passes, key, deadline_s=60.0) is NEW


def test_a_late_sweep_reports_the_end_and_the_forgetting():
    passes, key = ledger(), pass_key(1)
    enter(passes, key)
    swept = passes.sweep(1000.0)
    assert swept.expired == [key] and swept.forgotten == [key]


def test_a_forgotten_pass_is_new_again():
    passes, key = ledger(), pass_key(1)
    enter(passes, key, deadline_s=5.0)
    passes.forget(key)
    assert passes.num_bytes == 0
    assert enter(passes, key, deadline_s=20.0) is NEW
    assert passes.sweep(10.0).expired == []  # the first deadline is no more
    assert passes.look(key) is IN_FLIGHT


def test_the_return_of_a_spent_pass_is_not_kept():
    passes, key = ledger(), pass_key(1)
    enter(passes, key)
    passes.spend(key)
    passes.cache(key, result())
    assert passes.look(key) is SPENT and passes.num_bytes == 0
    assert passes.sweep(20.0).expired == []


def test_a_full_ledger_takes_nothing_and_forgets_nothing():
    passes = ledger(max_passes=4)
    keys = [pass_key(i, origin=f"o{i}") for i in range(5)]
    states = [enter(passes, key, sender=key.microbatch.origin) for key in keys]
    assert states == [NEW] * 4 + [FULL]
    assert passes.look(keys[4]) is NEW
    assert enter(passes, keys[0]) is IN_FLIGHT


@pytest.mark.parametrize("limit", ["passes", "bytes"])
def test_one_origin_fills_half_at_most(limit):
    passes = ledger(**({"max_passes": 10} if limit == "passes" else {"max_bytes": 100}))
    states = [enter(passes, pass_key(i, origin="liar"), sender=f"s{i}") for i in range(10)]
    assert states == [NEW] * 5 + [FULL] * 5
    assert enter(passes, pass_key(0, origin="honest"), sender="s99") is NEW


def test_one_sender_fills_half_at_most():
    passes = ledger(max_passes=10)
    states = [enter(passes, pass_key(0, origin=f"o{i}"), sender="liar") for i in range(10)]
    assert states == [NEW] * 5 + [FULL] * 5
    assert enter(passes, pass_key(0, origin="honest"), sender="b1") is NEW


KEYS = [
    pass_key(i, direction, origin=origin)
    for i in range(3)
    for direction in ("forward", "evaluate")
    for origin in ("a0", "a1")
]
KEY = st.sampled_from(KEYS)
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("enter"), KEY, st.sampled_from(["s0", "s1"]), st.integers(0, 60)),
        st.tuples(st.just("cache"), KEY, st.integers(0, 10)),
        st.tuples(st.just("spend"), KEY),
        st.tuples(st.just("sweep"), st.floats(0, 5)),
    ),
    max_size=60,
)


@settings(max_examples=150)
@given(OPERATIONS)
def test_in_every_order_a_pass_counts_once_and_room_is_bounded(operations):
    passes, now_s, counted = ledger(max_passes=8, max_bytes=200, linger_s=1e6), 0.0, Counter()
    for name, *rest in operations:
        if name == "enter":
            key, sender, num_bytes = rest
            state = enter(passes, key, sender=sender, num_bytes=num_bytes, deadline_s=now_s + 6)
            counted[key] += state is NEW
            # A pass that has entered is never new again.
            assert passes.look(key) is not NEW or state is FULL
        elif name == "cache":
            passes.cache(rest[0], result(rest[1]))
        elif name == "spend":
            passes.spend(rest[0])
        else:
            now_s += rest[0]
            passes.sweep(now_s)
        assert len(passes) <= 8 and 0 <= passes.num_bytes <= 200 + 10 * 8
    assert max(counted.values(), default=0) <= 1
    passes.sweep(now_s + 6)
    assert passes.num_bytes == 0
    assert set(passes.sweep(now_s + 6 + 1e6).forgotten) == {k for k, n in counted.items() if n}
    assert len(passes) == 0 and passes.due_s == float("inf")


@settings(max_examples=50)
@given(st.permutations(KEYS * 2))
def test_the_order_of_arrival_changes_nothing(keys):
    passes = ledger()
    states = Counter((key, enter(passes, key)) for key in keys)
    assert states == {(key, state): 1 for key in KEYS for state in (NEW, IN_FLIGHT)}
