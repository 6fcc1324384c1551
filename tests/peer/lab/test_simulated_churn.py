"""`atoll simulate` with workers that miss rounds, join late, have their own text and own speeds."""

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from atoll.peer.cli import main as cli
from atoll.peer.errors import SetupError
from atoll.peer.lab.simulate import Bench, Folder, Simulation, parse_methods
from atoll.peer.lab.simulation_settings import Settings
from support.small_runs import TINY, command


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    for number in range(40):
        (folder / f"{number:02}.txt").write_text(f"{number // 10}" * 800)
    return Settings(
        workers=4,
        tokens=4 * 2 * 16 * 16,
        inner_steps=4,
        batch_size=2,
        seq_len=16,
        overrides=TINY,
        source=str(folder),
        points=2,
        valid_batches=1,
    )


def trained(settings: Settings, spec: str = "diloco", steps: int | None = None) -> Simulation:
    torch.set_num_threads(1)
    (method,) = parse_methods(spec, settings)
    simulation = Simulation(Bench(settings), method, 0)
    while not simulation.finished and simulation.step != steps:
        simulation.advance()
    return simulation


def test_windows_follow_speeds_and_end_together(settings):
    unequal = replace(settings, speeds=(1.0, 2.0, 4.0))
    assert unequal.windows == (2, 4, 8, 2)
    assert unequal.steps == settings.steps == 16
    simulation = trained(unequal)
    steps = [worker.statistics().steps for worker in simulation.workers]
    assert steps == [8, 16, 32, 8]
    assert [worker.statistics().included for worker in simulation.workers] == [4] * 4
    assert simulation.group.statistics().rounds == 4
    assert simulation.points[-1].tokens == settings.tokens


def test_speeds_count_the_same_tokens_where_their_mean_is_not_the_median(settings):
    unequal = replace(settings, workers=3, speeds=(1.0, 1.0, 2.0), tokens=3 * 2 * 16 * 32)
    assert unequal.windows == (4, 4, 8)
    simulation = trained(unequal)
    assert simulation.points[-1].tokens == unequal.tokens


def test_dropped_rounds_are_left_out_and_made_good(settings):
    whole, dropped = trained(settings), trained(replace(settings, drop=0.4))
    left_out = sum(worker.statistics().left_out for worker in dropped.workers)
    assert left_out > 0
    assert dropped.group.statistics().rounds == whole.group.statistics().rounds
    included = sum(worker.statistics().included for worker in dropped.workers)
    assert included + left_out == 16
    assert whole.group.state_of(0).root() != dropped.group.state_of(0).root()


def test_each_worker_has_text_that_nobody_else_sees(settings):
    bench = Bench(replace(settings, split_data=True))
    parts = [bench._part(worker).train_N for worker in range(4)]
    assert np.array_equal(np.concatenate(parts), bench.corpus.train_N)
    for worker in range(4):
        stream = bench.stream(0, worker)
        drawn = Counter(int(x) for _ in range(50) for x in stream.next_batch().flatten())
        assert chr(drawn.most_common(1)[0][0]) == str(worker)


def test_the_last_worker_joins_at_the_end_of_a_window(settings):
    late = replace(settings, join_at=0.5)
    assert late.join_step == 8
    simulation = trained(late, steps=8)
    assert len(simulation.workers) == 3
    simulation.advance()
    assert len(simulation.workers) == 4
    assert torch.equal(simulation.workers[3].synced_N, simulation.group.state_of(0).params_N)
    assert simulation.group.state_of(0).position == 2
    while not simulation.finished:
        simulation.advance()
    assert simulation.workers[3].statistics().included == 2
    assert simulation.points[-1].tokens == settings.tokens * 7 // 8


@pytest.mark.parametrize(
    ("spec", "stop"),
    [
        ("diloco", 10),
        ("streaming(tau=1)", 7),
        ("noloco", 10),
        *(
            pytest.param(spec, stop, marks=pytest.mark.exhaustive)
            for spec, stop in (
                *(("diloco", 7), ("streaming(tau=1)", 10), ("noloco", 7)),
                *(("eager", 7), ("eager", 10)),
            )
        ),
    ],
)
def test_disturbed_simulation_goes_on_in_the_same_bits(settings, tmp_path, spec, stop):
    churned = replace(settings, drop=0.3, join_at=0.5, split_data=True, speeds=(2.0, 1.0))
    whole = trained(churned, spec, steps=stop)
    folder = Folder(tmp_path, churned)
    folder.save(whole)
    resumed = trained(churned, spec, steps=0)
    assert folder.resume(resumed)
    for each in (whole, resumed):
        while not each.finished:
            each.advance()
    assert resumed.points == whole.points
    assert torch.equal(resumed.workers[3].synced_N, whole.workers[3].synced_N)


def test_inner_optimizer_can_be_changed_for_methods_with_windows(settings):
    muon = replace(settings, inner="muon")
    simulation = trained(muon, "sparseloco", steps=4)
    assert type(simulation.workers[0].inner).__name__ == "Muon"
    assert type(trained(muon, "ddp", steps=1).workers[0].inner).__name__ == "AdamW"


@pytest.mark.parametrize(
    ("change", "spec", "message"),
    [
        ({"drop": 1.0}, "diloco", "expected drop from 0"),
        ({"join_at": 1.0}, "diloco", "expected join_at from 0"),
        ({"speeds": (0.0,)}, "diloco", "expected speeds above 0"),
        ({"inner": "adam"}, "diloco", "expected one of adamw"),
        ({"workers": 1, "join_at": 0.5}, "diloco", "--join-at requires at least 2 workers"),
        ({"speeds": (1.0, 2.0)}, "demo", "demo has no windows"),
    ],
)
def test_churn_that_makes_no_sense_is_refused(settings, change, spec, message):
    with pytest.raises(SetupError, match=message):
        trained(replace(settings, **change), spec, steps=0)


def test_command_takes_churn(settings, tmp_path, capsys):
    churn = ["--drop", "0.2", "--speeds", "1,2", "--split-data", "--join-at", "0.5", "--json"]
    words = command(settings.source, tmp_path, "--methods", "diloco", *churn)
    assert cli.main(words) == 0
    (row,) = json.loads(capsys.readouterr().out)
    told = row["settings"]
    assert (told["drop"], told["speeds"], told["join_at"]) == (0.2, [1.0, 2.0], 0.5)
    assert told["split_data"] is True
    assert cli.main([word for word in words if word != "--json"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == (
        "each misses 20% of the rounds; the last joins after 4 steps; windows of 1, 2 steps; "
        "each has its own text"
    )
    assert cli.main(command(settings.source, tmp_path, "--speeds", "fast")) == cli.BAD_INPUT
    assert "expected numbers" in capsys.readouterr().err
