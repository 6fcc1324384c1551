import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.coordinator.run.status import (
    Event,
    FlowStatus,
    ModuleStatus,
    PeerStatus,
    RoundReport,
    RoundSummary,
    RunStatus,
    StatusError,
)

PEER = PeerStatus(peer_id="p", phases={"wait": 0.5, "send": 1.0}, loss=2.5, tokens_per_s=1e4)
ROUND = RoundSummary(position=3, at=1.5, loss=2.0, left_out=["q"], seconds={"wait": 1.0})
RUN = RunStatus(
    run_name="r", run_id="ab", peers=[PEER], history=[ROUND], events=[Event(at=1.0, text="héllo")]
)
FLOW = FlowStatus(counted=3, omitted={"late": 2, "withdrawn": 1}, waited_s={"input": 0.5})
STAGED = dataclasses.replace(
    RUN,
    peers=[dataclasses.replace(PEER, module="stage-1", flow=FLOW)],
    modules=[ModuleStatus(name="stage-1", peers=1, binds=True)],
)
TRACE = RoundReport(position=3, included=True, seconds={"send": 0.25}, wire_bytes_sent=10)


@pytest.mark.parametrize("record", [PEER, ROUND, RUN, STAGED, TRACE, RUN.events[0]])
def test_round_trip(record: PeerStatus | RoundSummary | RunStatus | RoundReport | Event) -> None:
    assert type(record).from_json(record.to_json()) == record


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("loss", float("nan")),
        ("loss", "2"),
        ("position", -1),
        ("position", 1.5),
        ("position", 2**63),
        ("peer_id", "x" * 129),
        ("peer_id", 7),
        ("chain", "not hex"),
        ("state", "king"),
        ("phases", {"wait": -1.0}),
        ("phases", {str(i): 1.0 for i in range(33)}),
        ("phases", []),
        ("flow", {"counted": -1}),
        ("flow", {"omitted": {str(i): 1 for i in range(17)}}),
        ("flow", {"waited_s": {"input": "long"}}),
        ("shoe_size", 43),
    ],
)
def test_a_hostile_peer_status_is_refused(field: str, value: object) -> None:
    fields = dataclasses.asdict(PEER) | {field: value}
    with pytest.raises(StatusError, match="PeerStatus"):
        PeerStatus.from_json(json.dumps(fields).encode())


def test_what_a_peer_leaves_behind_is_not_omitted() -> None:
    assert FLOW.num_omitted == 2
    assert FLOW.waits_for == "input"
    assert FlowStatus().waits_for == ""


def test_a_peer_that_was_seen_is_the_same_but_for_the_time() -> None:
    peer = RUN.peers[0]
    seen = peer.seen(3.0)
    assert seen == dataclasses.replace(peer, last_seen_s=3.0)
    assert peer.last_seen_s != 3.0


def test_nothing_wrong_leaves_either() -> None:
    with pytest.raises(StatusError, match=r"peers.0.loss"):
        dataclasses.replace(RUN, peers=[PeerStatus(peer_id="p", loss=float("inf"))]).to_json()


def test_too_long_is_refused_before_it_is_parsed() -> None:
    with pytest.raises(StatusError, match="at most 65536 bytes"):
        PeerStatus.from_json(b" " * 70_000)


@given(st.binary(max_size=300))
def test_hostile_bytes(raw: bytes) -> None:
    for kind in (PeerStatus, RoundSummary, RunStatus, RoundReport, Event):
        with pytest.raises(StatusError):
            kind.from_json(raw)
