"""The results of `scripts/bench_nat.py`: targets, what is kept over an interruption, the page."""

import json
from dataclasses import asdict
from itertools import pairwise

import bench_nat
import pytest


def row(case="open", **changes):
    fields = {
        "joined_s": 9.0,
        "first_s": 14.0,
        "round_s": 1.3,
        "bound_s": 1.2,
        "ratio": 1.1,
        "through_coordinator": 0.001,
        "relayed_mb": 0.0,
        "direct_pairs": 0,
        "counted": 1.0,
    }
    return bench_nat.Row(case=case, **(fields | changes))


def killed(cost_s=1.0, without=((), ())):
    return bench_nat.Killed(
        round_s=4.0, struck_s=4.0 + cost_s, cost_s=cost_s, without=list(map(list, without))
    )


def soak(**changes):
    fields = {"utilisation": 0.96, "chains": 1, "counted": 0.98, "longest_s": 21.0}
    counts = {"model": "mini", "method": "diloco", "step_ms": 80.0, "minutes": 30.0, "rounds": 200}
    return bench_nat.Soak(**(fields | counts | {"kills": 7, "moves": 7} | changes))


def test_targets_that_are_missed_are_named():
    assert row().missed == killed().missed == soak().missed == []
    late = row("all:symmetric", joined_s=20.4, ratio=1.31, through_coordinator=0.5)
    assert len(late.missed) == 2  # all bytes may go through it if nobody else is public
    assert "11% through" in row("two:double", through_coordinator=0.11).missed[0]
    assert len(killed(5.1, [[], ["peer-1"]]).missed) == 2
    assert len(soak(utilisation=0.949, chains=2).missed) == 2


def test_a_case_is_its_median_with_the_spread():
    found = bench_nat.summary([row(ratio=ratio) for ratio in (1.85, 1.08, 1.2)])
    assert (found["ratio"], found["ratio_low"], found["ratio_high"]) == (1.2, 1.08, 1.85)
    assert found["runs"] == 3 and found["commit"]


def test_an_interrupted_bench_continues_and_repeats_a_failed_run_once(tmp_path):
    kept = bench_nat.Kept(tmp_path / "kept")
    answers = iter([row(ratio=1.0), KeyboardInterrupt(), RuntimeError("no"), row(ratio=2.0)])

    def one():
        answer = next(answers)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    with pytest.raises(KeyboardInterrupt):
        bench_nat.repeated("open", bench_nat.Row, kept, 2, one)
    with kept.path.open("a") as file:
        file.write('{"case": "open", "run": {"ca\n')  # cut off
    found = bench_nat.repeated("open", bench_nat.Row, kept, 2, one)
    assert (
        [run.ratio for run in found]
        == [1.0, 2.0]
        == [r.ratio for r in kept.of("open", type(found[0]))]
    )
    assert kept.of("two:double", bench_nat.Row) == []


def test_two_failures_end_a_case(tmp_path):
    def one():
        raise RuntimeError("not done within 240 s")

    kept = bench_nat.Kept(tmp_path / "kept")
    with pytest.raises(RuntimeError, match="two runs failed"):
        bench_nat.repeated("open", bench_nat.Row, kept, 3, one)


def test_looks_leave_out_peers_that_are_gone_or_have_no_figure_yet():
    def peer(state, rounds_seen, utilisation):
        return {"state": state, "rounds_seen": rounds_seen, "utilisation": utilisation}

    looks = bench_nat.Looks()
    looks.take({})
    peers = [peer("training", 9, 0.9), peer("gone", 9, 0.1), peer("training", 1, 1.0)]
    looks.take({"peers": peers, "history": [{"position": 1}, {"position": 2}]})
    looks.take({"peers": [], "history": [{"position": 2}, {"position": 3}]})
    assert looks.used == [0.9] and sorted(looks.rounds) == [1, 2, 3]


def test_each_result_keeps_its_own_date_and_commit(tmp_path):
    saved, page = tmp_path / "nat.json", tmp_path / "nat.md"
    page.write_text(f"Above.\n{bench_nat.MARKS[0]}\nold\n{bench_nat.MARKS[1]}\nBelow.\n")
    old = asdict(row("open")) | {"ratio": 1.07}
    alone = {"rows": [old], "relay_killed": {"cost_s": 38.0}, "soak": None}
    saved.write_text(json.dumps({"date": "2026-11-23", "commit": "66a5089", **alone}))
    shared = {"machine": "2 cores", "params": 1, "relay_mbit": 100.0}

    def save(**new):
        found = {"rows": [], "relay_killed": None, "soak": None} | shared | new
        bench_nat.save(found, saved, page)

    save(relay_killed=bench_nat.killed_summary([killed(1.0), killed(2.5)]))
    save(soak=asdict(soak()) | {"date": "2026-11-25", "commit": "abcdef0"})
    save(rows=[bench_nat.summary([row("two:double")])])
    found, told = json.loads(saved.read_text()), page.read_text()
    assert [(each["case"], each["runs"]) for each in found["rows"]] == [
        ("open", 1),
        ("two:double", 1),
    ]
    assert found["rows"][0]["commit"] == "66a5089" != found["rows"][1]["commit"]
    assert found["relay_killed"]["cost_s"] == 2.5
    assert told.startswith("Above.") and told.endswith("Below.\n") and "old" not in told
    for each in (
        "2026-11-23, 66a5089",
        "| run 2 | 4.0 | 6.5 | 2.5 | nobody |",
        "| 30 min | mini | diloco",
    ):
        assert each in told
    for head, line in pairwise(told.splitlines()):
        assert not line.startswith("|---") or line.count("|") == head.count("|")
