"""`atoll simulate --growth`: the windows of a run, in one process."""

import json
from dataclasses import replace

import pytest
import torch

from atoll.peer.cli import main as cli
from atoll.peer.errors import SetupError
from atoll.peer.lab.simulate import Bench, Folder, Simulation, parse_methods
from atoll.peer.lab.simulation_settings import Settings
from support.small_runs import TINY, command

STEPS = 60


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    for number in range(40):
        (folder / f"{number:02}.txt").write_text(f"{number // 10}" * 800)
    return Settings(
        workers=2,
        tokens=2 * 2 * 16 * STEPS,
        inner_steps=3,
        growth=0.0027,
        max_inner_steps=12,
        batch_size=2,
        seq_len=16,
        overrides=TINY,
        source=str(folder),
        points=2,
        valid_batches=1,
    )


def begun(settings, spec="diloco"):
    torch.set_num_threads(1)
    (method,) = parse_methods(spec, settings)
    return Simulation(Bench(settings), method, 0)


def trained(settings, spec="diloco", steps=STEPS):
    simulation = begun(settings, spec)
    while simulation.step < steps:
        simulation.advance()
    return simulation


@pytest.mark.parametrize("spec", ["diloco", "muloco(tau=2)", "eager", "streaming(count=2, tau=1)"])
def test_rounds_are_those_of_the_timetable(settings, spec):
    simulation, windows = trained(settings, spec), settings.timetable
    rounds = windows.turn_at(STEPS)
    worker = simulation.workers[0]
    assert (windows.window(0), windows.window(rounds - 1)) == (3, 12)
    hidden = simulation.method.hidden_steps(12)
    assert (worker.inner_steps, worker.delay) == (12, hidden)
    if len(worker.fragments) == 1:
        ends = [windows.steps_until(turn) for turn in range(1, rounds + 1)]
        assert [step for step, _ in simulation.sent] == ends


def test_a_late_worker_takes_the_window_of_the_others(settings):
    late = replace(settings, join_at=0.5)
    turn = late.timetable.turn_at(late.join_step)
    assert late.timetable.steps_until(turn) == late.join_step
    assert abs(late.join_step - STEPS / 2) <= late.timetable.window(turn)
    simulation = trained(late, steps=late.join_step + 1)
    assert [w.inner_steps for w in simulation.workers] == [late.timetable.window(turn)] * 2


def test_an_interrupted_simulation_goes_on_in_the_same_window(settings, tmp_path):
    whole, folder = trained(settings), Folder(tmp_path, settings)
    folder.save(trained(settings, steps=STEPS - 15))
    again = begun(settings)
    assert folder.resume(again)
    while not again.finished:
        again.advance()
    assert again.group.state_of(0).root() == whole.group.state_of(0).root()


def test_methods_without_windows_are_simulated_beside_those_with(settings):
    assert len(trained(settings, "ddp").sent) == STEPS


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"growth": 0.0002}, "windows would not grow"),
        ({"growth": -1.0}, "at least 0"),
        ({"speeds": (1.0, 2.0)}, "--growth and --speeds"),
        ({"max_inner_steps": 2}, "longest window above"),
        ({"growth": 0.0}, "--max-inner-steps requires --growth"),
    ],
)
def test_windows_that_cannot_grow_are_refused(settings, changed, told):
    with pytest.raises(SetupError, match=told):
        replace(settings, **changed)


def test_command_takes_a_growth(settings, tmp_path, capsys):
    growth = ["--methods", "diloco", "--growth", "0.0027", "--max-inner-steps", "5"]
    words = command(settings.source, tmp_path, *growth)
    assert cli.main([*words, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["settings"]["growth"], row["settings"]["max_inner_steps"]) == (0.0027, 5)
    assert cli.main(words) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "windows grow from 3 to 5 steps"
