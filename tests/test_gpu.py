"""scripts/gpu.py: a dry run on the fake device, what is kept of it, and the page."""

import json

import pytest

gpu = pytest.importorskip("gpu", reason="needs a checkout: an sdist has no scripts")

BESIDE = ("bits", "peers")  # steps that start peers


@pytest.mark.parametrize("step", [step.name for step in gpu.STEPS if step.name not in BESIDE])
def test_a_dry_run_keeps_its_rows_and_repeats_nothing(step, tmp_path, capsys):
    words = ["--dry-run", "--out", str(tmp_path)]
    assert gpu.main([*words, "--json", "--only", step]) == 0
    (outcome,) = json.loads(capsys.readouterr().out)
    assert outcome["step"] == step and outcome["is_complete"]
    row, *_ = outcome["rows"]
    assert step != "tests" or row["skipped"] == row["tests"] > 0
    file = tmp_path / gpu.FILE
    kept = file.read_bytes()
    assert gpu.main([*words, "--only", step]) == 0
    assert file.read_bytes() == kept


@pytest.mark.exhaustive  # three processes for half a minute
@pytest.mark.timeout(240)
def test_a_dry_run_with_processes_has_equal_bits(tmp_path, capsys):
    assert gpu.main(["--dry-run", "--out", str(tmp_path), "--json", "--only", "bits"]) == 0
    (bits,) = json.loads(capsys.readouterr().out)
    assert all(check["is_met"] for check in bits["checks"])
    assert bits["rows"][-1]["rounds"] == gpu.gpu_runs.TINY_PLAN.rounds


@pytest.mark.exhaustive  # four processes for a minute
@pytest.mark.timeout(600)
def test_a_dry_run_kills_a_peer_which_comes_back(tmp_path, capsys):
    assert gpu.main(["--dry-run", "--out", str(tmp_path), "--json", "--only", "peers"]) == 0
    (peers,) = json.loads(capsys.readouterr().out)
    (row,) = peers["rows"]
    assert row["killed"] and row["recovered"] == 1
    assert all(check["is_met"] for check in peers["checks"])


def found(**changes):
    check = gpu.gpu_results.Check(name="bits", got="other", expected="equal", is_met=False)
    return gpu.Found(**({"rows": [{"a": 1}], "checks": [check]} | changes))


def session(tmp_path, **options):
    place = gpu.Place(device=gpu.gpu_steps.Device.choose("cpu"), name="card", is_dry=True)
    return gpu.Session(place, tmp_path, **({"minutes": 40.0} | options))


def step(run, name="bits"):
    return gpu.Step(name=name, minutes=1, title="a step", run=run)


def test_a_check_that_does_not_hold_is_an_exit_code(tmp_path, capsys):
    here = session(tmp_path)
    here.run([step(lambda call: found())], ())
    assert here.code == 1
    assert "NOT MET bits: other, expected equal" in capsys.readouterr().err
    again = session(tmp_path)
    again.run([step(lambda call: pytest.fail("done already"))], ())
    assert again.code == 1  # it stays one until the step is repeated
    again.run([step(lambda call: found(checks=[]))], ["bits"])
    assert again.code == 0


def test_a_failed_step_leaves_the_others_and_an_interrupted_call_its_rows(tmp_path):
    def fails(call):
        raise RuntimeError("no memory")

    def interrupted(call):
        raise KeyboardInterrupt

    here = session(tmp_path)
    steps = [step(fails, "codecs"), step(lambda call: found(checks=[])), step(interrupted, "ddp")]
    with pytest.raises(KeyboardInterrupt):
        here.run(steps, ())
    assert here.failed == ["codecs"] and here.code == 1
    assert list(gpu.Kept(tmp_path / gpu.FILE).of(gpu.commit(), "card")) == ["bits"]


def test_a_step_that_stopped_half_way_is_taken_up_again(tmp_path):
    here = session(tmp_path)
    here.run([step(lambda call: found(checks=[], is_complete=False))], ())
    assert here.code == gpu.LEFT
    again = session(tmp_path)
    again.run([step(lambda call: found(checks=[]))], ())
    assert again.code == 0 and again.outcomes["bits"].is_complete


def test_a_simulation_that_runs_out_of_time_continues_where_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu.Place, "choice", "cpu")
    place = gpu.Place(device=gpu.gpu_steps.Device.choose("cpu"), name="cpu", is_dry=True)
    settings = gpu.gpu_runs.TINY_SETTINGS
    part = gpu.gpu_runs.method(place, "diloco", settings, tmp_path, deadline_s=0.0)
    assert not part.is_complete and part.rows[0]["steps"] == 0
    whole = gpu.gpu_runs.method(place, "diloco", settings, tmp_path, deadline_s=float("inf"))
    assert whole.is_complete and whole.rows[0]["tokens"] == settings.tokens


def test_a_step_that_does_not_fit_is_left_out_and_said(tmp_path, capsys):
    words = ["--dry-run", "--out", str(tmp_path), "--minutes", "0.5", "--only", "codecs"]
    assert gpu.main(words) == gpu.LEFT
    assert "left out" in capsys.readouterr().err


def test_a_gpu_has_the_peak_of_its_own_name():
    peak = gpu.gpu_steps.peak_tflops
    assert peak("NVIDIA H100 80GB HBM3", "bfloat16") == 989
    assert peak("NVIDIA GeForce RTX 4090", "bfloat16") == 165.2
    assert peak("Tesla T4", "float16") == 65
    assert peak("NVIDIA GeForce RTX 4090 Laptop GPU", "bfloat16") is None
    assert peak("NVIDIA L4", "float32") is None


def test_the_page_is_that_of_the_kept_rows():
    text = gpu.PAGE.read_text()
    file = gpu.PAGE.with_suffix(".json")
    outcomes = gpu.Kept(file).all()
    assert gpu.gpu_results.page(text, outcomes, gpu.TITLES) == text
