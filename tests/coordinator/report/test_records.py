"""Rounds and events for programs."""

import asyncio
import json
from dataclasses import replace

from atoll.coordinator.report.records import follow, records
from support.status import make_status


def test_a_round_and_an_event_are_told_once_with_their_fields():
    before, after = make_status(7), make_status(8)
    found = records(before, after)
    (row,) = [record for record in found if record["kind"] == "round"]
    assert (row["position"], row["members"], row["tokens"]) == (8, 5, 307_200)
    assert row["seconds"]["send"] > 0
    (event,) = [record for record in found if record["kind"] == "event"]
    assert (event["level"], event["source"]) == ("info", "coordinator")
    assert records(after, after) == []
    json.dumps(found, allow_nan=False)


def test_the_state_is_told_when_it_changes():
    first = make_status(7)
    (state,) = [r for r in records(None, first) if r["kind"] == "state"]
    assert (state["state"], state["peers"]) == ("training", 4)
    assert [r["kind"] for r in records(first, replace(first, state="paused"))] == ["state"]


def test_records_go_on_after_a_lost_connection_until_the_end():
    last = make_status(8, state="finished")
    answers = iter([make_status(7), ConnectionError("gone"), replace(last, now=last.now + 60)])
    told = []

    async def feed():
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    asyncio.run(follow(feed, told.append, interval_s=0.0))
    positions = [record["position"] for record in told if record["kind"] == "round"]
    assert positions == list(range(1, 9))
