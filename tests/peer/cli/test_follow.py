"""`atoll follow`: what is wrong costs one message, and nothing is overwritten."""

import pytest

from support.commands import refused


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["no-invite"], "no such file exists"),
        (["x", "--checkpoint-every", "-1"], "expected a number of rounds, got '-1'"),
        (["x", "--name", "n" * 65], "expected at most 64 characters"),
        (["x", "--checkpoint-evry", "1"], "did you mean --checkpoint-every?"),
        (["x", "--stages", "1,,2"], "expected stages such as 1,3, got '1,,2'"),
        (["x", "--export-every", "0"], "expected a number from 1 on, got '0'"),
    ],
)
def test_bad_input_gets_one_message(atoll, tmp_path, arguments, expected):
    assert expected in refused(atoll("follow", *arguments))
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["RUN.toml", "--keys", "keys.json"], "are for --restore TARGET"),
        (["--restore", "copies", "--keys", "keys.json"], "which copies is not"),
        (["--restore", "followed"], "pass --keys with a copy of the former"),
    ],
)
def test_a_rebuild_that_lacks_something_is_refused(atoll, tmp_path, arguments, expected):
    (tmp_path / "followed").mkdir()
    for name in ("run.json", "spec.json"):
        (tmp_path / "followed" / name).write_text("{}")
    assert expected in refused(atoll("coordinator", *arguments))
