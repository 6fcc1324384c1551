import asyncio
from dataclasses import replace

import pytest

from atoll.coordinator.report.plain import follow, lines, render_status
from atoll.coordinator.report.view import (
    eta_seconds,
    naming,
    round_seconds,
    token_rates,
    utilisation,
    utilisation_of,
)
from atoll.coordinator.run.status import Event, Gap, RowsStatus
from atoll.coordinator.run.text import ABSENT

HOSTILE = "\x1b[2J\x1b]0;owned\x07[red]x[/red]\r\nround 99 \u202eevil\u0000"


def without_clock(found):
    return [line[10:] for line in found]


def test_a_round_is_one_line(sample):
    before, after = sample(36), sample(37)
    (line,) = without_clock(lines(before, after))
    assert line == ("round  37/120  loss 1.363  17.0k tok/s  5.30 MB sent  util 96.4%  5 peers")


def test_a_round_waits_for_its_members_accounts(sample):
    after = sample(37)
    at = after.history[-1].at
    fresh = replace(after, now=at + 1)
    settled = replace(after, now=at + 4)
    assert lines(sample(36), fresh) == []
    (line,) = lines(fresh, settled)
    assert "round  37/120" in line
    assert lines(settled, replace(settled, now=at + 5)) == []


def test_several_rounds_come_in_order(sample):
    found = [line.split()[2] for line in lines(sample(2), sample(6)) if " round " in line]
    assert found == ["3/120", "4/120", "5/120", "6/120"]


def test_rounds_of_an_absence_have_no_speed(sample):
    """They came all at once; nor do they say when the next ones end."""
    whole = sample(40)
    *seen, first, last = whole.history
    at_once = [replace(row, at=first.at + 0.01 * i, late=True) for i, row in enumerate(seen)]
    status = replace(whole, history=[*at_once, first, last])
    rates = [line.split()[5] for line in lines(None, status) if " tok/s " in line]
    assert rates[:-1] == [ABSENT] * (len(rates) - 1)
    assert rates[-1].endswith("k")
    assert len(token_rates(status.history)) == 1
    assert round_seconds(status.history) == last.at - first.at
    assert eta_seconds(replace(whole, history=at_once)) is None


def test_validation_is_shown_where_it_was_measured(sample):
    (line,) = lines(sample(39), sample(40))
    assert "valid 1.459" in line


def test_members_left_out_are_named_and_events_follow_their_round(sample):
    found = without_clock(lines(sample(12), sample(13)))
    assert found == [
        "round  13/120  loss 2.343  16.7k tok/s  4.24 MB sent  util 96.4%  "
        "4 peers (without fathom: not in the group)",
        "warning  basalt: owner went silent in round 13; 2 parts re-reduced in 0.8 s",
    ]


def test_nothing_new_prints_nothing(sample):
    assert lines(sample(10), sample(10)) == []


def test_an_older_state_prints_nothing(sample):
    assert lines(sample(10), sample(4)) == []


def test_a_run_is_called_finished_after_its_last_round(sample):
    done = sample(3, state="finished")
    fresh = replace(done, now=done.history[-1].at + 1, peers=[])
    settled = replace(fresh, now=done.history[-1].at + 4)
    assert lines(sample(2), fresh) == []
    *_, last, end = without_clock(lines(fresh, settled))
    assert last.startswith("round   3/120")
    assert f"util {ABSENT}" in last  # those who left took theirs along
    assert end.startswith("finished after 3 rounds")


def test_a_run_without_peers_is_not_reported_as_slow(sample):
    status = sample(3, state="stalled")
    (slow,) = without_clock(lines(sample(3), status))
    (left,) = without_clock(lines(sample(3), replace(status, peers=[])))
    assert slow == "stalled: no round committed for too long"
    assert left == "stalled: no peer is online; training resumes when peers return"


def test_waiting_training_and_finished_are_printed(sample):
    waiting = sample(0, state="waiting", num_peers=2, num_gone=1)
    started, done = sample(0), sample(1, state="finished")
    assert without_clock(lines(None, waiting)) == ["waiting for peers: 1 of 2 online"]
    more = sample(0, state="waiting", num_peers=3, num_gone=1)
    assert without_clock(lines(waiting, more)) == ["waiting for peers: 2 of 2 online"]
    assert lines(waiting, waiting) == []
    assert without_clock(lines(waiting, started)) == ["training"]
    assert without_clock(lines(started, done))[-1] == (
        "finished after 1 rounds: 307k tokens, loss 5.108"
    )


def test_a_peer_that_has_not_trained_has_no_utilisation(sample):
    status = sample(0, state="waiting", num_peers=2, num_gone=0)
    idle = replace(status.peers[0], tokens_total=0, utilisation=1.0)
    busy = replace(status.peers[1], tokens_total=5, utilisation=0.5)
    assert utilisation_of(idle) is None
    assert utilisation_of(busy) == 0.5
    assert utilisation(replace(status, peers=[idle])) == ABSENT
    assert utilisation(replace(status, peers=[idle, busy], utilisation=0.5)) == "50.0%"


def test_absent_numbers_are_dashes(sample):
    status = sample(1)
    bare = replace(status.history[0], loss=None, tokens=0, wire_bytes=0, members=1)
    (line,) = without_clock(lines(None, replace(status, history=[bare], rounds_total=0)))
    assert line.startswith("round   1  loss –")  # noqa: RUF001
    assert line.endswith("1 peer")


def test_escape_sequences_of_a_stranger_do_not_reach_the_log(sample):
    status = sample(1, num_peers=1, num_gone=0)
    event = Event(at=1.0, level="error", source=HOSTILE, text=HOSTILE)
    peer = replace(status.peers[0], name=HOSTILE, phase=HOSTILE, device=HOSTILE)
    row = replace(status.history[0], left_out=[peer.peer_id, HOSTILE])
    hostile = replace(
        status, run_name=HOSTILE, codec=HOSTILE, events=[event], peers=[peer], history=[row]
    )
    told = [*lines(None, hostile), *render_status(hostile).split("\n")]
    assert all(line.isprintable() for line in told)
    assert any("[red]x[/red]" in line for line in told)


def test_status_is_a_paragraph_and_a_table(sample):
    told = render_status(sample(37)).split("\n")
    assert told[0] == "python-1m (abababab)"
    assert "  round        37 of 120, epoch 0" in told
    assert "  loss         1.419, validation 1.479" in told
    table = told[told.index("") + 1 :]
    assert [row.split()[0] for row in table] == [
        "peer",
        "basalt",
        "coral",
        "drift",
        "ebb",
        "fathom",
    ]
    assert len({len(row) for row in table}) == 1


def test_the_status_of_a_pipeline_has_a_table_of_stages(staged):
    told = render_status(staged()).split("\n")
    assert "  stages       3; the others wait for stage-2" in told
    assert not any(line.startswith("  chain ") for line in told)
    blank, second = (i for i, line in enumerate(told) if not line)
    head, *stages = (line.split() for line in told[blank + 1 : second])
    assert head[:5] == ["stage", "state", "round", "chain", "params"]
    assert [row[0] for row in stages] == ["stage-1", "stage-2,", "stage-3"]
    assert stages[1][1] == "binds" and stages[1][-4:] == ["3", "4", "0", "gradients"]
    peers = [line.split() for line in told[second + 1 :]]
    assert peers[0][:3] == ["peer", "stage", "state"]
    assert [row[1] for row in peers[1:]] == [f"stage-{n}" for n in (1, 1, 2, 2, 3, 3)]
    assert not any(line != line.rstrip() for line in told)


def test_a_pipeline_that_does_not_validate_says_nothing_of_it(staged):
    status = staged()
    assert "validation 1.479" in render_status(status)
    assert "validation" not in render_status(replace(status, valid_loss=None))
    balanced = [replace(module, binds=False) for module in status.modules]
    assert "  stages       3\n" in render_status(replace(status, modules=balanced))


def test_the_round_of_a_pipeline_names_the_stage_of_its_members(staged):
    (line,) = without_clock(lines(staged(36), staged(37)))
    assert line.endswith("6 peers of stage-3")


def test_status_without_peers_has_no_table(sample):
    assert "seen" not in render_status(replace(sample(0), peers=[]))


def test_follow_reports_a_lost_connection_once_and_ends_with_the_run(sample):
    steps = [
        sample(1),
        ConnectionError("refused \x1b[2J"),
        ConnectionError("refused"),
        sample(2),
        sample(3, state="finished"),
    ]
    written: list[str] = []

    async def feed():
        step = steps.pop(0)
        if isinstance(step, Exception):
            raise step
        return step

    last = asyncio.run(follow(feed, written.append, interval_s=0.0))
    assert last.position == 3
    assert steps == []
    told = without_clock(written)
    assert told[1] == "cannot read the status of the run: refused ·[2J; retrying"
    assert told[2] == "reconnected"
    assert [line.split()[1] for line in told if line.startswith("round")] == [
        "1/120",
        "2/120",
        "3/120",
    ]
    assert told[-1].startswith("finished after 3 rounds")


def test_an_event_waits_for_the_round_before_it(sample):
    """A round's line is complete some seconds after the round, an event's at once."""
    before = sample(12)
    row = sample(13).history[-1]
    event = Event(at=row.at + 1.0, level="warning", source="", text="a peer fell silent")
    rows = {"history": [*before.history, row], "position": 13, "events": [event]}
    steps = [
        replace(before, now=row.at + 1.5, **rows),
        replace(sample(13, state="finished"), now=row.at + 9.0, **rows),
    ]
    written: list[str] = []

    async def feed():
        return steps.pop(0)

    asyncio.run(follow(feed, written.append, interval_s=0.0, since=before))
    told = [line.split()[:2] for line in without_clock(written)]
    assert told[:2] == [["round", "13/120"], ["warning", "a"]]


def test_follow_prints_nothing_that_is_known_already(sample):
    steps, written = [sample(12), sample(13, state="finished")], []

    async def feed():
        return steps.pop(0)

    asyncio.run(follow(feed, written.append, interval_s=0.0, since=sample(12)))
    rounds = [line for line in without_clock(written) if line.startswith("round")]
    assert [line.split()[1] for line in rounds] == ["13/120"]


def test_a_round_without_reports_has_no_speed_and_bytes(sample):
    """The coordinator was away, and learned of some rounds at once."""
    after = sample(37)
    *others, last = after.history
    untold = replace(last, seconds={}, wire_bytes=0)
    (line,) = without_clock(lines(sample(36), replace(after, history=[*others, untold])))
    assert line.split()[4:9] == [ABSENT, "tok/s", ABSENT, "sent", "util"]


@pytest.mark.parametrize("position", [0, 1, 512, 700])
def test_a_long_run_can_be_joined_late(sample, position):
    status = sample(position)
    found = [line for line in lines(None, status) if " round " in line[:20]]
    assert len(found) == min(position, 512)


def test_the_line_of_a_round_says_why_a_member_was_left_out(sample):
    status = sample(13)
    absent, partial = status.peers[4].peer_id, status.peers[2].peer_id
    row = replace(
        status.history[-1],
        reasons={absent: f"{partial[-6:]} got nothing", partial: "silent\x1b[2J", "x" * 44: "?"},
    )
    status = replace(status, history=[*status.history[:-1], row])
    (line, *_) = without_clock(lines(sample(12), status))
    assert line.endswith(
        "4 peers (without fathom: drift got nothing; drift in part: silent·[2J; …xxxxxx in part: ?)"
    )


def test_messages_name_peers_instead_of_their_ids(sample):
    status = sample(2)
    one, two = status.peers[0].peer_id, status.peers[1].peer_id
    said = Event(
        at=status.now,
        level="warning",
        source=one,
        text=f"left out {two[-6:]}: the stream to {two} broke; QmUnknownPeer said update",
    )
    (line,) = without_clock(lines(status, replace(status, events=[*status.events, said])))
    assert line == (
        "warning  basalt: left out coral: the stream to coral broke; QmUnknownPeer said update"
    )


def test_an_end_that_two_peers_share_stays_as_it_is():
    name = naming(
        {"12D3KooWaaSAMEND": "one", "12D3KooWbbSAMEND": "two", "12D3KooWccccccc": "three"}
    )
    assert name("left out SAMEND, cccccc, 12D3KooWbbSAMEND") == "left out SAMEND, three, two"


def test_updates_that_are_not_held_are_listed(sample):
    assert "missing" not in render_status(sample(13))
    gaps = [Gap(first=4, last=4), Gap(first=7, last=9)]
    told = render_status(replace(sample(13), gaps=gaps))
    assert "missing      updates of rounds 4, 7 to 9: no peer has kept them" in told


def test_the_status_says_how_each_peer_is_reached(sample):
    status = sample(13)
    first, second, *others = status.peers
    relayed = {"reach": "relayed", "relays": [first.peer_id, "R"], "relayed_bytes": 2_000_000}
    third, *others = others
    through_us = replace(third, reach="relayed", relays=["R"])
    peers = [replace(first, reach="direct"), replace(second, **relayed), through_us, *others]
    told = render_status(replace(status, peers=peers))
    assert f"{ABSENT}  " in told.rpartition("reach")[2]  # an older version says nothing
    reached = [
        line.split() for line in told.splitlines() if " direct " in line or " relayed " in line
    ]
    assert {words[0] for words in reached} == {first.name, second.name, third.name}
    assert f"relayed by {first.name}, 2.00 MB" in told
    assert "relayed by coordinator, 0 B" in told


def test_a_status_names_a_pair_that_cannot_reach_each_other(sample):
    status = sample(3)
    one, other, *rest = status.peers
    here = [replace(one, unreached=[other.peer_id]), replace(other, unreached=[one.peer_id]), *rest]
    shown = render_status(replace(status, peers=here))
    (line,) = [x for x in shown.splitlines() if "each other" in x]
    assert one.name in line and other.name in line and "--announce" in line
    left = [here[0], replace(here[1], state="left"), *rest]
    assert "each other" not in render_status(replace(status, peers=left))


def test_joins_and_leaves_are_printed_once(sample):
    before = sample(12)
    one, *others = before.peers
    gone = replace(before, peers=[replace(one, state="left"), *others])
    assert [line.split("  ")[1] for line in lines(before, gone)] == [f"{one.name} left"]
    assert lines(gone, gone) == []
    assert [line.split("  ")[1] for line in lines(gone, before)] == [f"{one.name} joined"]
    silent = replace(before, peers=[replace(one, state="gone"), *others])
    assert lines(before, silent) == []  # an event says so


def test_progress_through_the_rows_is_one_line(sample):
    rows = RowsStatus(number=2, done=4080, held=11, total=12_000)
    assert "pass 2, 34% of 12,000 units, 11 held" in render_status(replace(sample(37), rows=rows))
    assert "units" not in render_status(sample(37))
