"""Test the supervision of a demo: it reports any process that ends, and leaves none behind."""

import asyncio
import functools
import os
import re
import signal
import threading
from dataclasses import replace

import pytest

from atoll.coordinator.run.spec import RunSpec
from atoll.coordinator.run.status import ModuleStatus
from atoll.optim.log.module import WHOLE
from atoll.peer.cli import demo as demo_command
from atoll.peer.cli import main as cli
from atoll.peer.cli.demo import carry_out
from atoll.peer.cli.main import exit_code
from atoll.peer.lab import children
from atoll.peer.lab import demo as demo_module
from atoll.peer.lab.children import ChildFailed, ChildRefused
from atoll.peer.lab.demo import (
    ChaosError,
    DemoStuck,
    Kill,
    OutError,
    StallWatch,
    expect_room_for_chaos,
)
from atoll.peer.lab.summary import Compared
from support.limits import DEADLINE_S


def fails(demo, kit, error):
    with pytest.raises(error) as caught:
        asyncio.run(asyncio.wait_for(demo.run(kit.show_for_ever), DEADLINE_S))
    return str(caught.value)


@pytest.mark.parametrize("reachable", [True, False])
def test_a_coordinator_that_dies_ends_the_demo(stage, kit, reachable):
    if reachable:
        stage.status()
    demo = stage.demo()

    async def main():
        running = asyncio.create_task(demo.run(kit.show_for_ever))
        await kit.until(lambda: len(stage.pids()) == 3)
        os.kill(int((stage.folder / "coordinator.starts").read_text()), signal.SIGKILL)
        await running

    with pytest.raises(ChildFailed, match="coordinator was ended by SIGKILL") as caught:
        asyncio.run(asyncio.wait_for(main(), DEADLINE_S))
    assert exit_code(caught.value) == 1
    assert "coordinator.log" in str(caught.value)


def test_a_coordinator_that_cannot_start_ends_the_demo(stage, kit):
    told = fails(stage.demo(coordinator="exit 1"), kit, ChildFailed)
    assert "coordinator ended with exit code 1" in told
    assert "coordinator says why" in told


def test_input_that_a_process_refuses_is_the_users_to_put_right(stage, kit):
    demo = stage.demo(peer_1="exit 2")
    with pytest.raises(ChildRefused, match="peer-1: peer-1 says why") as caught:
        asyncio.run(demo.run(kit.show_for_ever))
    assert exit_code(caught.value) == 2


def test_a_peer_that_is_killed_ends_the_demo(stage, kit):
    stage.status()
    assert "peer-1 was ended by SIGKILL" in fails(stage.demo(peer_1="killed"), kit, ChildFailed)


def test_peers_that_end_before_the_run_does_end_the_demo(stage, kit):
    stage.status(position=2)
    told = fails(stage.demo(peer_0="exit 0", peer_1="exit 0"), kit, ChildFailed)
    assert re.match(r"peer-[01] ended with exit code 0 before the end of the run;", told)


def test_peers_train_for_their_share_of_the_time(stage, kit):
    stage.status(state="finished", position=5)
    ends = {f"peer_{i}": "exit 0" for i in range(3)}

    async def show(feed):
        return True

    asyncio.run(stage.demo(peers=3, shares=[1.0, 0.25], **ends).run(show))
    assert stage.shares() == [1.0, 0.25, 1.0]


def test_peers_are_told_of_nothing_but_the_demos_own_spec():
    own = {"model": {"custom": "mine:build"}, "data": {"source": "texts", "tokenizer": "t.json"}}
    spec = RunSpec.from_dict(own)
    words = ["peer", "INVITE", *demo_module.own_names(spec)]
    args = cli._parser(cli._load("peer"), "peer").parse_args(words)
    assert args.yes
    assert (args.data, args.tokenizer, args.allow_model) == ("texts", "t.json", ["mine:build"])
    assert "--allow-model" not in demo_module.own_names(RunSpec())


def test_peers_end_with_the_run(stage, kit):
    finished = stage.status(state="finished", position=5)

    async def show(feed):
        return (await feed()).state == "finished"

    run = asyncio.run(stage.demo(peer_0="exit 0", peer_1="exit 0").run(show))
    assert run.status == finished
    assert run.checkpoint.name == "fake.safetensors"
    assert list(run.checkpoints) == [WHOLE]


def test_a_finished_run_says_that_it_waits_for_its_peers(stage, kit):
    stage.status(state="finished", position=5)

    async def show(feed):
        return (await feed()).state == "finished"

    async def main():
        running = asyncio.create_task(stage.demo().run(show))
        await kit.until(lambda: stage.said == ["training finished; stopping peers"])
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(main())


def test_who_leaves_the_dashboard_ends_the_demo(stage, kit):
    async def show(feed):
        return False

    assert asyncio.run(stage.demo().run(show)) is None


@pytest.fixture
def not_ignored(number):
    """Tests under nohup ignore SIGHUP."""
    before = signal.getsignal(number)
    if before is signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)
    yield
    signal.signal(number, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_children_too(stage, kit, number, not_ignored):
    async def main():
        running = asyncio.create_task(carry_out(stage.demo(), kit.show_for_ever))
        await kit.until(lambda: len(stage.pids()) == 3)
        os.kill(os.getpid(), number)
        return await running

    assert asyncio.run(main()) == (None, number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_exit_code_tells_the_signal(stage, kit, number, monkeypatch, capsys):
    def strike():
        asyncio.run(kit.until(lambda: len(stage.pids()) == 3))
        os.kill(os.getpid(), number)

    options = functools.partial(demo_module.DemoOptions, program=stage.command)
    monkeypatch.setattr(demo_module, "DemoOptions", options)
    threading.Thread(target=strike).start()
    arguments = ["demo", "--peers", "2", "--plain", "--out", str(stage.folder / "out")]
    assert cli.main(arguments) == 128 + number
    assert capsys.readouterr().err.endswith("stopped\n")


def test_a_second_signal_does_not_wait_for_a_deaf_process(stage, kit, monkeypatch):
    monkeypatch.setattr(children, "STOP_S", 3600.0)

    async def main():
        demo = stage.demo(coordinator="deaf", peer_0="deaf", peer_1="deaf")
        running = asyncio.create_task(carry_out(demo, kit.show_for_ever))
        # Also here: a process whose start is cancelled is killed, however deaf.
        await kit.until(lambda: len(stage.pids()) == len(list(demo._children())) == 3)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.2)
        assert all(map(kit.is_alive, stage.pids()))
        os.kill(os.getpid(), signal.SIGTERM)
        return await asyncio.wait_for(running, DEADLINE_S)

    assert asyncio.run(main()) == (None, signal.SIGTERM)


# chaos


def test_chaos_kills_a_peer_once_and_starts_it_again_without_its_log(stage, kit):
    log = stage.folder / "out" / "peer-1" / "log"

    async def main():
        demo = stage.demo(chaos=True, peer_1=["reduce", "run"])
        stage.status(position=1)
        running = asyncio.create_task(demo.run(kit.show_for_ever))
        await kit.until(lambda: stage.said)
        assert stage.said == ["chaos: peer-1 killed (SIGKILL) while it reduces round 2"]
        await asyncio.sleep(0.2)
        assert log.exists()
        stage.status(position=3)  # the others committed that round and another
        await kit.until(lambda: len((stage.folder / "peer-1.starts").read_text().split()) == 2)
        assert not log.exists()
        os.kill(int((stage.folder / "peer-1.starts").read_text().split()[1]), signal.SIGKILL)
        await running

    with pytest.raises(ChildFailed, match="peer-1 was ended by SIGKILL"):
        asyncio.run(main())
    assert len(stage.said) == 2


def test_a_killed_peer_comes_back_when_its_stage_has_moved_on(stage, kit):
    kill = Kill(peer="peer-1", position=3, at_s=100.0)
    peers = [
        kit.PeerStatus(peer_id=name, name=name, module=module, state=state)
        for name, module, state in (
            ("peer-0", "stage-1", "training"),
            ("peer-1", "stage-2", "gone"),
            ("peer-2", "stage-2", "training"),
        )
    ]

    def due(position, now_s=1000.0):
        modules = [
            ModuleStatus(name="stage-1", position=9),
            ModuleStatus(name="stage-2", position=position),
        ]
        status = stage.status(position=position, peers=peers, modules=modules)
        return demo_module.is_restart_due(status, kill, "stage-2", now_s)

    assert [due(4), due(5)] == [False, True]
    # Alone in its stage, which then waits for it.
    peers[2] = replace(peers[2], state="left")
    assert [due(3, 101.0), due(3, 101.0 + demo_module.VACANT_S)] == [False, True]


def test_the_log_that_a_killed_peer_loses_is_that_of_its_stage(stage, kit):
    folder = stage.folder / "out" / "peer-1"
    moved = [ModuleStatus(name="stage-2", position=3)]

    async def main():
        demo = stage.demo(stages=2, chaos=True, peer_1=["reduce", "run"])
        running = asyncio.create_task(demo.run(kit.show_for_ever))
        await kit.until(lambda: stage.said)
        (folder / "stage-2").mkdir(parents=True)
        two = [
            kit.PeerStatus(peer_id=name, name=name, module="stage-2", state="training")
            for name in ("peer-1", "peer-2")
        ]
        stage.status(position=1, peers=two, modules=moved)
        await kit.until(lambda: len((stage.folder / "peer-1.starts").read_text().split()) == 2)
        assert not (folder / "stage-2").exists()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(main())


def test_who_stops_the_comparison_still_gets_the_summary(monkeypatch, capsys):
    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo_command, "compare", stopped)
    assert demo_command.compare_or_skip(None, None, "cpu") == Compared()
    assert "press Ctrl-C to skip" in capsys.readouterr().err


@pytest.mark.parametrize(("peers", "rounds"), [(1, 12), (4, 1), (4, 4)])
def test_chaos_without_room_is_refused_before_anything_starts(stage, peers, rounds):
    with pytest.raises(ChaosError, match="expected at least") as caught:
        stage.demo(peers=peers, rounds=rounds, chaos=True)
    assert exit_code(caught.value) == 2
    assert not (stage.folder / "out").exists()


def test_chaos_has_room_in_all_longer_runs():
    for rounds in range(5, 100):
        expect_room_for_chaos(2, rounds)


def test_a_folder_with_something_in_it_is_left_alone(stage):
    (stage.folder / "out").mkdir()
    (stage.folder / "out" / "thesis.tex").write_text("mine")
    with pytest.raises(OutError, match="--out"):
        stage.demo()
    assert [path.name for path in (stage.folder / "out").iterdir()] == ["thesis.tex"]


# a run that does not move


def trained(stage, kit, position, *tokens):
    peers = [kit.PeerStatus(peer_id=str(i), tokens_total=t) for i, t in enumerate(tokens)]
    return stage.status(position=position, peers=peers)


def watch_until(watch, status, until_s, step_s=1.0):
    now_s = 0.0
    while now_s < until_s:
        now_s += step_s
        watch.note(status(now_s), now_s)


def test_a_coordinator_that_says_nothing_is_noticed():
    with pytest.raises(DemoStuck, match="has not answered"):
        watch_until(StallWatch(0.0, window_tokens=10), lambda now_s: None, demo_module.SILENT_S + 2)


def test_a_run_that_does_not_move_is_noticed(stage, kit):
    status = trained(stage, kit, 3, 100, 100)
    with pytest.raises(DemoStuck, match="after round 3"):
        watch_until(
            StallWatch(0.0, window_tokens=10), lambda now_s: status, demo_module.STUCK_S + 2
        )


def test_training_without_rounds_is_no_progress_for_ever(stage, kit):
    def status(now_s):
        return trained(stage, kit, 3, int(now_s), int(now_s))

    with pytest.raises(DemoStuck, match="after round 3"):
        watch_until(StallWatch(0.0, window_tokens=20), status, 2 * demo_module.STUCK_S)


def test_a_long_window_is_progress(stage, kit):
    def status(now_s):
        return trained(stage, kit, 3, int(now_s), int(now_s))

    watch_until(
        StallWatch(0.0, window_tokens=100_000), status, 20 * demo_module.STUCK_S, step_s=50.0
    )


def test_slow_rounds_are_progress(stage, kit):
    def status(now_s):
        return trained(stage, kit, int(now_s // 200), 1, 1)

    watch_until(StallWatch(0.0, window_tokens=1), status, 20 * demo_module.STUCK_S, step_s=50.0)
