"""Which method is taken, and what `atoll plan` and `atoll init` say and write."""

import json
from pathlib import Path

import pytest
from torch import nn

from atoll.coordinator.spec import RunSpec, template
from atoll.optim import methods
from atoll.peer import advice, cli
from atoll.peer.advice import GAP_TO_DILOCO, Option, gap_of, pick, runs_over_network
from atoll.peer.plan import Prediction, Setting, bare_model

ROOT = Path(__file__).resolve().parents[2]


def option(spec="diloco", inner_steps=10, gap=0.02, utilisation=0.9, sent=1_000, runs=True):
    cost = Prediction(
        spec=spec,
        inner_steps=inner_steps,
        sent_bytes=sent,
        wire_bytes=sent,
        round_s=1.0,
        lost_s=1.0,
        utilisation=utilisation,
        steps_per_s=1.0,
        memory_bytes=1,
    )
    return Option(prediction=cost, method=spec, gap=gap, runs=runs)


def test_idle_time_weighs_against_loss():
    short = option(inner_steps=10, gap=0.02, utilisation=0.5)
    long = option(inner_steps=50, gap=0.05, utilisation=0.95)
    assert pick([short, long]) is long
    assert pick([option(gap=0.02, utilisation=0.93), long]).gap == 0.02


def test_traffic_decides_between_equals():
    dear, cheap = option(sent=2_000), option(sent=1_000, gap=0.021)
    assert pick([dear, cheap]) is cheap


def test_what_does_not_run_or_was_not_measured_is_never_taken():
    taken = option(gap=0.5, utilisation=0.1)
    assert pick([option(runs=False), option(gap=None), taken]) is taken
    with pytest.raises(ValueError, match="expected an option"):
        pick([option(runs=False)])


def gap(spec: str, inner_steps: int) -> float | None:
    return gap_of(methods.parse(spec), inner_steps)


def test_gap_goes_through_what_was_measured():
    assert gap("diloco", 1) == pytest.approx(0.0)
    assert gap("diloco", 25) == pytest.approx(0.039)
    assert gap("diloco", 1_000) == pytest.approx(0.063)
    assert 0.039 < gap("diloco(lr=0.8, momentum=0.3)", 30) < 0.053
    assert gap("sparseloco(average=senders)", 25) == pytest.approx(1.039 * 1.056 - 1)
    assert gap("ddp(clip_norm=1.0)", 1) == 0.0
    assert gap("dlion", 1) > 0.3


@pytest.mark.parametrize("spec", ["diloco(codec=2bit)", "eager", "sparseloco", "streaming"])
def test_what_was_not_measured_has_no_gap(spec):
    assert gap(spec, 30) is None


def test_tables_are_those_of_the_benchmarks():
    rows = json.loads((ROOT / "docs/benchmarks/outer.json").read_text()).values()
    long = [row for row in rows if row["settings"]["steps"] == 1600]
    (base,) = [row["valid_loss"] for row in long if row["settings"]["method"] == "adamw"]
    gaps = {r["settings"]["inner_steps"]: r["valid_loss"] / base - 1 for r in long}
    for inner_steps, gap in advice.GAP_BY_WINDOW[1:]:
        assert gap == pytest.approx(gaps[inner_steps], abs=0.001)

    rows = json.loads((ROOT / "docs/benchmarks/methods.json").read_text())
    for seeds, specs in ((3, ("ddp", "muloco")), (1, ("streaming", "sparseloco"))):
        same = [r for r in rows if r["settings"]["inner_steps"] == 20 and r["seeds"] == seeds]
        same = [r for r in same if not r["settings"].get("inner") and "int4" not in str(r)]
        losses = {row["method"]: row["valid_loss"] for row in same}
        for name in specs:
            (row,) = [r for r in GAP_TO_DILOCO if r.split("(")[0] == name and "2bit" not in r]
            gap = losses[name] / losses["diloco"] - 1
            assert GAP_TO_DILOCO[row] == pytest.approx(gap, abs=0.001)


def test_every_measured_method_can_be_planned():
    model = bare_model(RunSpec())
    known = advice.options(model, Setting(peers=4, mbit_s=100.0, step_s=0.1))
    assert {option.method for option in known} == set(GAP_TO_DILOCO)
    assert pick(known).runs


def test_what_does_not_fit_the_model_or_the_window_is_left_out():
    setting = Setting(peers=4, mbit_s=100.0, step_s=0.1)
    whole = {option.method for option in advice.options(nn.Linear(8, 8), setting)}
    assert set(GAP_TO_DILOCO) - whole == {"streaming(tau=2)"}
    short = advice.options(bare_model(RunSpec()), setting, windows=(1,))
    assert set(GAP_TO_DILOCO) - {option.method for option in short} == {"streaming(tau=2)"}


@pytest.mark.parametrize("spec", GAP_TO_DILOCO)
def test_what_runs_is_what_a_run_toml_takes(spec):
    """The fields that are written name the method that was meant."""
    method = methods.parse(spec)
    inner_steps = 1 if method.every_step else 7
    assert runs_over_network(spec)
    run = RunSpec.from_dict(advice.as_run(spec, inner_steps))
    assert run.outer.inner_steps == inner_steps
    assert advice.measured_as(run.method()) == spec


def picked(mbit_s: float, step_s: float) -> Prediction:
    model = bare_model(RunSpec.from_dict({"model": {"preset": "mini"}}))
    setting = Setting(peers=4, mbit_s=mbit_s, step_s=step_s)
    return pick(advice.options(model, setting)).prediction


def test_slow_links_and_fast_steps_get_longer_windows():
    windows = [picked(mbit_s, 1.0).inner_steps for mbit_s in (1.0, 100.0, 10_000.0)]
    assert windows == sorted(windows, reverse=True)
    assert windows[0] > windows[-1]
    assert picked(100.0, 10.0).inner_steps < picked(100.0, 0.05).inner_steps


def run(*words: str) -> int:
    return cli.main(list(words))


@pytest.fixture
def run_toml(tmp_path):
    path = tmp_path / "RUN.toml"
    path.write_text("[outer]\ninner_steps = 25\n[compression]\ncodec = 'int4'\n")
    return str(path)


def test_plan_as_a_table(run_toml, capsys):
    assert run("plan", run_toml, "--peers", "8", "--mbit", "100", "--step-ms", "60") == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith("nano, 0.935M parameters; 8 peers, 100 Mbit/s")
    assert "60 ms (as given)" in told[0]
    (mine,) = [line for line in told if line.endswith("this run")]
    assert mine.split()[:3] == ["diloco(codec=int4)", "25", "0.87"]
    assert [line.split(maxsplit=1)[0] for line in told if line].count("diloco(codec=int4)") == 1
    assert told[-1].startswith("Take ")


def test_plan_as_json(run_toml, capsys):
    words = ("plan", run_toml, "--peers", "4", "--mbit", "50", "--step-ms", "60", "--all", "--json")
    assert run(*words) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["params"] == 934_848
    assert told["this_run"]["prediction"]["inner_steps"] == 25
    assert told["this_run"]["prediction"]["sent_bytes"] == 745_227
    assert {each["method"] for each in told["options"]} == set(GAP_TO_DILOCO)
    assert told["recommended"]["runs"] is True
    assert told["step_measured"] is False


def test_plan_times_a_step(run_toml, capsys):
    assert run("plan", run_toml, "--peers", "2", "--mbit", "50", "--device", "cpu", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["step_measured"] is True
    assert told["setting"]["step_s"] > 0


@pytest.mark.parametrize(
    "wrong",
    [("--peers", "0"), ("--mbit", "0"), ("--step-ms", "0"), ("--cores", "0"), ("--rtt-ms", "-1")],
)
def test_impossible_plans_are_bad_input(run_toml, capsys, wrong):
    words = ["plan", run_toml, "--peers", "4", "--mbit", "50", "--step-ms", "60", *wrong]
    assert run(*words) == cli.BAD_INPUT
    assert "expected" in capsys.readouterr().err


def test_init_chooses_for_peers_and_links(tmp_path, capsys):
    path = tmp_path / "RUN.toml"
    words = ("--peers", "8", "--mbit", "100", "--model", "30m", "--step-ms", "200")
    assert run("init", str(path), *words) == 0
    assert "Take " in capsys.readouterr().out
    spec = RunSpec.load(path)
    assert spec.model.preset == "30m"
    chosen = picked_for_30m()
    assert spec.outer.inner_steps == chosen.prediction.inner_steps
    assert advice.measured_as(spec.method()) == chosen.method


def picked_for_30m() -> Option:
    model = bare_model(RunSpec.from_dict({"model": {"preset": "30m"}}))
    return pick(advice.options(model, Setting(peers=8, mbit_s=100.0, step_s=0.2)))


def test_init_without_options_is_the_plain_template(tmp_path):
    path = tmp_path / "RUN.toml"
    assert run("init", str(path)) == 0
    assert path.read_text() == template()


@pytest.mark.parametrize("words", [("--peers", "4"), ("--mbit", "10")])
def test_init_wants_peers_and_rate_together(tmp_path, capsys, words):
    path = tmp_path / "RUN.toml"
    assert run("init", str(path), *words) == cli.BAD_INPUT
    assert "together" in capsys.readouterr().err
    assert not path.exists()
