"""What a peer is told of its text."""

import re

import pytest

from atoll.coordinator.run.spec import RunSpec
from atoll.peer.errors import DataError
from atoll.peer.training.data.remarks import expect_text, remarks
from support.texts import opened


def spec_of(**sections):
    data_section = {"seq_len": 16, "source": "text"} | sections.pop("data", {})
    return RunSpec.from_dict({"data": data_section, **sections})


def test_the_amount_of_text_is_said(folder):
    corpus = opened(folder)
    ((level, line),) = remarks(spec_of(run={"rounds": 2}), corpus, steps_left=5)
    assert level == "info"
    assert re.fullmatch(r"data: 60 files, [\d.]+ kB, [\d.]+k tokens, SHA-256 [0-9a-f]{64}", line)


def test_another_text_than_the_organisers_is_a_warning(folder):
    corpus = opened(folder)
    spec = spec_of(data={"sha256": "ab" * 32})
    _, (level, line) = remarks(spec, corpus, steps_left=5)
    assert level == "warning" and "this text is not the organiser's text" in line
    expect_text(spec, corpus)
    strict = spec_of(data={"sha256": "ab" * 32, "same_text": True})
    with pytest.raises(DataError, match=r"expected the SHA-256 abababababab, got .* \(60 files"):
        expect_text(strict, corpus)
    same = spec_of(data={"sha256": corpus.summary.sha256, "same_text": True})
    expect_text(same, corpus)
    assert len(list(remarks(same, corpus, steps_left=5))) == 1


def test_the_library_of_another_python_is_no_warning(folder):
    spec = spec_of(data={"sha256": "ab" * 32, "source": "stdlib"})
    _, (level, line) = remarks(spec, opened(folder), steps_left=5)
    assert level == "info" and "the library of Python 3." in line


def test_a_run_that_states_no_digests_is_a_warning(folder):
    spec = spec_of(data={"tokenizer": "t.json"}, model={"custom": "mine:build"})
    levels, lines = zip(*remarks(spec, opened(folder), steps_left=5), strict=True)
    assert levels == ("warning", "warning", "info")
    assert "whether 't.json' is the organiser's" in lines[0] and "mine:build" in lines[1]


@pytest.mark.parametrize(
    ("steps_left", "told"),
    [(None, "times in 100 rounds"), (100_000, "times in the rounds left"), (1, None)],
)
def test_a_text_that_is_too_short_for_the_run_is_a_warning(folder, steps_left, told):
    found = list(remarks(spec_of(), opened(folder), steps_left=steps_left))[1:]
    assert [level for level, _ in found] == ["warning"] * (told is not None)
    assert told is None or told in found[0][1]
