"""Predictions for pipelines: what a token costs on each link, and which stage binds."""

import itertools
import json
from dataclasses import replace

import pytest

from atoll.coordinator.run.spec import RunSpec
from atoll.optim.state.layout import Layout
from atoll.peer.cli import main as cli
from atoll.peer.cli.main import main
from atoll.peer.lab.plan import PlanError, Setting
from atoll.peer.lab.stage_plan import (
    HEADER_BYTES,
    WIRE_OVERHEAD,
    compute_s,
    loads_of,
    predict_pipeline,
    spread,
)
from atoll.peer.training.opening import build_stage
from atoll.peer.training.permission import Allowed

SETTING = Setting(peers=6, mbit_s=1e4, rtt_s=0.0, step_s=1.0)
PLENTY = replace(SETTING, mbit_s=1e5)


def spec_of(stages=3, **topology):
    return RunSpec.from_dict(
        {
            "model": {"overrides": {"num_layers": 4}},
            "data": {"seq_len": 64},
            "inner": {"batch_size": 4, "grad_accumulation": 4},
            "topology": {"stages": stages} | topology,
        }
    )


def test_a_link_carries_the_exact_frames_and_the_ids():
    cost = predict_pipeline(spec_of(gradients="bf16"), SETTING)
    rows, width, sequences = 4 * 64, 192, 4
    out = rows * (2 + width) + 4 * (rows + sequences) + HEADER_BYTES
    back = rows * 2 * width + HEADER_BYTES
    assert cost.forward_bytes_per_token == pytest.approx(WIRE_OVERHEAD * out / rows)
    assert cost.backward_bytes_per_token == pytest.approx(WIRE_OVERHEAD * back / rows)


def test_ends_of_a_pipeline_send_half_of_what_its_middle_does():
    assert loads_of(3, 5.0, 3.0) == [(5.0, 3.0), (8.0, 8.0), (3.0, 5.0)]
    assert loads_of(2, 5.0, 3.0) == [(5.0, 3.0), (3.0, 5.0)]
    # What one stage sends, its neighbours receive.
    for stages in (2, 5):
        up, down = zip(*loads_of(stages, 5.0, 3.0), strict=True)
        assert sum(up) == sum(down) == 8.0 * (stages - 1)


def test_params_of_a_stage_are_those_that_its_peers_build():
    spec = spec_of()
    cost = predict_pipeline(spec, SETTING)
    for stage in cost.stages:
        built = build_stage(spec, stage.name, 256, Allowed())
        assert stage.params == Layout.of(built).numel
        assert list(built.indices) == list(range(stage.first_slice, stage.last_slice + 1))


def test_stages_share_a_step_and_all_but_the_last_compute_forward_twice():
    token_s = compute_s([2, 1, 1], 8.0)
    assert token_s == pytest.approx([4 * 4 / 3, 2 * 4 / 3, 2.0])
    assert sum(compute_s([1, 0], 3.0)) == pytest.approx(4.0)


def test_peers_go_where_the_slowest_stage_is():
    assert spread(3, [1.0, 9.0, 1.0]) == [1, 1, 1]
    assert spread(5, [1.0, 3.0, 1.0]) == [1, 3, 1]
    for peers, token_s in itertools.product((4, 5, 7), ([1.0, 2.0], [3.0, 1.0, 1.5])):
        best = min(
            max(s / n for s, n in zip(token_s, counts, strict=True))
            for counts in itertools.product(range(1, peers), repeat=len(token_s))
            if sum(counts) == peers
        )
        counts = spread(peers, token_s)
        assert sum(counts) == peers
        assert max(s / n for s, n in zip(token_s, counts, strict=True)) == best
    with pytest.raises(PlanError, match="expected at least 3 peers, one a stage, got 2"):
        spread(2, [1.0] * 3)


def test_a_fast_link_leaves_the_compute_and_a_slow_one_binds():
    fast = predict_pipeline(spec_of(), PLENTY)
    assert fast.binds.bound == "compute"
    assert fast.tokens_per_s == fast.binds.compute_tokens_per_s
    slow = predict_pipeline(spec_of(), replace(SETTING, mbit_s=1.0))
    assert slow.binds.bound == "link" and slow.binds.name == "stage-2"
    assert slow.tokens_per_s == slow.binds.link_tokens_per_s
    narrow = predict_pipeline(
        spec_of(activations="int4", gradients="int4"), replace(SETTING, mbit_s=1.0)
    )
    assert 1.7 < narrow.tokens_per_s / slow.tokens_per_s < 2


def test_a_pipeline_of_equal_stages_idles_as_gpipe_does():
    """(S - 1) / (M + S - 1) of the time, if the way is that of the stages' computing alone."""
    spec, setting = spec_of(stages=2), replace(PLENTY, peers=2, mbit_s=1e6)
    cost = predict_pipeline(spec, setting)
    used = cost.waiting_tokens_per_s / cost.tokens_per_s
    assert 4 / (4 + 2) < used < 4 / (4 + 2 - 1)


def test_latency_costs_a_step_and_not_the_bound():
    near, far = (predict_pipeline(spec_of(), replace(PLENTY, rtt_s=rtt)) for rtt in (0.0, 0.1))
    assert near.tokens_per_s == far.tokens_per_s
    assert far.way_s - near.way_s == pytest.approx(2 * 3 * 0.1)
    assert far.waiting_tokens_per_s < near.waiting_tokens_per_s


@pytest.fixture
def run_toml(tmp_path):
    path = tmp_path / "RUN.toml"
    path.write_text(
        "[model]\noverrides = { num_layers = 4 }\n[inner]\nbatch_size = 4\n"
        "grad_accumulation = 4\n[topology]\nstages = 3\n"
    )
    return str(path)


def test_the_plan_of_a_pipeline_is_a_table_of_stages(run_toml, capsys):
    assert main(["plan", run_toml, "--peers", "6", "--mbit", "25", "--step-ms", "400"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith("nano, 1.87M parameters in 3 stages; 6 peers, 25 Mbit/s, 50 ms")
    rows = [line for line in told if line.startswith("stage-")]
    assert [row.split()[:4] for row in rows] == [
        ["stage-1", "0", "to", "2"],
        ["stage-2", "3", "to", "3"],
        ["stage-3", "4", "to", "5"],
    ]
    assert sum(row.endswith("binds") for row in rows) == 1
    text = " ".join(told)
    assert "A token crosses 2 links" in text and "binds, by its" in text
    assert max(map(len, told)) <= 80


def test_the_plan_of_an_uneven_cut_puts_peers_where_the_work_is():
    cost = predict_pipeline(spec_of([["slices.0.*"], ["slices.[1-4].*"], ["slices.5.*"]]), PLENTY)
    assert [(each.first_slice, each.last_slice) for each in cost.stages] == [(0, 0), (1, 4), (5, 5)]
    assert [stage.peers for stage in cost.stages] == [1, 4, 1]
    assert cost.binds.name == "stage-2" and cost.stages[1].params > 9 * cost.stages[2].params


def test_the_plan_of_a_pipeline_as_json(run_toml, capsys):
    words = ["plan", run_toml, "--peers", "3", "--mbit", "5", "--step-ms", "400", "--json"]
    assert main(words) == 0
    told = json.loads(capsys.readouterr().out)["pipeline"]
    assert (told["binds"], told["bound"]) == ("stage-2", "link")
    assert [stage["peers"] for stage in told["stages"]] == [1, 1, 1]


@pytest.mark.parametrize(
    ("model", "stages", "words", "expected"),
    [
        ("", 6, "--peers 2", "one a stage, got 2"),
        ("custom = 'a:b'", 6, "--peers 6", "with --step-ms"),
        ("overrides = { num_layers = 0 }", 6, "--peers 6 --step-ms 1", "num_layers"),
        ("", [["*embed*"], ["*head*"]], "--peers 6 --step-ms 1", "no pattern matches slices.1."),
    ],
)
def test_a_pipeline_that_cannot_be_planned_is_bad_input(
    tmp_path, capsys, model, stages, words, expected
):
    path = tmp_path / "RUN.toml"
    path.write_text(f"[model]\n{model}\n[topology]\nstages = {stages}\n")
    assert main(["plan", str(path), "--mbit", "5", *words.split()]) == cli.BAD_INPUT
    assert expected in capsys.readouterr().err
