"""Whether a round took a peer's work, or why not."""

import json
import types

import pytest

from atoll.coordinator.run.outcome import WORDS, Outcome
from atoll.coordinator.run.spec import RunSpec
from atoll.dht.refusals import RefusalCode
from atoll.optim.state.layout import Layout
from atoll.peer.cli.peer import _as_json
from atoll.peer.daemon.process import PeerEvent, joined_run, serves
from atoll.peer.daemon.tally import RoundTally, outcome_of
from atoll.peer.rounds.consensus.member import Failed, Pending

ME = object()


def entry(weight=1.0, kind="update"):
    member = types.SimpleNamespace(elector=ME, weight=weight)
    return types.SimpleNamespace(kind=kind, members=(member,))


@pytest.mark.parametrize(
    ("outcome", "given", "included", "offered"),
    [
        (Outcome.COUNTED, entry(), [True, True], True),
        (Outcome.PART, entry(), [True, False], True),
        (Outcome.NOT_RECEIVED, entry(), [False, False], True),
        (Outcome.NOT_IN_GROUP, entry(), None, True),
        (Outcome.FIRST_WINDOW, entry(weight=0.0), [True, True], True),
        (Outcome.GIVEN_UP, entry(kind="null"), None, True),
        (Outcome.NOT_READY, entry(), None, False),
    ],
)
def test_the_reason_why_work_counts_or_does_not(outcome, given, included, offered):
    assert outcome_of(given, ME, included, is_offered=offered) is outcome


@pytest.mark.parametrize("missed", [Outcome.LATE, Outcome.LEADER_LOST, Outcome.LEFT_OUT])
def test_the_culprit_of_an_absence_is_named(missed):
    assert outcome_of(entry(), ME, None, is_offered=True, missed=missed) is missed
    assert outcome_of(entry(), ME, [True], is_offered=True, missed=missed) is Outcome.COUNTED
    assert "if it repeats" in WORDS[missed]


def failed(code=None):
    return Failed(why="x", code=code)


@pytest.mark.parametrize(
    ("last", "exchange", "expected"),
    [
        (None, None, Outcome.NOT_IN_GROUP),
        (None, "a group", Outcome.LEFT_OUT),
        (failed(), "a group", Outcome.LEADER_LOST),
        (failed(RefusalCode.CLOSED), None, Outcome.LATE),
        (failed(RefusalCode.BARRED), None, Outcome.LEFT_OUT),
        (failed(RefusalCode.NOT_THE_LEADER), None, Outcome.NOT_IN_GROUP),
    ],
)
def test_the_last_session_with_a_leader_shows_the_culprit(last, exchange, expected):
    pending = Pending(window=None, since=0.0, exchange=exchange, failed=last)
    assert pending.missed is expected


def test_the_running_share_counts_work_that_rounds_took():
    tally, accounts = RoundTally(num_fragments=2), []
    tally.watch(accounts.append)
    for position, outcome in enumerate([Outcome.COUNTED, Outcome.NOT_READY, Outcome.PART]):
        tally.add(position + 1, outcome, loss=2.0, tokens=1000, wire_bytes_sent=48_000_000)
    last = accounts[-1]
    assert (last.rounds_seen, last.rounds_counted, last.tokens_counted) == (3, 2, 1000)
    assert last.share == "counted in 2 of 3 rounds, 1.00k tokens, 48.0 MB sent"
    assert last.verdict.startswith("counted in part")
    missed = accounts[1]
    assert (missed.is_counted, missed.tokens, missed.loss) == (False, 0, None)
    assert missed.verdict.startswith("not counted: its window had not ended yet")


def test_each_outcome_has_words():
    assert set(WORDS) == set(Outcome)


def test_what_a_peer_joins_is_one_line():
    spec = RunSpec.from_dict({"run": {"name": "big", "rounds": 200}})
    line = joined_run(spec, Layout(names=("w",), shapes=((934_848,),)), 150)
    assert line.startswith("run big: nano with 935k parameters, diloco of 30 steps")
    assert "50 of 200 rounds left" in line
    assert line.endswith("needs about 776 MB of memory and 557 MB of disk")


def test_what_a_peer_of_a_pipeline_joins_is_its_stage():
    spec = RunSpec.from_dict({"topology": {"stages": 3}})
    line = joined_run(spec, Layout(names=("w",), shapes=((934_848,),)), 0)
    assert "nano with 935k parameters in this stage, diloco" in line
    assert serves(spec, "stage-2", range(2, 4)) == "serves stage-2 of 3: slices 2 to 3"
    assert serves(spec, "stage-1", range(1)) == "serves stage-1 of 3: slice 0"


def test_a_round_is_fields_and_not_only_a_sentence(capsys):
    tally, accounts = RoundTally(), []
    tally.watch(accounts.append)
    tally.add(12, Outcome.NOT_IN_GROUP, loss=2.0, tokens=1000, wire_bytes_sent=7)
    event = PeerEvent(kind="round", position=12, text="x", account=accounts[0], tokens_per_s=5.0)
    _as_json(event)
    told = json.loads(capsys.readouterr().out)
    assert (told["round"], told["counted"], told["reason"]) == (12, False, "not_in_group")
    assert (told["tokens"], told["loss"], told["rounds_seen"]) == (0, None, 1)
    assert told["time"] > 0
