"""The results of `scripts/bench_pipeline.py`: bounds, what is counted when, targets, the page."""

from contextlib import closing

import bench_pipeline
import pipeline_costs
import pipeline_lab
import pipeline_learning
import pipeline_vacant
import pytest

from atoll.coordinator.run.notice import told_fields
from atoll.dht.testing.wan import WanLink
from atoll.optim.log.store import LOG_FILE, LogStore, StoreHead
from atoll.peer import notices
from support.kit import Swarm

LINK = WanLink(up=10.0, down=10.0)
ORIGIN = {"date": "2026-01-01", "commit": "abc"}


def flow(counted, **changes):
    fields = {"counted": counted, "omitted": {}, "resends": 0, "double_counts": 0}
    return fields | {"waited_s": {}} | changes


def peer(name, module, counted, at, *, incarnation="a", position=1, chain="c", phase="train"):
    return {
        "name": name,
        "module": module,
        "incarnation": incarnation,
        "position": position,
        "chain": chain,
        "heard_at": at,
        "flow": flow(counted),
        "phase": phase,
    }


def row(case="10 Mbit/s, 5 ms", **changes):
    fields = {"mbit": 10.0, "rtt_ms": 5.0, "microbatches": 32, "staleness": 2, "rates": [1.0]}
    fields |= {"tokens_per_s": 900.0, "bound_tokens_per_s": 1000.0, "ratio": 0.9}
    fields |= {"binds": "link of stage 2", "waits": [{"returns": 0.4}, {}], "resends": 0}
    fields |= {
        "omitted": 0,
        "double_counts": 0,
        "link_use": 0.9,
        "dropped": 0.01,
        "busy_cores": 0.8,
    }
    return bench_pipeline.Row(case=case, **(fields | changes))


def test_an_inner_stage_sends_both_ways_and_computes_forward_again():
    first, inner, last = (
        pipeline_lab.peer_bound(n, stages=3, forward_s=0.1, link=LINK) for n in range(3)
    )
    out, back = pipeline_lab.forward_bytes(), pipeline_lab.backward_bytes()
    assert inner.link_s == pytest.approx(8e-7 * (out + back))
    assert first.link_s == last.link_s == pytest.approx(8e-7 * out)
    assert (first.compute_s, inner.compute_s) == pytest.approx((0.4, 0.4))
    assert last.compute_s == pytest.approx(0.3)
    assert (first.binds, inner.binds) == ("compute", "link")


def test_unequal_peers_add_up():
    pipeline = bench_pipeline.UNEQUAL_PEERS
    rate = pipeline_lab.stage_rate(pipeline, 1, WanLink(up=1e6, down=1e6), [2, 4, 6])
    assert rate == pytest.approx((1 + 1 / 2 + 1 / 4) / (3 * pipeline.forward_s[1]))


def test_processes_are_counted_apart_by_the_time_of_their_reports():
    looks = [
        {"peers": [peer("peer-1", "stage-1", 10, 100.0)]},
        {"peers": [peer("peer-1", "stage-1", 10, 100.0)]},
        {"peers": [peer("peer-1", "stage-1", 30, 104.0)]},
        {"peers": [peer("peer-1", "stage-1", 1, 109.0, incarnation="b")]},
    ]
    one, other = pipeline_lab.counts(looks)
    assert len(one.points) == 2 and one.rate(99, 110) == 5.0
    assert not pipeline_lab.spans(other, 99, 110)


def test_a_peer_lives_from_its_first_step_to_its_death():
    assert bench_pipeline.spells([10.0, 80.0], [60.0]) == [(10.0, 60.0), (80.0, float("inf"))]


def churned(chain="c"):
    names = [(f"peer-{n + 1}", f"stage-{n % 3 + 1}") for n in range(6)]
    looks = []
    for at in range(0, 121, 10):
        peers = [peer(*each, at, at) for each in names if each[0] != "peer-2" or at <= 60]
        peers[-1]["chain"] = chain
        peers[0]["phase"] = "wait" if at > 60 else "train"
        looks.append({"at": at, "peers": peers})
    return bench_pipeline.churn_of(
        looks,
        kills=[(2, 60.0)],
        trained={n: [0.0] for n in range(1, 7)},
        link=LINK,
        window=(0.0, 120.0),
        busy=1.0,
    )


def test_half_a_stage_could_do_half_while_its_other_peer_is_dead():
    found = churned()
    whole = bench_pipeline.ROWS * pipeline_lab.stage_rate(bench_pipeline.CHURNED, 1, LINK, [2, 5])
    assert found.living_tokens_per_s == pytest.approx(0.75 * whole, rel=0.01)
    assert found.in_rounds == pytest.approx(6 / (7 * 6 + 6 * 5))
    assert found.counted == 240 and found.tokens_per_s == pytest.approx(2 * bench_pipeline.ROWS)


def test_a_newcomer_counts_in_the_stage_that_it_was_given():
    names = [(f"peer-{n + 1}", f"stage-{n % 3 + 1}") for n in range(6)]
    looks = []
    for at in range(0, 121, 10):
        peers = [peer(*each, at, at) for each in names if each[0] != "peer-2" or at <= 60]
        if at > 60:
            peers.append(peer("peer-2", "stage-1", at, at) | {"incarnation": "newcomer"})
        looks.append({"at": at, "peers": peers})
    found = bench_pipeline.churn_of(
        looks,
        kills=[(2, 60.0)],
        trained={n: [0.0] for n in range(1, 7)} | {2: [0.0, 70.0]},
        link=LINK,
        window=(0.0, 120.0),
        busy=1.0,
    )
    whole = bench_pipeline.ROWS * pipeline_lab.stage_rate(bench_pipeline.CHURNED, 1, LINK, [2, 5])
    assert found.living_tokens_per_s == pytest.approx(0.75 * whole, rel=0.01)


def test_a_vacancy_ends_with_a_microbatch_of_the_peer_that_moved():
    before = [peer("peer-2", "stage-2", 9, 99.0, position=3)]
    stale = [peer("peer-2", "stage-2", 9, 103.0, position=4)]  # heard late, of the dead
    here = [peer("peer-1", "stage-2", 0, 125.0, position=3)]
    counting = [peer("peer-1", "stage-2", 2, 128.0, position=3)]
    beyond = [peer("peer-1", "stage-2", 9, 140.0, position=4)]
    looks = [{"peers": peers} for peers in (before, stale, here, counting, beyond)]
    moves = told_fields(notices.stage_moves(from_module="stage-1", to_module="stage-2"))
    mover = [
        {"kind": "ready", "time": 10.0, "text": "trains"},
        {"kind": "event", "time": 117.0} | moves,
        {"kind": "ready", "time": 126.0, "text": "trains"},
    ]
    found = pipeline_vacant.vacancy(looks, [[], mover], 1, {"peer-2"}, 100.0, 3)
    assert (found.named_s, found.ready_s) == (17.0, 26.0)
    assert (found.counted_s, found.round_s, found.joined_again) == (28.0, 40.0, 1)
    assert not pipeline_vacant.has_moved_on(looks[:4], "stage-2", {"peer-2"}, 3)


def test_two_runs_are_compared_at_the_tokens_that_both_reached():
    calm = {"points": [(100.0, 4.0), (200.0, 3.0), (300.0, 2.5)]}
    struck = {"points": [(90.0, 4.2), (250.0, 2.8)]}
    tokens, *losses = pipeline_learning.compared(calm, struck)
    assert (tokens, losses) == (250.0, [2.75, 2.8])
    assert bench_pipeline.missed_loss({"calm": calm, "struck": struck}) == []
    struck["points"][-1] = (250.0, 2.9)
    assert "+5.5%" in bench_pipeline.missed_loss({"calm": calm, "struck": struck})[0]
    assert bench_pipeline.missed_loss({"calm": calm}) == []


def test_tokens_are_those_of_the_entries_until_a_position(tmp_path):
    run_id, chain, swarm = bytes(32), bytes(32), Swarm()
    with closing(LogStore(tmp_path, run_id=run_id, genesis_chain=chain)) as store:
        for position in range(2):
            head = StoreHead(epoch=0, position=position, chain=chain)
            entry, body = swarm.entry(run_id, head)
            chain = entry.chain
            record = {"entry": entry.encode(), "certificate": b"c", "body": body, "chain": chain}
            store.append(epoch=0, position=position, **record)
        assert pipeline_learning.tokens_until(tmp_path / LOG_FILE) == [0, 300, 600]


def test_targets_that_are_missed_are_named():
    assert row().missed == row("drained", ratio=0.5).missed == []
    assert "0.84" in row(ratio=0.84).missed[0] and row("unequal", ratio=0.89).missed
    assert churned().chains == 1
    assert any("2 different chains" in each for each in churned("other").missed)


def test_what_was_saved_stays_beside_what_is_new(tmp_path):
    page, saved = tmp_path / "page.md", tmp_path / "saved.json"
    page.write_text("Before.\n{}\nold\n{}\nAfter.\n".format(*bench_pipeline.MARKS))
    for case in ("10 Mbit/s, 5 ms", "unequal"):
        found = {"machine": "One", "churn": None, "vacant": [], "learned": {}}
        found |= {"exact": [], "served": None}
        found["rows"] = [bench_pipeline.asdict(row(case)) | ORIGIN]
        bench_pipeline.save(found, saved, page)
    text = page.read_text()
    assert "| 10 Mbit/s, 5 ms | 32, staleness 2 | 900 | 1,000 | 0.90 |" in text
    assert "| unequal |" in text and "returns 40%; nothing" in text and "old" not in text
    assert text.startswith("Before.") and text.rstrip().endswith("After.")


def test_exact_counting_is_compared_before_the_first_kill():
    looks = []
    for at in range(0, 61, 5):
        rate = 2 if at <= 20 else 1
        counted = rate * at
        peers = [peer(f"peer-{n + 1}", f"stage-{n + 1}", counted, at) for n in range(3)]
        if at >= 30:
            peers[0]["flow"] |= {"double_counts": 3, "resends": 5, "omitted": {"late": 2}}
        looks.append({"at": at, "peers": peers})
    found = pipeline_costs.exact_of(looks, (0.0, 20.0, 60.0), 0.9, exact=True)
    assert found.tokens_per_s == pytest.approx(2 * pipeline_lab.ROWS)
    assert (found.counted, found.double_counts, found.resends, found.omitted) == (60, 3, 5, 2)
    assert found.missed == ["exact: 3 counted twice"]
    usual = bench_pipeline.replace(found, exact=False, tokens_per_s=2 * found.tokens_per_s)
    assert usual.missed == []
    rows = [bench_pipeline.asdict(each) | ORIGIN for each in (usual, found)]
    *_, last = pipeline_costs.exact_table(rows).splitlines()
    assert last.startswith("| true | 992 | 0.50 | 4 | 60 | 3 | 5 | 2 |")


def test_the_cost_of_texts_is_told_against_the_run_before_and_after():
    found = pipeline_costs.Served(
        share=0.2,
        clients=4,
        before_tokens_per_s=1100.0,
        serving_tokens_per_s=800.0,
        after_tokens_per_s=900.0,
        text_tokens_per_s=41.25,
        busy_cores=1.9,
    )
    *_, last = pipeline_costs.served_table(bench_pipeline.asdict(found) | ORIGIN).splitlines()
    assert last.startswith("| 20% | 4 | 1,100 | 800 | 900 | 0.80 | 41.2 | 1.9 | 2026-01-01, abc")
