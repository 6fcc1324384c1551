"""`atoll simulate`: the clock, the defaults, resuming, and the command itself."""

import json
from dataclasses import replace

import pytest
import torch

from atoll.optim import methods, outer_defaults
from atoll.peer.cli import main as cli
from atoll.peer.errors import SavedStateError, SetupError
from atoll.peer.lab import simulation_plot, simulation_report
from atoll.peer.lab.simulate import Bench, Folder, Simulation, parse_methods, simulate
from atoll.peer.lab.simulation_report import Network, ddp_bytes, rows, utilisation, wall_s
from atoll.peer.lab.simulation_settings import Settings
from support.small_runs import TINY, command

MBIT = 125_000  # bytes: a second at 1 Mbit/s


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    for number in range(40):
        words = " ".join(f"word{(number * i) % 17} and {i}" for i in range(120))
        (folder / f"{number}.txt").write_text(words)
    return folder


@pytest.fixture(scope="module")
def settings(text):
    return Settings(
        workers=2,
        tokens=2 * 2 * 16 * 12,
        inner_steps=3,
        batch_size=2,
        seq_len=16,
        overrides=TINY,
        source=str(text),
        points=3,
        valid_batches=1,
    )


@pytest.fixture(scope="module")
def bench(settings):
    torch.set_num_threads(1)
    return Bench(settings)


def slow(mbit_s: float) -> Network:
    return Network(mbit_s=mbit_s, step_s=1.0, latency_s=0.0)


def test_a_worker_that_waits_adds_every_transfer():
    assert wall_s([(2, MBIT), (4, 2 * MBIT)], 4, 0, slow(1.0)) == [1.0, 3.0, 4.0, 7.0]


def test_a_transfer_that_ends_in_time_is_hidden():
    assert wall_s([(2, 2 * MBIT)], 5, 2, slow(1.0)) == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_a_transfer_that_is_late_stalls_when_it_is_due():
    assert wall_s([(1, 4 * MBIT)], 4, 2, slow(1.0)) == [1.0, 2.0, 5.0, 6.0]


def test_one_link_carries_one_reduction_after_the_other():
    """The second is due at step 4, and begins at 3 s, when the first has ended."""
    times = wall_s([(1, 2 * MBIT), (2, 3 * MBIT)], 5, 2, slow(1.0))
    assert times == [1.0, 2.0, 3.0, 6.0, 7.0]


def test_latency_counts_once_a_reduction():
    network = Network(mbit_s=1.0, step_s=1.0, latency_s=0.5)
    assert wall_s([(1, MBIT)], 2, 0, network) == [2.5, 3.5]


def test_ring_sends_twice_the_gradient_less_ones_own_share():
    assert ddp_bytes(params=10, workers=4, steps=3) == 3 * 2 * 3 * 20 // 4
    assert ddp_bytes(params=10, workers=1, steps=3) == 0


def test_what_a_spec_leaves_open_follows_the_run(settings):
    ddp, diloco, given, eager, muloco = parse_methods(
        "ddp, diloco, diloco(lr=0.1, codec=topk(k=8)+2bit), eager(peers=5), muloco", settings
    )
    assert ddp.spec == "ddp(clip_norm=1.0)"
    lr, momentum = outer_defaults(settings.steps // 3, 3, 2)
    assert (diloco.lr, diloco.momentum) == (lr, momentum)
    assert (given.lr, given.momentum) == (0.1, momentum)
    assert eager.peers == 5
    assert muloco == methods.parse("muloco")


@pytest.mark.parametrize(
    "change", [{"workers": 0}, {"tokens": 10}, {"points": 0}, {"inner_steps": 0}]
)
def test_nothing_to_train_is_refused(settings, change):
    with pytest.raises(SetupError, match="expected"):
        replace(settings, **change)


def run_to_end(simulation: Simulation) -> None:
    while not simulation.finished:
        simulation.advance()


@pytest.mark.parametrize("spec", ["streaming(tau=1)", "demo", "noloco"])
def test_interrupted_simulation_goes_on_in_the_same_bits(bench, settings, tmp_path, spec):
    (method,) = parse_methods(spec, settings)
    whole = Simulation(bench, method, 0)
    for _ in range(7):
        whole.advance()
    folder = Folder(tmp_path, settings)
    folder.save(whole)
    resumed = Simulation(bench, method, 0)
    assert folder.resume(resumed)
    for each in (whole, resumed):
        run_to_end(each)
    assert resumed.points == whole.points
    assert resumed.sent == whole.sent
    assert torch.equal(resumed.workers[1].synced_N, whole.workers[1].synced_N)


def test_result_is_kept_and_read_again(bench, settings, tmp_path):
    (method,) = parse_methods("diloco", settings)
    folder, said = Folder(tmp_path, settings), []
    first = simulate(bench, method, seed=0, folder=folder, rerun=False, say=said.append)
    assert len(said) == settings.points == len(first.points)
    assert sum(size for _, size in first.sent) == pytest.approx(first.sent_bytes, abs=4)
    again = simulate(bench, method, seed=0, folder=folder, rerun=False, say=said.append)
    assert again == first
    assert len(said) == settings.points
    other = Folder(tmp_path, replace(settings, lr=1e-4))
    assert other.result(method, 0) is None


def test_damaged_result_is_refused(settings, tmp_path):
    (method,) = parse_methods("diloco", settings)
    folder = Folder(tmp_path, settings)
    folder._file(method, 0, "json").write_text("{}")
    with pytest.raises(SavedStateError, match="damaged"):
        folder.result(method, 0)


def test_gap_and_traffic_are_against_ddp(bench, settings, tmp_path):
    folder = Folder(tmp_path, settings)
    results = [
        simulate(bench, method, seed=seed, folder=folder, rerun=False, say=lambda _: None)
        for method in parse_methods("ddp, sparseloco", settings)
        for seed in range(2)
    ]
    ddp, sparse = rows(results, settings)
    assert (ddp.gap_to_ddp, ddp.seeds) == (0.0, 2)
    assert ddp.traffic_ratio_vs_bf16_ddp == pytest.approx(1.0, rel=0.05)
    assert sparse.traffic_ratio_vs_bf16_ddp > 20
    assert sparse.gap_to_ddp == pytest.approx(sparse.valid_loss / ddp.valid_loss - 1)
    assert sparse.bytes_per_token == pytest.approx(2 * results[2].sent_bytes / settings.tokens)
    assert utilisation(results[2].sent, settings.steps, 0, slow(1.0)) < 1
    lines = simulation_report.table(results, settings, step_s=0.05)
    assert [line.split()[0] for line in lines] == ["method", "ddp(clip_norm=1.0)", "sparseloco"]
    picture = tmp_path / "curves.png"
    simulation_plot.draw(results, settings, picture, step_s=0.05)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_command_prints_a_table_and_json(text, tmp_path, capsys):
    assert cli.main(command(text, tmp_path, "--plot", str(tmp_path / "a.png"))) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("method")
    assert "step 6 of 6" in shown.err
    assert (tmp_path / "a.png").exists()
    assert cli.main(command(text, tmp_path, "--json")) == 0
    told = json.loads(capsys.readouterr().out)
    assert [row["method"] for row in told] == ["ddp", "diloco"]
    assert set(told[0]) == {
        *("method", "workers", "seeds", "valid_loss", "gap_to_ddp", "bytes_per_token"),
        *("traffic_ratio_vs_bf16_ddp", "settings"),
    }


@pytest.mark.parametrize(
    "wrong", [["--methods", "dilco"], ["--tokens", "3"], ["--set", "dim=big"], ["--seeds", "0"]]
)
def test_wrong_arguments_are_bad_input(text, tmp_path, capsys, wrong):
    assert cli.main(command(text, tmp_path, *wrong)) == cli.BAD_INPUT
    assert "expected" in capsys.readouterr().err
