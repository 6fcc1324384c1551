"""Test the recommended method, and the output of `atoll plan` and `atoll init`."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from torch import nn

from atoll.coordinator.run.spec import RunSpec, template
from atoll.optim import methods
from atoll.peer.cli import main as cli
from atoll.peer.lab import advice, measured, plan, step_time
from atoll.peer.lab.advice import RunOption, gap_of, pick, rows, runs_over_network
from atoll.peer.lab.plan import Prediction, Setting, bare_model
from atoll.peer.lab.work import Work

ROOT = Path(__file__).resolve().parents[3]
MEASURED = {row.spec: row for row in measured.METHODS}


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
    return RunOption(prediction=cost, method=spec, gap=gap, runs=runs)


def test_idle_time_weighs_against_loss():
    short = option(inner_steps=10, gap=0.02, utilisation=0.5)
    long = option(inner_steps=50, gap=0.05, utilisation=0.95)
    assert pick([short, long]) is long
    assert pick([option(gap=0.02, utilisation=0.93), long]).gap == 0.02


def test_traffic_decides_between_equals():
    dear, cheap = option(sent=2_000), option(sent=1_000, gap=0.021)
    assert pick([dear, cheap]) is cheap


def test_another_method_is_taken_only_where_it_is_clearly_better():
    plain = option(gap=0.05)
    assert pick([plain, option("muloco", gap=0.04)]) is plain
    better = option("muloco", gap=0.02)
    assert pick([plain, better]) is better
    assert pick([option("muloco", gap=0.02)]).method == "muloco"


def test_peers_are_kept_at_work_unless_that_is_clearly_worse():
    idle = option(gap=0.02, utilisation=0.9)
    assert pick([idle, option("muloco", gap=0.04, utilisation=0.96)]).method == "muloco"
    assert pick([idle, option("muloco", gap=0.06, utilisation=0.99)]) is idle
    assert pick([idle, option("muloco", gap=0.03, utilisation=0.94)]) is idle
    at_work = option(gap=0.02, utilisation=0.95)
    assert pick([at_work, option("muloco", gap=0.02, utilisation=0.99)]) is at_work


def test_what_does_not_run_or_was_not_measured_is_never_taken():
    taken = option(gap=0.5, utilisation=0.1)
    assert pick([option(runs=False), option(gap=None), taken]) is taken
    with pytest.raises(ValueError, match="no option was measured"):
        pick([option(runs=False)])


def gap(spec: str, inner_steps: int, peers: int = 4) -> float | None:
    return gap_of(methods.parse(spec), inner_steps, peers)


def test_gap_goes_by_the_peers():
    by_workers = dict(measured.GAP_BY_WORKERS["diloco"])
    of_eight = (1.0 + by_workers[8]) / (1.0 + by_workers[4])
    assert 1.0 + gap("diloco", 25, peers=8) == pytest.approx((1.0 + gap("diloco", 25)) * of_eight)
    assert gap("diloco", 25, peers=2) < gap("diloco", 25) < gap("diloco", 25, peers=6)
    assert gap("diloco", 25, peers=100) == gap("diloco", 25, peers=8)
    assert gap("ddp", 1, peers=8) == gap("ddp", 1)


def test_every_method_was_measured_with_several_numbers_of_workers():
    assert {row.method.name for row in rows()} <= set(measured.GAP_BY_WORKERS)
    counts = [[workers for workers, _ in gaps] for gaps in measured.GAP_BY_WORKERS.values()]
    assert all(each == [1, 2, 4, 8] for each in counts)


def test_gap_goes_through_what_was_measured():
    by_window = dict(measured.GAP_BY_WINDOW)
    assert gap("diloco", 1) == pytest.approx(0.0)
    assert gap("diloco", 25) == pytest.approx(by_window[25])
    assert gap("diloco", 1_000) == pytest.approx(by_window[100])
    assert by_window[25] < gap("diloco(lr=0.8, momentum=0.3)", 30) < by_window[50]
    worse = 1 + MEASURED["diloco(codec=2bit)"].to_diloco
    together = (1 + by_window[25]) * worse - 1
    assert gap("diloco(codec=2bit)", 25) == pytest.approx(together)
    assert gap("ddp(clip_norm=1.0)", 1) == 0.0
    assert gap("dlion", 1) == pytest.approx(MEASURED["dlion"].to_ddp)


@pytest.mark.parametrize("spec", ["diloco(codec=nf4)", "sparseloco(tau=3)", "streaming"])
def test_what_was_not_measured_has_no_gap(spec):
    assert gap(spec, 30) is None


def test_sparse_methods_are_not_trusted_with_longer_windows():
    longest = MEASURED["sparseloco"].inner_steps
    assert gap("sparseloco", longest) is not None
    assert gap("sparseloco", longest + 1) is None
    assert gap("diloco(codec=2bit)", 1_000) is not None


def test_a_delay_is_not_trusted_where_it_is_a_larger_share_of_the_window():
    row = MEASURED["streaming(tau=2)"]
    assert gap("streaming(tau=2)", row.inner_steps) is not None
    assert gap("streaming(tau=2)", 100) is not None
    assert gap("streaming(tau=2)", row.inner_steps - 1) is None


def test_the_best_of_rows_with_other_constants_and_feedback_contends():
    contenders = advice.contenders()
    assert {"eager", "eager(lr=0.5, momentum=0.0)"} <= set(MEASURED)
    assert "eager(lr=0.5, momentum=0.0)" in contenders and "eager" not in contenders
    assert {"diloco", "diloco(codec=2bit)", "sparseloco(tau=15)"} <= set(contenders)


def test_a_step_of_muon_costs_what_its_products_take():
    """One matrix of 8 x 24: 5 (4 8 8 24 + 2 8 8 8) operations beside 6 x 192 a token."""
    model = nn.Linear(24, 8, bias=False)
    setting = Setting(peers=4, mbit_s=100.0, step_s=0.1)
    slowed = advice.slowed_by(methods.parse("muloco"), model, setting, 64)
    assert slowed == pytest.approx(1 + 5 * (4 * 8 * 8 * 24 + 2 * 8**3) / (6 * 192 * 64))
    timed = replace(setting, muon_step_s=0.25)
    assert advice.slowed_by(methods.parse("muloco"), model, timed, 64) == pytest.approx(2.5)
    assert advice.slowed_by(methods.parse("diloco"), model, timed, 64) == 1.0


def test_a_costly_inner_optimizer_counts_as_idle_time_does():
    plain, better = option(gap=0.05), option("muloco", gap=0.0)
    assert pick([plain, better]) is better
    assert pick([plain, replace(better, slowed=2.0)]) is plain


def test_a_run_takes_the_rate_that_its_inner_optimizer_wants():
    plain = RunSpec().inner.lr
    for spec, share in (("diloco", 1.0), ("muloco", 2.0), ("dlion", 0.1)):
        run = RunSpec.from_dict(advice.as_run(spec, 1))
        assert run.inner.lr == pytest.approx(share * plain)


def test_the_table_is_what_the_benchmarks_hold():
    """Rows that are measured later may be missing; `scripts/measured.py --write` takes them in."""
    rows = json.loads((ROOT / "docs/benchmarks/methods.json").read_text())
    for mine in measured.METHODS:
        same = [
            row
            for row in rows
            if row["method"] == methods.parse(mine.spec).name
            and row["seeds"] == mine.seeds
            and all(row["settings"][k] == getattr(mine, k) for k in ("params", "tokens"))
        ]
        gaps = [row["gap_to_ddp"] for row in same]
        assert any(gap == pytest.approx(mine.to_ddp, abs=1e-4) for gap in gaps), mine.spec


def test_the_table_by_windows_is_what_the_benchmarks_hold():
    rows = json.loads((ROOT / "docs/benchmarks/outer.json").read_text()).values()
    long = [row for row in rows if row["settings"]["steps"] == 1600]
    (base,) = [row["valid_loss"] for row in long if row["settings"]["method"] == "adamw"]
    gaps = {r["settings"]["inner_steps"]: r["valid_loss"] / base - 1 for r in long}
    for inner_steps, gap in measured.GAP_BY_WINDOW[1:]:
        assert gap == pytest.approx(gaps[inner_steps], abs=1e-4)


@pytest.fixture
def untimed(monkeypatch):
    """Let all arithmetic take the same time: timing that of each method takes seconds."""
    work = Work(
        offer_s=4e-9,
        owner_s=6e-9,
        owner_more_s=1e-9,
        receiver_s=2e-9,
        receiver_more_s=0.0,
        apply_s=1e-9,
    )
    monkeypatch.setattr(plan, "timed", lambda method: work)


@pytest.mark.usefixtures("untimed")
def test_every_measured_method_can_be_planned():
    model = bare_model(RunSpec())
    setting = Setting(peers=4, mbit_s=100.0, step_s=0.1)
    known = advice.options(model, setting, step_tokens=1024, windows=(50,))
    assert {option.method for option in known} == set(advice.contenders())
    assert pick(known).runs


@pytest.mark.usefixtures("untimed")
def test_what_does_not_fit_the_model_or_the_window_is_left_out():
    setting = Setting(peers=4, mbit_s=100.0, step_s=0.1)
    options = partial(advice.options, step_tokens=1024)
    whole = {option.method for option in options(nn.Linear(8, 8), setting)}
    assert "diloco" in whole and "streaming(tau=2)" not in whole
    short = {o.method for o in options(bare_model(RunSpec()), setting, windows=(1,))}
    assert "diloco" in short and "streaming(tau=2)" not in short


@pytest.mark.parametrize("spec", MEASURED)
def test_what_runs_is_what_a_run_toml_takes(spec):
    """The fields written to RUN.toml parse to the same method."""
    method = methods.parse(spec)
    inner_steps = 1 if method.every_step else max(37, method.hidden_steps(37))
    assert runs_over_network(spec)
    run = RunSpec.from_dict(advice.as_run(spec, inner_steps))
    assert run.outer.inner_steps == inner_steps
    assert advice.measured_as(run.method()) == MEASURED[spec]


def picked(mbit_s: float, step_s: float) -> Prediction:
    model = bare_model(RunSpec.from_dict({"model": {"preset": "mini"}}))
    setting = Setting(peers=4, mbit_s=mbit_s, step_s=step_s)
    return pick(advice.options(model, setting, step_tokens=1024)).prediction


def test_slow_links_and_fast_steps_get_longer_windows():
    windows = [picked(mbit_s, 1.0).inner_steps for mbit_s in (1.0, 100.0, 10_000.0)]
    assert windows == sorted(windows, reverse=True)
    assert windows[0] > windows[-1]
    assert windows[1] < picked(100.0, 0.05).inner_steps


def run(*words: str) -> int:
    return cli.main(list(words))


@pytest.fixture
def run_toml(tmp_path):
    path = tmp_path / "RUN.toml"
    path.write_text("[outer]\ninner_steps = 25\n[compression]\ncodec = 'int4'\n")
    return str(path)


@pytest.fixture
def short_probe(monkeypatch):
    """Time a step in a twentieth of the time."""
    monkeypatch.setitem(step_time.measured.__kwdefaults__, "seconds", 0.1)


def test_plan_as_a_table(run_toml, capsys):
    assert run("plan", run_toml, "--peers", "8", "--mbit", "100", "--step-ms", "60") == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith("nano, 0.935M parameters; 8 peers, 100 Mbit/s")
    assert "60 ms (as given)" in told[0]
    (mine,) = [line for line in told if line.endswith("this run")]
    assert mine.split()[:3] == ["diloco(codec=int4)", "25", "0.87"]
    assert [line.split(maxsplit=1)[0] for line in told if line].count("diloco(codec=int4)") == 1
    assert told[-2].startswith("Take ")
    assert told[-1].startswith("Expected loss at equal time: H=")
    assert [line for line in told[1:-2] if len(line) > 80] == []


def test_a_run_with_moments_in_8_bits_is_timed(tmp_path, short_probe, capsys):
    pytest.importorskip("torchao.optim")
    path = tmp_path / "RUN.toml"
    path.write_text("[inner]\nstate = '8bit'\n")
    assert run("plan", str(path), "--peers", "4", "--mbit", "100") == 0
    assert "ms (measured on this machine" in capsys.readouterr().out


@pytest.mark.parametrize("method", ["diloco", "diloco(count=2)"])
def test_plan_of_windows_that_grow(tmp_path, capsys, method):
    path = tmp_path / "RUN.toml"
    windows = "windows = 'qsr'\ngrowth = 0.01\n"
    path.write_text(f"[run]\nrounds = 200\n[outer]\nmethod = '{method}'\n{windows}")
    assert run("plan", str(path), "--peers", "4", "--mbit", "100", "--step-ms", "60") == 0
    told = capsys.readouterr().out.splitlines()
    count = methods.parse(method).count
    timetable = RunSpec.load(path).timetable(count)
    steps = timetable.steps_until(200)
    mean = round(count * steps / 200)
    (line,) = [line for line in told if line.startswith("Windows grow")]
    grown = f"Windows grow from 44 to {timetable.window(199)} steps; the table assumes their mean"
    assert line.startswith(f"{grown} of {mean}.")
    assert line.endswith(f"200 rounds are {steps:,} steps.")
    (mine,) = [line for line in told if line.endswith("this run")]
    assert mine.split(") ")[-1].removeprefix("diloco").split()[0] == str(mean)


def test_plan_as_json(run_toml, capsys):
    words = ("plan", run_toml, "--peers", "4", "--mbit", "50", "--step-ms", "60", "--all", "--json")
    assert run(*words) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["params"] == 934_848
    assert told["this_run"]["prediction"]["inner_steps"] == 25
    assert told["this_run"]["prediction"]["sent_bytes"] == 745_227
    assert {each["method"] for each in told["options"]} == set(advice.contenders())
    assert told["recommended"]["runs"] is True
    assert told["step_measured"] is False


@pytest.mark.usefixtures("short_probe")
def test_plan_times_a_step(run_toml, capsys):
    assert run("plan", run_toml, "--peers", "2", "--mbit", "50", "--device", "cpu", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["step_measured"] is True
    assert 0 < told["setting"]["step_s"] < told["setting"]["muon_step_s"]
    muon = [each for each in told["options"] if each["method"].startswith("muloco")]
    assert {each["slowed"] for each in muon} == {
        told["setting"]["muon_step_s"] / told["setting"]["step_s"]
    }


@pytest.mark.parametrize(
    "wrong",
    [
        ("--peers", "0"),
        ("--peers", "1000000"),
        ("--mbit", "0"),
        ("--step-ms", "0"),
        ("--cores", "0"),
        ("--rtt-ms", "-1"),
    ],
)
def test_impossible_plans_are_bad_input(run_toml, capsys, wrong):
    words = ["plan", run_toml, "--peers", "4", "--mbit", "50", "--step-ms", "60", *wrong]
    assert run(*words) == cli.BAD_INPUT
    assert "expected" in capsys.readouterr().err


def test_a_model_that_a_processor_cannot_try_wants_a_step_time(tmp_path, capsys):
    words = ("--peers", "8", "--mbit", "100", "--model", "1b", "--device", "cpu")
    assert run("init", str(tmp_path / "RUN.toml"), *words) == cli.BAD_INPUT
    assert "with --step-ms" in capsys.readouterr().err


def test_init_chooses_for_peers_and_links(tmp_path, capsys):
    path = tmp_path / "RUN.toml"
    words = ("--peers", "8", "--mbit", "100", "--model", "30m", "--step-ms", "200")
    assert run("init", str(path), *words) == 0
    what, why, by_speed, left_open, wrote = capsys.readouterr().out.splitlines()
    assert "round.min_peers" in left_open
    assert what.startswith("Take ") and "200 ms (as given)" in why
    assert by_speed.startswith('outer.windows = "deadline"')
    assert wrote.startswith(f"Wrote {path}")
    spec = RunSpec.load(path)
    assert spec.model.preset == "30m"
    chosen = picked_for_30m()
    assert spec.outer.inner_steps == chosen.prediction.inner_steps
    assert spec.outer.windows == "deadline"
    assert advice.measured_as(spec.method()) == MEASURED[chosen.method]


def picked_for_30m() -> RunOption:
    spec = RunSpec.from_dict({"model": {"preset": "30m"}})
    setting = Setting(peers=8, mbit_s=100.0, step_s=0.2)
    return pick(advice.options(bare_model(spec), setting, step_tokens=spec.step_tokens))


@pytest.mark.usefixtures("short_probe")
def test_init_times_a_step_and_tells_programs_why(tmp_path, capsys):
    path = tmp_path / "RUN.toml"
    words = ("--peers", "4", "--mbit", "100", "--device", "cpu", "--json")
    assert run("init", str(path), *words) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["step_measured"] is True
    assert 0 < told["setting"]["step_s"] != 1.0
    assert len(told["why"]) == 3
    spec = RunSpec.load(path)
    assert spec.outer.inner_steps == told["chosen"]["prediction"]["inner_steps"]


@pytest.mark.usefixtures("short_probe")
@pytest.mark.parametrize(("load", "busy"), [(0.1, False), (1000.0, True)])
def test_a_step_that_was_timed_on_a_busy_machine_says_so(run_toml, capsys, monkeypatch, load, busy):
    monkeypatch.setattr("os.getloadavg", lambda: (load, load, load))
    assert run("plan", run_toml, "--peers", "2", "--mbit", "50", "--device", "cpu") == 0
    told = capsys.readouterr().out
    assert "measured on this machine" in told
    assert ("which is busy; pass --step-ms" in told) == busy


def test_one_peer_begins_alone_with_plain_settings(tmp_path, capsys):
    path = tmp_path / "RUN.toml"
    assert run("init", str(path), "--peers", "1") == 0
    assert capsys.readouterr().out.startswith("A single peer exchanges nothing: use diloco")
    spec = RunSpec.load(path)
    assert (spec.round.min_peers, spec.outer) == (1, RunSpec().outer)


def test_a_plan_for_one_peer_recommends_no_other_method(run_toml, capsys):
    assert run("plan", run_toml, "--peers", "1", "--mbit", "50", "--step-ms", "60") == 0
    assert "A single peer exchanges nothing" in capsys.readouterr().out


def test_init_without_options_is_the_plain_template(tmp_path):
    path = tmp_path / "RUN.toml"
    assert run("init", str(path)) == 0
    assert path.read_text() == template()


def test_init_leaves_what_is_there_before_it_times_anything(tmp_path, capsys):
    path = tmp_path / "RUN.toml"
    path.write_text("mine")
    assert run("init", str(path), "--peers", "8", "--mbit", "100") == cli.BAD_INPUT
    assert "was not changed" in capsys.readouterr().err
    assert path.read_text() == "mine"


@pytest.mark.parametrize("words", [("--peers", "4"), ("--mbit", "10")])
def test_init_wants_peers_and_rate_together(tmp_path, capsys, words):
    path = tmp_path / "RUN.toml"
    assert run("init", str(path), *words) == cli.BAD_INPUT
    assert "together" in capsys.readouterr().err
    assert not path.exists()
