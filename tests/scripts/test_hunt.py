"""The hunt's command: a range that finds something, and a seed of it that is told again."""

import json

import hunt
import pytest

FAILS = ["--virtual-minutes", "0.2", "--with", "doubled-residual"]


def lines_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[str]]:
    code = hunt.main([*arguments, *FAILS])
    return code, capsys.readouterr().out.splitlines()


def test_a_seed_is_told_as_its_range_has_seen_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    code, searched = lines_of(capsys, "--seeds", "9", "--json")
    (found,) = json.loads(searched[-1])["found"]
    assert code == 1
    code, told = lines_of(capsys, "--seed", str(found["seed"]), "--no-shrink", "--json")
    again = json.loads(told[-1])
    assert code == 1
    assert {name: again[name] for name in found} == found
    assert f"its story: {found['story']}" in told
