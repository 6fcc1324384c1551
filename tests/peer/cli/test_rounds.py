"""What is left of a round for people: phases, bytes by peer, who was left out and why."""

from dataclasses import replace

import pytest

from atoll.coordinator.rounds import with_traces
from atoll.coordinator.run.outcome import ABSENCES, Outcome
from atoll.coordinator.run.status import NAMED_PEERS, RoundReport, RoundSummary, StatusError
from atoll.coordinator.run.text import ABSENT
from atoll.peer.cli.rounds import table, trace
from atoll.peer.daemon.reporting import MAX_REASON, reasons
from support.commands import refused

ROUND = RoundSummary(
    epoch=1, position=12, at=5.0, members=3, tokens=99, left_out=["12D3KooWaaaaaa"]
)


def told(position=11, **fields):
    return RoundReport(epoch=1, position=position, included=True, **fields)


def test_a_summary_has_the_reasons_and_the_bytes_of_its_traces():
    traces = {
        "12D3KooWowners": told(
            reasons={"12D3KooWbbbbbb": "bad-cell: NaN"}, wire_bytes_sent=7, seconds={"send": 2.0}
        ),
        "12D3KooWothers": told(
            reasons={"12D3KooWbbbbbb": "stalled"}, wire_bytes_sent=5, seconds={"send": 4.0}
        ),
        "12D3KooWearlier": RoundReport(epoch=0, position=11, included=True, wire_bytes_sent=1000),
    }
    summary = with_traces(ROUND, traces)
    assert summary.reasons == {"12D3KooWbbbbbb": "bad-cell: NaN"}
    assert summary.peer_bytes == {"12D3KooWowners": 7, "12D3KooWothers": 5}
    assert summary.wire_bytes == 12
    assert RoundSummary.from_json(summary.to_json()) == summary
    lines = "\n".join(trace(summary))
    assert "bbbbbb in part: bad-cell: NaN" in lines
    assert "aaaaaa: not in the group" in lines
    assert "send        3.000 s" in lines
    absent = "without …aaaaaa: not in the group; …bbbbbb in part: bad-cell: NaN"
    assert table([summary])[1].endswith(absent)


def test_a_peer_gives_the_reason_of_its_own_absence():
    why = ABSENCES[Outcome.LATE]
    late = told(reasons={"12D3KooWcccccc": why})
    summary = with_traces(ROUND, {"12D3KooWcccccc": replace(late, included=False)})
    assert summary.left_out == ["12D3KooWaaaaaa", "12D3KooWcccccc"]
    assert f"…cccccc: {why}" in table([summary])[1]
    again = with_traces(summary, {"12D3KooWcccccc": replace(late, included=False)})
    assert again.left_out == summary.left_out


def test_a_round_names_so_many_peers_and_no_more():
    many = {f"peer {n}": "late" for n in range(3 * NAMED_PEERS)}
    traces = {peer: told(wire_bytes_sent=n) for n, peer in enumerate(many)}
    summary = with_traces(ROUND, traces | {"p": told(reasons=reasons(many))})
    assert len(summary.peer_bytes) == len(summary.reasons) == NAMED_PEERS
    assert f"peer {3 * NAMED_PEERS - 1}" in summary.peer_bytes
    with pytest.raises(StatusError):
        told(reasons=many).to_json()


def test_rounds_are_listed_by_stage(atoll, organise, kit):
    invite = organise(kit.tiny_spec(topology={"stages": 2})).invite.encode()
    listed = atoll("rounds", invite, "--stage", "stage-1")
    assert (listed.code, listed.out) == (0, "no rounds committed yet\n")
    told = refused(atoll("rounds", invite, "--stage", "stage-3"))
    assert "the run has no stage 'stage-3'; choose one of stage-1, stage-2" in told


def test_a_run_with_one_log_has_no_stages_to_list(atoll, invite):
    told = refused(atoll("rounds", invite.encode(), "--stage", "stage-1"))
    assert "--stage is for a pipeline, and this run has one log; omit it" in told


def test_a_long_reason_is_cut_before_it_is_sent():
    assert reasons({"p": "x" * 1000}) == {"p": "x" * MAX_REASON}
    with pytest.raises(StatusError):
        told(reasons={"p": "x" * 1000}).to_json()


def test_what_is_not_known_of_a_round_is_no_number():
    """Nobody has told of the first one yet; the second was while the coordinator was away."""
    untold = replace(ROUND, left_out=[])
    late = replace(ROUND, position=13, at=6.0, left_out=[], late=True, seconds={"send": 1.0})
    after = replace(ROUND, position=14, at=9.0, left_out=[], seconds={"send": 1.0})
    last = replace(after, position=15, at=12.0, wire_bytes=5_000_000)
    _, *lines = table([untold, late, after, last])
    assert [line.split()[-2:] for line in lines] == [
        [ABSENT, ABSENT],
        ["0.00", ABSENT],
        ["0.00", ABSENT],
        ["5.00", "3.0"],
    ]
    assert lines[1].split()[1] == "--:--:--"


def test_what_strangers_write_steers_no_terminal():
    hostile = "\x1b[2J"
    row = replace(
        ROUND, reasons={"q" + hostile: hostile}, seconds={hostile: 1.0}, peer_bytes={hostile: 1}
    )
    assert all("\x1b" not in line for line in [*trace(row), *table([row])])
