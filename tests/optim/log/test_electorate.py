"""Rules by which electors follow each other, and what a liar can do with them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.dht.identity import Identity
from atoll.optim.log.electorate import (
    FEW_ELECTORS,
    REMEMBERED_ENTRIES,
    TRIAL_ENTRIES,
    BadElectorate,
    Succession,
    check_succession,
    remembered,
    succeed,
)
from atoll.optim.log.entry import (
    MAX_ELECTORS,
    Elector,
    Entry,
    Member,
    Newcomer,
    Part,
    Partial,
    is_quorum,
)
from atoll.optim.log.orders import RunSettings


def elector(name, incarnation="1"):
    return Elector(peer_id=name, incarnation=incarnation)


def member(name, incarnation="1", weight=1.0):
    return Member(
        peer_id=name,
        incarnation=incarnation,
        weight=weight,
        clip=1.0,
        norm=1.0,
        tokens=1,
        steps=1,
        loss=None,
    )


def part(index, owner, *missing, size=4):
    partial = tuple(Partial(member=m, cells=0) for m in sorted(missing))
    return Part(
        start_cell=index * size,
        stop_cell=(index + 1) * size,
        owner=owner,
        generation=0,
        wire_bytes=1,
        digest=bytes(32),
        partial=partial,
    )


def even_parts(count):
    return [part(i, i) for i in range(count)]


def standing(*names, newcomers=()):
    """A succession that has the norm of all members here."""
    return Succession(tuple(map(elector, names)), tuple(newcomers), norms=(1.0,))


def names(succession):
    return [e.peer_id for e in succession.electorate]


def step(now, position, *members, parts=None, dropped=()):
    parts = even_parts(len(members)) if parts is None else parts
    return succeed(
        now, position=position, fragment=0, members=members, parts=parts, dropped=dropped
    )


def test_electors_stay_although_they_are_not_in_the_group():
    now = standing(*"abcd")
    assert step(now, 5, member("a")) == now


def test_null_changes_nothing():
    now = standing(*"abc", newcomers=[Newcomer(peer_id="d", since=1, last=3)])
    assert succeed(now, position=900, fragment=0, members=(), parts=(), dropped={"b"}) == now


def test_owner_takeover():
    """P1: an owner that names all others as missing moves no elector."""
    now = standing(*"abcd")
    parts = [part(0, 0, 1, 2, 3), part(1, 1), part(2, 2), part(3, 3)]
    assert step(now, 5, *map(member, "abcd"), parts=parts) == now


def test_owner_of_everything_takes_nothing_over():
    now = standing(*"abcd")
    parts = [part(0, 0, 1, 2, 3)]
    assert step(now, 5, *map(member, "abcd"), parts=parts) == now


def test_leader_takeover():
    """P2: a leader that drops all others drops nobody."""
    now = standing(*"abcd")
    assert step(now, 5, member("a"), dropped=set("bcd")) == now


def test_electors_that_do_not_answer_are_dropped_while_a_quorum_stays():
    now = standing(*"abcd")
    assert names(step(now, 5, *map(member, "abc"), dropped={"d"})) == list("abc")
    assert names(step(now, 5, *map(member, "ab"), dropped={"c", "d"})) == list("ab")
    assert step(now, 5, *map(member, "cd"), dropped={"a", "b"}) == now, "half without the first"


def test_newcomer_votes_after_its_trial():
    now = standing(*"abc")
    for position in range(10, 9 + TRIAL_ENTRIES):
        now = step(now, position, *map(member, "abcd"))
        assert names(now) == list("abc")
    now = step(now, 9 + TRIAL_ENTRIES, *map(member, "abcd"))
    assert names(now) == list("abcd") and not now.newcomers


def test_weight_0_never_votes():
    """P6: keys that report a weight of 0 gain no votes, however long they stay."""
    now = standing(*"abcd")
    sybils = [member(f"s{i}", weight=0.0) for i in range(5)]
    for position in range(3 * TRIAL_ENTRIES):
        now = step(now, position, *map(member, "abcd"), *sybils)
    assert now == standing(*"abcd")


def test_two_contributions_are_no_trial():
    """P6: keys that contribute twice, eight entries apart, are newcomers still."""
    now = standing(*"abcd")
    keys = [f"s{i}" for i in range(5)]
    for position in range(10, 24):
        group = [*"abcd", *(keys if position in (10, 18, 19) else ())]
        now = step(now, position, *map(member, group))
    assert names(now) == list("abcd")
    assert [(n.since, n.last, n.entries) for n in now.newcomers] == [(10, 19, 3)] * 5


def test_of_tried_keys_one_an_entry_votes_while_few_do():
    """P6: three of five would be a third of the electorate after one entry, and could leave."""
    now = standing(*"abcd")
    keys = [f"s{i}" for i in range(5)]
    for position in range(TRIAL_ENTRIES - 1):
        now = step(now, position, *map(member, [*"abcd", *keys]))
    sizes = []
    for position in range(TRIAL_ENTRIES - 1, TRIAL_ENTRIES + 4):
        now = step(now, position, *map(member, [*"abcd", *keys]))
        sizes.append(len(now.electorate))
    assert sizes == [5, 6, 7, 8, 9]


def test_member_without_work_in_any_part_is_not_tried():
    now = standing(*"ab")
    parts = [part(0, 0, 2), part(1, 1, 2)]
    for position in range(2 * TRIAL_ENTRIES):
        now = step(now, position, *map(member, "abz"), parts=parts)
    assert now == standing(*"ab")


def test_one_owner_cannot_keep_a_newcomer_out():
    now = standing(*"ab")
    parts = [part(0, 0, 2), part(1, 1)]
    for position in range(TRIAL_ENTRIES):
        now = step(now, position, *map(member, "abz"), parts=parts)
    assert names(now) == list("abz")


def test_an_influx_stays_a_minority_of_each_next_electorate():
    now = standing(*"abcd")
    crowd = [f"s{i}" for i in range(20)]
    for position in range(3 * TRIAL_ENTRIES):
        before = now
        now = step(now, position, *map(member, [*"abcd", *crowd]))
        most = len(before.electorate) * 1.5 if len(before.electorate) >= FEW_ELECTORS else 1
        assert len(now.electorate) <= max(len(before.electorate) + 1, most)
        assert set(before.electorate) <= set(now.electorate)
    assert len(now.electorate) == 24


def test_electorate_has_a_limit():
    everyone = [f"p{i:03}" for i in range(2 * MAX_ELECTORS)]
    now = standing("p000")
    for position in range(4 * TRIAL_ENTRIES):
        now = step(now, position, *map(member, everyone))
    assert len(now.electorate) == MAX_ELECTORS and len(now.newcomers) == MAX_ELECTORS


def test_restarted_elector_votes_on_at_once():
    now = standing(*"abc")
    after = step(now, 7, member("a"), member("b", incarnation="2"), member("c"))
    assert after.electorate == (elector("a"), elector("b", "2"), elector("c"))


@pytest.mark.parametrize("position", [5, 500])
def test_elector_that_falls_silent_after_its_work_is_dropped(position):
    now = standing(*"abcd")
    after = step(now, position, *map(member, "abcd"), dropped={"c"})
    assert names(after) == list("abd")
    assert check_succession(update(after, position=position), now) == [elector("c")]
    assert names(step(after, position + 1, *map(member, "abcd"))) == list("abdc")


def test_elector_that_was_away_is_not_tried_again():
    now = step(standing(*"abcd"), 20, *map(member, "abc"), dropped={"d"})
    now = step(now, 25, *map(member, "abc"), member("d", incarnation="2"))
    assert now.electorate[-1] == elector("d", "2")


def test_elector_that_was_away_for_long_is_tried_again():
    now = step(standing(*"abcd"), 20, *map(member, "abc"), dropped={"d"})
    back = 20 + REMEMBERED_ENTRIES + 1
    now = step(now, back, *map(member, "abcd"))
    assert names(now) == list("abc")
    assert now.newcomers == (Newcomer(peer_id="d", since=back, last=back),)


def test_electors_that_an_epoch_leaves_out_are_not_tried_again():
    before = standing(*"abc", newcomers=[Newcomer(peer_id="d", since=13, last=19, entries=7)])
    newcomers = remembered(before, [elector("a")], 20)
    assert sorted(n.peer_id for n in newcomers) == list("bcd")
    now = Succession((elector("a"),), newcomers, norms=(1.0,))
    now = step(now, 20, *map(member, "abd"))
    assert names(now) == list("ab")
    now = step(now, 21, *map(member, "abcd"))
    assert names(now) == list("abc")


def test_an_epoch_forgets_who_was_away_for_long():
    before = standing("a", newcomers=[Newcomer(peer_id="b", since=1, last=2)])
    assert remembered(before, [elector("a")], 3 + REMEMBERED_ENTRIES) == ()


def update(now, **changes):
    values = {
        "run_id": bytes(32),
        "epoch": 0,
        "position": 5,
        "kind": "update",
        "previous_chain": bytes(32),
        "fragment": 0,
        "lr": 1.0,
        "momentum": 0.5,
        "members": tuple(map(member, "abcd")),
        "parts": tuple(even_parts(4)),
        "electorate": now.electorate,
        "newcomers": now.newcomers,
        "norms": now.norms,
    }
    return Entry(**{**values, **changes})


def test_check_names_the_electors_that_an_entry_drops():
    now = standing(*"abcd")
    assert check_succession(update(now), now) == []
    after = step(now, 5, *map(member, "abcd"), dropped={"c"})
    entry = update(after)
    assert check_succession(entry, now) == [elector("c")]


@pytest.mark.parametrize(
    "electorate",
    [
        [elector("a")],
        [elector("x"), *map(elector, "abcd")],
        [*map(elector, "abcd"), elector("x")],
        [elector("b"), elector("a"), elector("c"), elector("d")],
        [elector("a", "2"), *map(elector, "bcd")],
    ],
    ids=["alone", "invented", "invented-last", "reordered", "other-incarnation"],
)
def test_check_refuses_what_does_not_follow(electorate):
    now = standing(*"abcd")
    with pytest.raises(BadElectorate):
        check_succession(update(now, electorate=tuple(electorate)), now)


def test_check_refuses_invented_newcomers():
    now = standing(*"abcd")
    early = (Newcomer(peer_id="x", since=0, last=5),)
    with pytest.raises(BadElectorate):
        check_succession(update(now, newcomers=early), now)


@given(st.data())
def test_whatever_a_liar_writes_a_quorum_of_those_who_vote_stays(data):
    """Members, owners' words and drops are the liar's; votes stay with a quorum of today's."""
    voters = [f"v{i}" for i in range(data.draw(st.integers(1, 7)))]
    known = [
        Newcomer(
            peer_id=f"n{i}",
            since=data.draw(st.integers(0, 40)),
            last=40,
            entries=data.draw(st.integers(1, TRIAL_ENTRIES)),
        )
        for i in range(data.draw(st.integers(0, 5)))
    ]
    now = standing(*voters, newcomers=known)
    everyone = [*voters, *(n.peer_id for n in known), "s0", "s1"]
    chosen = data.draw(st.lists(st.sampled_from(everyone), min_size=1, unique=True))
    members = [
        member(name, data.draw(st.sampled_from("12")), data.draw(st.sampled_from([0.0, 1.0])))
        for name in chosen
    ]
    absent = st.sets(st.integers(0, len(members) - 1))
    parts = [
        part(i, data.draw(st.integers(0, len(members) - 1)), *data.draw(absent)) for i in range(3)
    ]
    dropped = data.draw(st.sets(st.sampled_from(everyone)))
    after = step(now, 41, *members, parts=parts, dropped=dropped)
    stayed = [i for i, name in enumerate(voters) if name in names(after)]
    assert is_quorum(stayed, len(voters))
    assert len(names(after)) - len(stayed) <= 1, "fewer than eight vote"
    assert len(set(names(after))) == len(names(after))
    assert {"s0", "s1"}.isdisjoint(names(after)), "nobody votes with its first contribution"


def test_of_keepers_an_entry_neither_adds_nor_drops_any():
    now = standing(*"klm", newcomers=[Newcomer(peer_id="a", since=0, last=40)])
    members = tuple(map(member, "abcd"))
    due = succeed(
        now,
        position=50,
        fragment=0,
        members=members,
        parts=even_parts(4),
        dropped={"k"},
        electors="keepers",
    )
    assert due == now
    assert check_succession(update(now, position=50), now, "keepers") == []


@pytest.mark.parametrize(
    "electorate",
    ["lm", "klma", "kla", "lkm"],
    ids=["drops one", "adds a trainer", "replaces one", "reorders"],
)
def test_an_entry_that_changes_the_keepers_is_refused(electorate):
    now = standing(*"klm")
    entry = update(now, electorate=tuple(map(elector, electorate)))
    with pytest.raises(BadElectorate):
        check_succession(entry, now, "keepers")


def test_an_entry_does_not_rename_a_keeper_to_its_next_incarnation():
    now = standing(*"klm")
    restarted = (*now.electorate[:2], Elector(peer_id="m", incarnation="another"))
    with pytest.raises(BadElectorate):
        check_succession(update(now, electorate=restarted), now, "keepers")


def test_an_evicted_peer_neither_votes_nor_waits_to():
    now = standing(*"abcd", newcomers=[Newcomer(peer_id="e", since=1, last=3)])
    out = succeed(now, position=5, fragment=0, members=(), parts=(), evicted={"b", "e"})
    assert (names(out), out.newcomers) == (list("acd"), ())
    members = [member(name) for name in "acd"]
    after = succeed(
        out, position=6, fragment=0, members=members, parts=even_parts(3), evicted={"b", "e"}
    )
    assert (names(after), after.newcomers) == (list("acd"), ())


def test_keepers_lose_the_evicted_one():
    out = succeed(
        standing(*"abc"),
        position=5,
        fragment=0,
        members=(),
        parts=(),
        evicted="b",
        electors="keepers",
    )
    assert names(out) == list("ac")


def test_electors_that_are_all_evicted_stay_until_an_epoch():
    now = standing("a", newcomers=[Newcomer(peer_id="b", since=1, last=3)])
    out = succeed(now, position=5, fragment=0, members=(), parts=(), evicted={"a"})
    assert names(out) == ["a"]


@pytest.mark.parametrize(("kept", "is_right"), [("bcd", True), ("abcd", False), ("cd", False)])
def test_an_order_that_evicts_takes_that_electors_vote_and_no_other(kept, is_right):
    """Nobody is asked whether it answers, so that one who does is out all the same."""
    peers = {name: Identity.ephemeral().peer_id for name in "abcd"}
    now = standing(*peers.values())
    settings = RunSettings(number=1, evicted=(peers["a"],)).stored
    entry = Entry.model_construct(
        position=5,
        fragment=0,
        members=(),
        parts=(),
        electorate=tuple(elector(peers[name]) for name in kept),
        newcomers=(),
        norms=now.norms,
        settings=settings,
    )
    if is_right:
        assert check_succession(entry, now) == []
        return
    with pytest.raises(BadElectorate):
        check_succession(entry, now)
