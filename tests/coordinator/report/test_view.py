"""Peers that a round continued without, and the reasons."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from atoll.coordinator.report.view import binding, peers_of, sorted_peers, waited_for, without
from atoll.coordinator.run.status import RoundReport
from atoll.coordinator.run.text import ABSENT, short_id


def test_a_peer_that_is_no_member_is_left_out_wholly(kit: Any, tmp_path: Path) -> None:
    """Electors or not: a slow peer is seldom one."""

    async def main() -> None:
        async with kit.net(tmp_path / "run") as net:
            one, *_ = await net.started()
            entry, body = net.swarm.entry(net.run_id, net.up.coordinator.log.head())
            assert await net.publish(one, entry, body)
            member, slow = entry.members[0].peer_id, "12D3KooWslow"
            reasons = {member: "stalled", slow: "not ready in time"}
            trace = RoundReport(position=0, included=True, reasons=reasons)
            net.up.coordinator.log.rounds.trace(entry.members[1].peer_id, trace, 0.0)
            (row,) = net.up.coordinator.status().history
            assert row.left_out == [slow]
            assert without(row, {}) == [
                f"{short_id(slow)}: not ready in time",
                f"{short_id(member)} in part: stalled",
            ]

    kit.run(main())


def test_peers_of_a_stage_that_left_come_last(staged: Any) -> None:
    status = staged(peers_a_stage=3)
    one, *others = peers_of(status, status.modules[0])
    peers = [replace(p, state="left") if p == one else p for p in status.peers]
    status = replace(status, peers=peers)
    assert [p.peer_id for p in peers_of(status, status.modules[0])] == [
        *(p.peer_id for p in others),
        one.peer_id,
    ]
    assert sorted_peers(status)[0].peer_id == one.peer_id  # a row stays in its place
    assert binding(status) == "stage-2"


def test_an_unknown_reason_is_shown_as_it_is() -> None:
    assert waited_for("returns") == "gradients"
    assert waited_for("") == ABSENT
    assert waited_for("\x1bnews") == "·news"
