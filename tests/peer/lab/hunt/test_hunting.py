"""Whole runs from seeds: they keep their rules, repeat exactly, and break them with a bug."""

import os
import time
from pathlib import Path
from typing import Any

import pytest

from atoll.dht.folders import claim_folder
from atoll.peer.lab.hunt import hunting, plans
from atoll.peer.lab.hunt.hunting import (
    RunLost,
    Search,
    SeedResult,
    apart,
    digest_of,
    hunt,
    run_plan,
    run_seed,
    shrink,
    told,
)

ALWAYS = 4
"""Seeds of the default suite, half a virtual minute of faults each; about 10 s of CPU."""


@pytest.mark.parametrize("seed", range(ALWAYS))
def test_a_run_keeps_its_rules_whatever_happens(seed: int) -> None:
    result = run_seed(seed, virtual_minutes=0.5)
    assert result.text == ""
    assert result.virtual_s > 30


@pytest.mark.parametrize(
    "seed",
    [
        15407,  # a peer leaves while a gossip meeting that it waits for is under way
        *(
            pytest.param(seed, marks=pytest.mark.exhaustive)
            for seed in (10089, 10107, 10321, 10444)
        ),
    ],
)
def test_what_long_hunts_found_stays_mended(seed: int) -> None:
    assert run_seed(seed, virtual_minutes=1.0).text == ""


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("first", range(10_000, 10_300, 20))
def test_more_runs_keep_their_rules(first: int) -> None:
    summary = hunt(Search(first=first, seeds=20, virtual_minutes=0.5), lambda result: None)
    assert summary.runs == 20
    assert summary.found == []


def test_what_a_killed_hunt_left_goes_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hunting, "MEMORY", tmp_path)
    killed, lock = claim_folder(hunting.FOLDER_PREFIX, tmp_path)
    (killed / "run").mkdir()
    os.utime(killed, (0, 0))
    with hunting._own_folder() as living:
        assert killed.exists()  # its lock is held
        lock.close()
        with hunting._own_folder():
            assert living.exists() and not killed.exists()
    assert list(tmp_path.iterdir()) == []


def test_a_told_seed_is_the_one_of_its_range() -> None:
    found: list[SeedResult] = []
    hunt(Search(first=7, seeds=1, virtual_minutes=0.5), found.append)
    run = apart(told, plans.draw(7, minutes=0.5))
    assert run.story == found[0].story == digest_of(run.lines)
    assert (run.virtual_s, run.text) == (found[0].virtual_s, "")
    assert len(run.lines) > 20


def pid_after(name: str) -> int:
    globals()[name] = True
    return os.getpid()


def test_what_a_run_leaves_in_its_process_reaches_no_other() -> None:
    assert apart(pid_after, "left_behind") != os.getpid()
    assert "left_behind" not in globals()


def test_a_run_whose_process_dies_is_told() -> None:
    with pytest.raises(RunLost, match="ended with 7"):
        apart(os._exit, 7)


def test_a_run_that_waits_for_ever_is_told_and_the_hunt_goes_on(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hunting, "ENDS_S", 0.2)
    monkeypatch.setattr(hunting, "run_seed", lambda *_: time.sleep(3600))
    found: list[SeedResult] = []
    summary = hunt(Search(first=3, seeds=2), found.append)
    assert summary.found == found
    assert [(each.seed, each.rule) for each in found] == [(3, "a run ends"), (4, "a run ends")]
    assert "Timeout" in capfd.readouterr().err


def test_a_bug_is_found_and_shrinks() -> None:
    """A residual that counts twice: no fault is needed for it."""
    found: list[SeedResult] = []
    search = Search(seeds=20, virtual_minutes=0.5, bug="doubled-residual", until_found=True)
    summary = hunt(search, found.append)
    rule = "the codec's loss comes back once"
    assert [each.rule for each in summary.found] == [rule]
    plan = plans.draw(found[-1].seed, minutes=0.5)
    small, _ = shrink(plan, rule, bug="doubled-residual", tries=6)
    assert len(small.faults) <= len(plan.faults) // 2
    assert small.lasts_s <= plan.lasts_s


@pytest.mark.exhaustive
def test_a_doubt_that_is_guessed_away_is_found() -> None:
    broken = run_plan(plans.draw(2, minutes=1.0), "assumed-outcome").broken
    assert broken is not None and broken.rule == "gossip conserves mass"


@pytest.mark.parametrize(
    ("bug", "seed", "rule"),
    [
        ("repeated-order", 0, "orders come once, in a row"),
        pytest.param(
            *("unkept-order", 10, "what is acknowledged stays"), marks=pytest.mark.exhaustive
        ),
    ],
)
def test_orders_that_count_twice_or_are_lost_are_found(bug: Any, seed: int, rule: str) -> None:
    broken = run_plan(plans.draw(seed), bug).broken
    assert broken is not None and broken.rule == rule
