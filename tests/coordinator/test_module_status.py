"""What a run's status says of its modules, and which one binds."""

from pathlib import Path
from typing import Any

from atoll.coordinator.module_status import with_binding, with_peers, with_valid_losses
from atoll.coordinator.run.spec import RunSpec
from atoll.coordinator.run.status import FlowStatus, ModuleStatus, PeerStatus, RoundSummary

STAGES = [ModuleStatus(name=f"stage-{n}", state="training", position=4) for n in (1, 2, 3)]


def peer(module, *, busy=0.5, tokens=1, rate=100.0, flow=None):
    return PeerStatus(
        peer_id=f"{module}{busy}",
        module=module,
        utilisation=busy,
        tokens_total=tokens,
        tokens_per_s=rate,
        flow=flow,
    )


def peers_of(*busy):
    return [peer(f"stage-{n}", busy=b) for n, b in enumerate(busy, start=1)]


def bound(modules):
    return [module.name for module in modules if module.binds]


def test_a_module_adds_up_what_its_peers_report():
    first = FlowStatus(
        in_flight=3,
        queued=1,
        double_counts=2,
        omitted={"late": 2, "withdrawn": 9},
        waited_s={"returns": 5.0, "input": 4.0},
    )
    second = FlowStatus(
        in_flight=2, omitted={"failed": 1}, double_counts=1, waited_s={"input": 2.0}
    )
    told = with_peers(
        STAGES,
        [
            peer("stage-2", busy=0.4, flow=first),
            peer("stage-2", busy=0.8, flow=second),
            peer("stage-2", busy=1.0, tokens=0),  # it has not measured its time
            peer("stage-9"),
        ],
    )
    one, two, _ = told
    assert (one.peers, one.position, one.waits_for) == (0, 4, "")
    assert (two.peers, two.tokens_per_s, two.in_flight, two.queued, two.omitted) == (
        3,
        300.0,
        5,
        1,
        3,
    )
    assert (one.double_counts, two.double_counts) == (0, 3)
    assert abs(two.utilisation - 0.6) < 1e-9
    assert two.waits_for == "input"  # 6 s of both together


def test_the_stage_binds_whose_peers_have_least_time_left():
    told = with_peers(STAGES, peers_of(0.4, 0.9, 0.6))
    assert bound(told) == ["stage-2"]


def test_nothing_binds_if_all_are_about_as_busy():
    """At the start all report that they were busy all the time."""
    told = with_peers(STAGES, peers_of(0.9, 0.91, 0.9))
    assert bound(told) == []


def test_a_vacant_stage_binds_whatever_the_others_do():
    told = with_peers(STAGES, [peer("stage-1", busy=0.99), peer("stage-3", busy=0.1)])
    assert bound(told) == ["stage-2"]
    assert bound(with_peers(STAGES, [])) == []
    done = [ModuleStatus(name=s.name, state="finished") for s in STAGES]
    assert bound(with_peers(done, [peer("stage-1", tokens=0)])) == []


def test_a_single_module_holds_up_nobody():
    assert bound(with_binding([ModuleStatus(name="one", peers=1, utilisation=1.0)])) == []


def test_rounds_have_the_loss_of_one_stage_and_the_validation_of_another():
    last = [RoundSummary(position=n, at=n, loss=4.0 - n) for n in (1, 2, 3)]
    first = [RoundSummary(position=2, at=2, valid_loss=2.5)]
    told = with_valid_losses(last, first)
    assert [(row.loss, row.valid_loss) for row in told] == [(3.0, None), (2.0, 2.5), (1.0, None)]


def test_a_peer_that_serves_another_module_than_before_has_moved(kit: Any, tmp_path: Path) -> None:
    spec = RunSpec.from_dict(kit.SPEC.model_dump(mode="json") | {"topology": {"stages": 2}})

    async def main() -> None:
        async with kit.net(tmp_path / "run", spec=spec) as net:
            net.swarm = swarm = kit.Swarm()
            client = net.client(0, module="stage-1")
            await client.join()
            moves = []
            for module in ("stage-1", "stage-1", "stage-2", "stage-2"):
                await client.heartbeat(swarm.status(0, module=module))
                moves.append([m.moves for m in net.up.coordinator.status().modules])
            assert moves == [[0, 0], [0, 0], [0, 1], [0, 1]]

    kit.run(main())
