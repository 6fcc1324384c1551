"""The results of `scripts/bench_activations.py`: what is trained, and what the tables say."""

import bench_activations
import pipeline_losses
import pytest
import torch

DENSE = bench_activations.named(*bench_activations.TO_LOSS[0])


def row(table="codecs", name="fp32", size="0.93M", seed=0, **changes):
    fields = {"table": table, "name": name, "size": size, "seed": seed, "tokens": 1000}
    fields |= {"steps": 10, "loss": 2.0, "bytes_per_token": [512, 512], "cpu_s": 1.0}
    return fields | {"date": "2026-01-01", "commit": "abc"} | changes


def setting(**changes):
    fields = {"size": "0.25M", "seed": 0, "steps": pipeline_losses.WINDOW, "lr": 3e-3}
    return pipeline_losses.Setting(**(fields | changes))


def params_of(training):
    return [
        torch.cat([param.detach().flatten() for param in peer.compute.model.parameters()])
        for stage in training._stages
        for peer in stage
    ]


def test_models_have_the_sizes_that_their_names_say():
    for name, size in pipeline_losses.SIZES.items():
        assert f"{sum(size.slices().num_params) / 1e6:.2f}M" == name


def test_stages_begin_as_the_model_in_one_piece_and_give_its_loss():
    whole, cut = (pipeline_losses.Training(setting(stages=n)) for n in (1, 4))
    assert cut.held_out(1) == pytest.approx(whole.held_out(1), rel=1e-6)


def test_each_peer_of_a_stage_gets_as_many_microbatches():
    training = pipeline_losses.Training(setting(peers=2))
    routes = list(training._routes())
    assert len(routes) == pipeline_losses.MICROBATCHES
    for stage in range(4):
        assert sorted(route[stage] for route in routes) == [0, 0, 1, 1]


def test_fixed_paths_never_cross():
    training = pipeline_losses.Training(setting(peers=2, mixes=False))
    assert {tuple(route) for route in training._routes()} == {(0,) * 4, (1,) * 4}


def test_the_peers_of_a_stage_agree_after_a_window_and_not_within():
    training = pipeline_losses.Training(setting(peers=2))
    training.step()
    first, second, *_ = params_of(training)
    assert not torch.equal(first, second)
    while training.steps < pipeline_losses.WINDOW:
        training.step()
    found = params_of(training)
    for one, other in zip(found[::2], found[1::2], strict=True):
        assert torch.equal(one, other)


def test_all_cases_differ_and_a_fixed_loss_comes_first():
    keys = [case.key for case in bench_activations.cases()]
    assert len(keys) == len(set(keys))
    tables = [table for table, *_ in keys]
    assert set(tables) == set(bench_activations.TABLES)
    for seed in bench_activations.SEEDS:
        steps = [name for table, name, _, of in keys if (table, of) == ("steps", seed)]
        assert steps[0] == DENSE


def test_losses_are_compared_over_the_seeds_that_both_have():
    rows = [row(loss=2.0), row(name="int8", loss=2.2), row(name="int8", seed=1, loss=9.0)]
    table = bench_activations.codec_table(rows)
    assert "| int8 | 512 + 512 | 0.5x | 2.2000 | 9.0000 | +10.0% |" in table


def test_a_loss_that_is_not_reached_is_said_to_be_so():
    name = bench_activations.named(*bench_activations.TO_LOSS[1])
    rows = [row("steps", DENSE), row("steps", name, steps=None, loss=2.5)]
    assert "not in 40 (2.5000)" in bench_activations.steps_table(rows)
    case = bench_activations.of_codec("steps", *bench_activations.TO_LOSS[1])
    assert bench_activations.target_of(rows, case) == 2.0


def test_the_loss_on_the_way_is_a_mean_of_the_newest_looks():
    assert bench_activations.smooth([(1, 9.0), (2, 1.0), (3, 2.0), (4, 3.0)]) == 2.0


def test_rows_are_saved_with_the_tables_of_the_page(tmp_path):
    page, saved = tmp_path / "page.md", tmp_path / "saved.json"
    page.write_text("Before.\n{}\nold\n{}\nAfter.\n".format(*bench_activations.MARKS))
    bench_activations.save([row()], saved, page)
    assert bench_activations.load(saved) == [row()]
    text = page.read_text()
    assert "| fp32 | 512 + 512 |" in text and "old" not in text and text.startswith("Before.")
