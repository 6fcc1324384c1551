"""Peers that a round continued without, and the reasons."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from atoll.coordinator.report.view import without
from atoll.coordinator.run.status import RoundReport
from atoll.coordinator.run.text import short_id


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
