"""What peers contributed up to a round, from marks and the rounds after them."""

from contextlib import closing
from dataclasses import replace

import pytest

from atoll.coordinator.history import History
from atoll.coordinator.ledger import MARK_EVERY, Ledger, LedgerSums
from atoll.coordinator.rounds import RoundHistory
from atoll.coordinator.run.status import RoundSummary
from atoll.optim.log.entry import Elector, Entry, Member, Part, Partial

RUN = bytes(32)


def member(name, *, tokens=100, loss=2.0, weight=1.0):
    return Member(
        peer_id=name, incarnation="0" * 32, weight=weight, clip=1.0, norm=1.0,
        tokens=tokens, steps=1, loss=loss,
    )  # fmt: skip


def entry(position, names, *, empty=()):
    """An entry of these members; those that are `empty` sent none of their chunk."""
    members = tuple(member(name) for name in names)
    partial = tuple(Partial(member=names.index(name), cells=0) for name in empty)
    part = Part(
        start_cell=0, stop_cell=1, owner=0, generation=0, wire_bytes=0, digest=RUN, partial=partial
    )
    elector = Elector(peer_id="v", incarnation="0" * 32)
    return Entry(
        run_id=RUN, epoch=0, position=position, kind="update" if names else "null",
        previous_chain=RUN, fragment=0, lr=0.5, momentum=0.0, members=members,
        parts=(part,) if names else (), electorate=(elector,),
    )  # fmt: skip


class Log:
    """Entries, and how many of them were read."""

    def __init__(self, entries):
        self.entries = [each.encode() for each in entries]
        self.num_read = 0

    def __call__(self, start, stop):
        found = self.entries[start:stop]
        self.num_read += len(found)
        return found


@pytest.fixture
def history(tmp_path):
    with closing(History(tmp_path / "history.db")) as history:
        yield history


def kept(history, entries):
    """Save the rounds of these entries, of which each member reported ten bytes."""
    for each in entries:
        sent = {m.peer_id: 10 for m in each.members}
        tokens = sum(m.tokens for m in each.members)
        row = RoundSummary(
            position=each.position + 1, at=each.position, loss=2.0, tokens=tokens, peer_bytes=sent
        )
        history.put_round(row)
    return Log(entries)


def test_a_peer_misses_the_rounds_after_its_first_that_took_nothing_of_it(history):
    rounds = [["a"], ["a", "b"], [], ["a"], ["a", "b"]]
    log = kept(history, [entry(i, names) for i, names in enumerate(rounds)])
    sums = Ledger(history, log).at(5)
    a, b = sums.contributions("")
    assert (a.tokens, a.rounds, a.missed) == (400, 4, 0)
    assert (b.tokens, b.rounds, b.missed) == (200, 2, 1)
    assert [peer.wire_bytes for peer in sums.peers] == [40, 20]


def test_a_member_whose_chunks_did_not_arrive_is_not_counted(history):
    log = kept(history, [entry(0, ["a", "b"], empty=["b"])])
    given = {row.peer_id: row.rounds for row in Ledger(history, log).at(1).contributions("")}
    assert given == {"a": 1, "b": 0}


def test_the_first_window_of_a_peer_is_neither_counted_nor_missed(history):
    late = entry(0, ["a", "b"])
    first = late.members[1].model_copy(update={"weight": 0.0})
    late = late.model_copy(update={"members": (late.members[0], first)})
    log = kept(history, [late, entry(1, ["a", "b"])])
    a, b = Ledger(history, log).at(2).contributions("")
    assert (a.rounds, b.rounds, b.missed, b.tokens) == (2, 1, 0, 100)


def test_marks_give_the_sums_that_counting_gives(history):
    rounds = [entry(i, ["a", "b"] if i % 3 else ["a"]) for i in range(4 * MARK_EVERY)]
    log = kept(history, rounds)
    counted = Ledger(history, log)
    expected = [counted.at(position) for position in (7, 40, 100, 128)]
    counted.mark(4 * MARK_EVERY)
    log.num_read = 0
    again = Ledger(history, log)
    assert [again.at(position) for position in (7, 40, 100, 128)] == expected
    assert log.num_read == 7 + 8 + 4  # from the mark before, not from the start
    assert [point.position for point in again.points(100)] == [32, 64, 96]
    assert again.points(100)[-1].tokens == expected[1].tokens + sum(
        m.tokens for each in rounds[40:96] for m in each.members
    )


def test_marks_beyond_a_lost_end_are_forgotten(history):
    log = kept(history, [entry(i, ["a"]) for i in range(3 * MARK_EVERY)])
    ledger = Ledger(history, log)
    ledger.mark(3 * MARK_EVERY)
    ledger.newest(3 * MARK_EVERY)
    history.forget_rounds(40)
    ledger.forget(40)
    log.entries = log.entries[:40]
    assert ledger.newest(40) == ledger.at(40)
    assert ledger.at(40).peers[0].rounds == 40
    assert [point.position for point in ledger.points(1000)] == [32]
    again = Ledger(history, log)
    assert (again.newest(40), again.points(1000)) == (ledger.newest(40), ledger.points(1000))


def test_damaged_marks_are_counted_again(history):
    log = kept(history, [entry(i, ["a"]) for i in range(MARK_EVERY)])
    Ledger(history, log).mark(MARK_EVERY)
    history.put_mark(Ledger(history, log).points(1000)[0], b"{}]")
    assert Ledger(history, log).at(MARK_EVERY).tokens == 100 * MARK_EVERY


def test_a_round_without_an_entry_counts_those_that_reported_it(history):
    history.put_round(RoundSummary(position=1, at=0.0, tokens=50, peer_bytes={"a": 7}))
    (given,) = Ledger(history, lambda start, stop: ()).at(1).peers
    assert (given.peer_id, given.rounds, given.wire_bytes) == ("a", 1, 7)


def test_the_bytes_of_a_liar_stay_within_their_range():
    row = RoundSummary(position=1, at=0.0, peer_bytes={"a": 2**63 - 1})
    sums = LedgerSums().after([row, RoundSummary(position=2, at=0.0, peer_bytes={"a": 9})], [], 2)
    assert sums.peers[0].wire_bytes == 2**63 - 1
    sums.to_json()


def test_a_window_of_weight_0_has_no_tokens_in_the_round_nor_in_the_sums(history):
    first = entry(0, ["a", "b"])
    joined = first.model_copy(update={"members": (member("a"), member("b", weight=0.0))})
    rounds = RoundHistory(history, None)
    rounds.add(joined, 1.0, left_out=[], valid_loss=None)
    assert history.rounds(1)[0].tokens == rounds.tokens_total == 100
    sums = Ledger(history, Log([joined])).at(1)
    assert [(peer.peer_id, peer.tokens) for peer in sums.peers] == [("a", 100)]
    history.put_round(replace(history.rounds(1)[0], tokens=200))  # as earlier versions counted
    assert Ledger(history, Log([joined])).at(1).tokens == 100
