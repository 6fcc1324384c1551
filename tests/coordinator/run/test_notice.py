import pickle

import pytest

from atoll.coordinator.run.notice import (
    CODES,
    MAX_CHARS,
    MAX_ITEMS,
    MAX_TEXT,
    MAX_VALUE_CHARS,
    Notice,
    event,
    fields_of,
)
from atoll.coordinator.run.status import Event, StatusError


@pytest.fixture
def told():
    @event("test.told")
    def told(said, /, *, peers, reason, seconds):
        return f"{said}: {reason}"

    yield told
    del CODES["test.told"]


def test_a_notice_is_its_sentence_and_has_the_facts(told):
    notice = told("so", peers=("a", "b"), reason="why", seconds=1.5)
    assert notice == "so: why"
    assert notice.code == "test.told"
    assert notice.fields == {"peers": ["a", "b"], "reason": "why", "seconds": 1.5}
    assert fields_of("test.told") == ["peers", "reason", "seconds"]


def test_what_does_not_apply_or_is_no_number_is_left_out(told):
    assert told("so", peers=[], reason=None, seconds=float("nan")).fields == {"peers": []}


def test_a_module_and_a_count_join_the_fields(told):
    notice = told("so", peers=[], reason="why", seconds=0.0).within("s1").repeated(4)
    assert notice == "s1: so: why (reported 4 times)"
    assert (notice.code, notice.fields["module"], notice.fields["times"]) == ("test.told", "s1", 4)
    assert Notice("so").within("") == "so"


def test_an_event_keeps_code_and_fields_over_the_wire(told):
    notice = told("so", peers=["a"], reason="why", seconds=2.0)
    event_ = Event.from_json(Event.of(notice, "warning", at=1.0, source="p").to_json())
    assert event_.notice == notice
    assert (event_.notice.code, event_.notice.fields) == (notice.code, notice.fields)
    assert pickle.loads(pickle.dumps(notice)).fields == notice.fields


def test_an_event_of_a_version_without_codes_is_read():
    event_ = Event.from_json(b'{"at": 1.0, "level": "info", "source": "p", "text": "left"}')
    assert (event_.notice, event_.code, event_.fields) == ("left", "", {})


def test_an_event_is_cut_to_what_a_coordinator_takes(told):
    long = "é" * 2000
    notice = told(long, peers=[long] * 20, reason=long, seconds=1.0)
    event_ = Event.from_json(Event.of(notice, "error", at=1.0).to_json())
    assert len(event_.text) == MAX_TEXT
    assert event_.fields == {"reason": long[:MAX_VALUE_CHARS], "seconds": 1.0}  # peers are too long


@pytest.mark.parametrize(
    "fields",
    [
        '{"x": 1e999}',
        '{"X": 1}',
        '{"x": null}',
        '{"x": {"y": 1}}',
        '{"x": [1]}',
        f'{{"x": "{"a" * (MAX_VALUE_CHARS + 1)}"}}',
        f'{{"x": {["a"] * (MAX_ITEMS + 1)}}}'.replace("'", '"'),
        '{"a": "%s", "b": "%s", "c": "%s", "d": "%s"}' % (("a" * (MAX_CHARS // 4 + 1),) * 4),
        "{" + ", ".join(f'"f{i}": 1' for i in range(17)) + "}",
    ],
)
def test_fields_that_are_too_much_are_refused(fields):
    with pytest.raises(StatusError, match="fields"):
        Event.from_json(f'{{"at": 1.0, "text": "t", "fields": {fields}}}'.encode())


@pytest.mark.parametrize("code", ["left", "peer.", "Peer.left", "peer left.x", "a." + "b" * 48])
def test_a_code_that_is_none_is_refused(code):
    with pytest.raises(StatusError, match="code"):
        Event.from_json(f'{{"at": 1.0, "text": "t", "code": "{code}"}}'.encode())
