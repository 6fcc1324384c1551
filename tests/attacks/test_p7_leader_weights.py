"""P7: a leader gives itself an absurd weight, or others a number that they did not report.

Or a member reports a number that others cannot tell from another one.
"""

from dataclasses import replace

import pytest

from atoll.dht.identity import Identity, verify
from atoll.optim.log.entry import Entry, MalformedRecord
from atoll.peer.rounds.consensus import dissemination
from atoll.peer.rounds.messages import Report, Sworn, report_payload
from atoll.peer.rounds.policies import admit, check_reports
from support.attackers import falsify
from support.swarm import SMALL, reached, run_swarm


def log_of(peer, start):
    position = peer.replica.position
    return [Entry.decode(peer.replica.store.get(p).entry) for p in range(start, position)]


LIES = {
    "weight": {"weight": 999999995904.0},
    "clip": {"clip": 0.5},
    "norm": {"norm": 1e30},
    "tokens": {"tokens": 5, "steps": 1},
}


@pytest.mark.parametrize(
    ("lie", "members_look"),
    [
        ("weight", True),
        ("norm", False),
        ("clip", False),
        pytest.param("weight", False, marks=pytest.mark.exhaustive),
        pytest.param("tokens", False, marks=pytest.mark.exhaustive),
    ],
    ids=lambda value: {True: "members look", False: "voters alone"}.get(value, value),
)
def test_no_entry_carries_a_number_that_a_member_did_not_sign(
    tmp_path, monkeypatch, lie, members_look
):
    async def scenario(swarm):
        peers = await swarm.start(4)
        await swarm.until(lambda: reached(peers, 2))
        liar, honest = peers[3], peers[:3]
        falsify(monkeypatch, liar.ctx.me, LIES[lie])
        if not members_look:
            monkeypatch.setattr(dissemination, "check_reports", lambda *_, **__: None)
        at = max(p.replica.position for p in peers)
        await swarm.until(lambda: reached(honest, at + 10), timeout_s=900.0)
        known = {p.ctx.me for p in peers}
        for entry in log_of(honest[0], at + 1):
            for member in entry.members:
                assert member.elector in known
                assert (member.weight, member.clip) == (128.0, 1.0)
                assert member.norm < 1e6 and member.tokens > 5
        assert swarm.same_bits(honest)

    run_swarm(tmp_path, scenario, codec="int8")


RUN = bytes(32)


def signed(key, **changes):
    report = Report(
        **{
            "epoch": 1,
            "position": 2,
            "incarnation": "a",
            "weight": 10.0,
            "tokens": 100,
            "steps": 10,
            "loss": None,
            "norm": 1.0,
            "uplink_mbit_s": 50.0,
        }
        | changes
    )
    signature = key.sign(report_payload(RUN, report))
    return report, Sworn(counts=report.weight > 0, uplink_mbit_s=50.0, signature=signature)


def check(members, sworn, place=(1, 2)):
    bounds = {"clip_at": 2.0, "carried": 1.0}
    check_reports(members, sworn, place, run_id=RUN, rule="rate", verify=verify, **bounds)


def test_members_are_those_that_signed():
    keys = [Identity.ephemeral() for _ in range(3)]
    said = [signed(key) for key in keys]
    reports = [(k.peer_id, r) for k, (r, _) in zip(keys, said, strict=True)]
    members = admit(reports, clip_at=2.0, carried=1.0)
    sworn = [one for _, one in said]
    check(members, sworn)
    invented = members[0].model_copy(update={"peer_id": Identity.ephemeral().peer_id})
    for lie, signatures in (
        ([invented, *members[1:]], sworn),
        ([*members, invented], [*sworn, sworn[0]]),
        (members, sworn[:2]),
        (members, [sworn[1], sworn[0], sworn[2]]),
        ([members[0].model_copy(update={"peer_id": "nobody"}), *members[1:]], sworn),
    ):
        with pytest.raises(MalformedRecord):
            check(lie, signatures)
    for place in ((1, 3), (2, 2)):
        with pytest.raises(MalformedRecord, match="own report"):
            check(members, sworn, place)


def test_a_report_without_weight_is_not_given_one():
    key = Identity.ephemeral()
    report, sworn = signed(key, weight=0.0)
    (member,) = admit([(key.peer_id, report)], clip_at=2.0, carried=1.0)
    assert member.weight == 0.0
    check([member], [sworn])
    heavy = member.model_copy(update={"weight": 10.0})
    for said in (sworn, sworn.model_copy(update={"counts": True})):
        with pytest.raises(MalformedRecord):
            check([heavy], [said])


def test_a_weight_of_minus_zero_is_refused_before_a_group_has_it(tmp_path):
    """It equals 0, which members and voters take it for, but its sender signed other bytes."""

    async def scenario(swarm):
        *honest, liar = await swarm.start(4)
        await swarm.until(lambda: reached([*honest, liar], 1))
        liar.tamper = lambda offer: replace(offer, weight=-0.0)
        at = max(p.replica.position for p in honest)
        await swarm.until(lambda: reached(honest, at + 3), timeout_s=60.0)
        honest_names = {p.identity.peer_id for p in honest}
        for entry in log_of(honest[0], at + 1):
            assert {m.peer_id for m in entry.members} == honest_names

    run_swarm(tmp_path, scenario, codec="int8", layout=SMALL)
