"""The results of `scripts/bench_rivals.py`: rates of other systems, what is compared, the page."""

import asyncio
import contextlib
import socket

import bench_rivals
import pipeline_lab
import pipeline_others
import pipeline_rivals
import pipeline_star
import pytest
import torch


def row(system="ours", codec="int8", case="undisturbed", **changes):
    fields = {"mbit": 25.0, "rtt_ms": 50.0, "tokens_per_s": 3000.0, "seconds": 20.0}
    fields |= {"link_use": 0.7, "dropped": 0.01, "busy_cores": 1.0}
    return bench_rivals.Row(system=system, codec=codec, case=case, **(fields | changes))


def test_a_rate_counts_what_was_finished_after_the_first_mark():
    steps = [[(10.0, 100), (20.0, 100), (30.0, 100)], [(5.0, 100), (15.0, 100)], [(1.0, 7)]]
    assert pipeline_others.rate(steps) == pytest.approx(10.0 + 10.0)


def test_rows_are_compared_in_the_same_case_at_the_same_link(tmp_path):
    page, saved = tmp_path / "page.md", tmp_path / "saved.json"
    page.write_text("Before.\n{}\nold\n{}\nAfter.\n".format(*bench_rivals.MARKS))
    origin = {"date": "2026-01-01", "commit": "abc"}
    each = (
        row(),
        row(codec="int4", tokens_per_s=9.0),
        row("GPipe", "bf16", tokens_per_s=1500.0),
        row(mbit=10.0, tokens_per_s=1.0),
    )
    for one in each:
        rows = [bench_rivals.asdict(one) | origin]
        bench_rivals.save({"machine": "One", "rows": rows}, saved, page)
    text = page.read_text()
    assert "| undisturbed, 25 Mbit/s, 50 ms | GPipe, bf16 | 1,500 | 2.00 |" in text
    assert "| undisturbed, 10 Mbit/s, 50 ms | ours, int8 | 1 |  |" in text
    assert "old" not in text and text.rstrip().endswith("After.")


def test_the_slow_peer_is_the_one_that_is_killed_elsewhere():
    factors = bench_rivals.SLOW_PEER.factors
    assert factors[bench_rivals.STRUCK - 1] == bench_rivals.SLOW_FACTOR
    assert (bench_rivals.STRUCK - 1) % bench_rivals.EQUAL.stages == 1


@pytest.fixture
def stages(tmp_path, monkeypatch):
    """The bench's slices, which wait for no time."""
    (tmp_path / "paced.py").write_text(pipeline_lab.MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(pipeline_lab.PACE, "0")


def gradient_in_one_piece(tokens_BT):
    """The gradient of the last stage's head, computed without frames."""
    x_BTD = tokens_BT[:, :-1]
    models = [pipeline_rivals.slice_of(n) for n in range(pipeline_rivals.STAGES)]
    for model in models:
        x_BTD = model(x_BTD)
    pipeline_rivals.loss_of(x_BTD, tokens_BT[:, 1:]).backward()
    return models


@pytest.mark.usefixtures("stages")
def test_a_star_of_trainers_computes_what_the_model_in_one_piece_does(monkeypatch):
    monkeypatch.setattr(pipeline_star, "CODEC", "fp32")
    tokens_BT = torch.randint(256, (pipeline_lab.BATCH, pipeline_lab.SEQ_LEN + 1))
    torch.manual_seed(1)
    whole = gradient_in_one_piece(tokens_BT)

    async def one_microbatch():
        with socket.create_server(("127.0.0.1", 0)) as free:
            monkeypatch.setattr(pipeline_star, "PORT", free.getsockname()[1])
        uplink = pipeline_star.Uplink()
        addresses = [f"127.0.0.{n + 1}" for n in range(pipeline_rivals.STAGES)]
        torch.manual_seed(1)
        servers = [pipeline_star.Server(n, uplink) for n in range(pipeline_rivals.STAGES)]
        async with contextlib.AsyncExitStack() as stack:
            for server, address in zip(servers, addresses, strict=True):
                listening = await asyncio.start_server(server.serve, address, pipeline_star.PORT)
                await stack.enter_async_context(listening)
            trainer = pipeline_star.Trainer(addresses, uplink)
            await trainer.lead(tokens_BT.int())
            await trainer.close()
        return servers

    servers = asyncio.run(one_microbatch())
    for model, server in zip(whole, servers, strict=True):
        for mine, its in zip(model.parameters(), server.model.parameters(), strict=True):
            torch.testing.assert_close(its.grad, mine.grad)
