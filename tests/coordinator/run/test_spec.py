import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atoll.coordinator.run.addresses import split_address
from atoll.coordinator.run.spec import RunSpec, run_id, template
from atoll.coordinator.run.spec_problems import SpecError

BAD = """\
[run]
name = "a b"
rounds = 1.5

[inner]
lr = -1
bata1 = 0.5
batch_size = true

[outer]
method = "dilco"
lr = "big"
seq_len = 64

[outr]
x = 1

[coordinator]
listen = "7700"
"""


QSR = "[run]\nrounds = 100\n[outer]\nwindows = 'qsr'\ngrowth = {growth}\n"


def problems(text: str) -> list[str]:
    with pytest.raises(SpecError) as caught:
        RunSpec.from_toml(text)
    return [str(problem) for problem in caught.value.problems]


def test_all_problems_are_listed_with_their_lines() -> None:
    found = problems(BAD)
    starts = {problem.split(":")[0] + problem.split(":")[1] for problem in found}
    assert starts == {
        "line 2 run.name",
        "line 3 run.rounds",
        "line 6 inner.lr",
        "line 7 inner.bata1",
        "line 8 inner.batch_size",
        "line 11 outer.method",
        "line 12 outer.lr",
        "line 13 outer.seq_len",
        "line 15 outr",
        "line 19 coordinator.listen",
    }


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[inner]\nbata1 = 0.5", "did you mean 'beta1'"),
        ("[outer]\nseq_len = 5", "it belongs to [data]"),
        ("[outr]", "did you mean 'outer'"),
        ("[outer]\nmethod = 'dilco'", "did you mean 'diloco'"),
        ("[outer]\nmethod = 'ddp'", "must be 1 with 'ddp'"),
        ("[outer]\nmethod = 'noloco'\n[compression]\nfeedback = 1.0", "no feedback"),
        ("[outer]\nmethod = 'demo'", "must be 1 with 'demo'"),
        ("[outer]\nmethod = 'diloco(codec=int4)'", "set codec as compression.codec"),
        ("[outer]\nmethod = 'streaming(alpha=2)'", "between 0 and 1"),
        ("[outer]\nmethod = 'streaming(count=0)'", "outer.method: expected at least one"),
        ("[outer]\nmethod = 'sparseloco'\nmomentum = 0.5", "options among"),
        ("[outer]\nmethod = 'sparseloco'\n[round]\nreducer = 'median'", "must be 'mean'"),
        (
            "[compression]\ncodec = 'feedback(int4, decay=0.9)'",
            'set codec = "int4" and feedback = 0.9',
        ),
        ("[compression]\nfeedback = 2.0", "'auto' or a number between 0 and 1"),
        ("[compression]\ncodec = 'ternary'\nfeedback = 1.0", "unbiased"),
        ("[outer]\nlr = 11.0", "'auto' or a number above 0"),
        ("[outer]\nmomentum = 1.0", "'auto' or a number in [0, 1)"),
        ("[outer]\nwindows = 'fixed'", "'equal', 'deadline' or 'qsr'"),
        ("[outer]\ngrowth = 0.01", 'apply only to windows = "qsr"'),
        ("[outer]\nwindows = 'deadline'\nmax_inner_steps = 60", 'apply only to windows = "qsr"'),
        ("[outer]\nwindows = 'qsr'\ngrowth = 0.01", "set run.rounds above 0"),
        (QSR.format(growth=0.0), "expected 0.00418 to 0.026, so that windows grow from 30"),
        (QSR.format(growth=0.004), "expected 0.00418 to 0.026"),
        (QSR.format(growth=0.03), "expected 0.00418 to 0.026"),
        (QSR.format(growth=0.01) + "max_inner_steps = 30", "more than outer.inner_steps, 30"),
        (QSR.format(growth=0.01) + "[inner]\nmin_lr_ratio = 1.0", "below 1"),
        (QSR.format(growth=0.01) + "method = 'ddp'\ninner_steps = 1", "must be 'equal' with"),
        ("[outer]\nmethod = 'diloco(tau=31)'", "at most one window, 30 steps"),
        ("[outer]\ninner_steps = 0", "greater than or equal to 1, got 0"),
        ("[model]\ncustom = 'model'", "'module:function'"),
        ("[compression]\ncodec = 'in8'", "int8"),
        ("[data]\nformat = 'csv'", "'parquet'"),
        ("[data]\npacking = 'documents'\n[model]\ncustom = 'm:f'", "is for the built-in models"),
        ("[inner]\nstate = '8bit'\n[outer]\nmethod = 'muloco'", "'muloco' trains with muon"),
        ("[inner]\nlr = nan", "finite"),
        ("[inner]\nlr = '0.1'", "number"),
        ("run = 3", "expected a section such as [run], got 3"),
        ("[run]\nrounds = = 1", "line 2: not valid TOML"),
    ],
)
def test_each_mistake_has_its_remedy(text: str, told: str) -> None:
    assert told in "\n".join(problems(text))


def test_the_template_is_the_default_and_documents_every_field() -> None:
    text = template()
    assert RunSpec.from_toml(text) == RunSpec()
    for section, field in RunSpec.model_fields.items():
        assert f"[{section}]" in text
        model: Any = field.annotation
        for key, info in model.model_fields.items():
            assert f"{key} = " in text
            assert info.description and info.description.split()[0] in text


def test_every_commented_line_of_the_template_can_be_used() -> None:
    lines = [line.removeprefix("# ") if " = " in line else line for line in template().splitlines()]
    spec = RunSpec.from_toml("\n".join(lines))
    assert spec.model.custom and spec.model.overrides and spec.coordinator.advertise


def test_a_template_of_other_values() -> None:
    spec = RunSpec.from_dict(
        {"model": {"overrides": {"layers": 3, "tied": True}}, "run": {"seed": 9}}
    )
    assert RunSpec.from_toml(template(spec)) == spec


def test_windows_grow_by_the_spec_alone() -> None:
    spec = RunSpec.from_toml(QSR.format(growth=0.01) + "max_inner_steps = 90")
    windows = spec.timetable(1)
    assert RunSpec.from_json(spec.canonical()).timetable(1) == windows
    rate = spec.inner.rate.at(windows.steps_until(40), windows.total_steps)
    grown = math.floor((0.01 / rate) ** 2)
    assert [windows.window(position) for position in (0, 40, 99)] == [44, grown, 90]
    assert 44 < grown < 90
    assert windows.total_steps - windows.steps_until(100) in range(90)
    assert spec.timetable(1, rounds=50).total_steps < windows.total_steps / 1.9
    assert RunSpec.from_dict({"run": {"rounds": 7}}).timetable(2).total_steps == 105


def test_file(tmp_path: Path) -> None:
    path = tmp_path / "RUN.toml"
    path.write_text('[run]\nname = "mine"\n')
    assert RunSpec.load(path).run.name == "mine"
    with pytest.raises(SpecError, match="atoll init"):
        RunSpec.load(tmp_path / "none.toml")
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(SpecError, match="UTF-8"):
        RunSpec.load(path)
    path.write_bytes(b"#" * 300_000)
    with pytest.raises(SpecError, match="at most"):
        RunSpec.load(path)


def test_canonical_bytes_come_back_and_name_the_run() -> None:
    spec = RunSpec.from_dict({"run": {"name": "x"}, "outer": {"lr": 0.7}})
    assert RunSpec.from_json(spec.canonical()) == spec
    moved = RunSpec.from_dict({**spec.model_dump(), "coordinator": {"listen": "0.0.0.0:1"}})
    other = RunSpec.from_dict({**spec.model_dump(), "inner": {"lr": 0.1}})
    assert spec.digest() == moved.digest() != other.digest()
    assert spec.differences(other) == ["inner.lr: 0.0015 != 0.1"]
    assert run_id(spec, b"a" * 32) != run_id(spec, b"b" * 32)
    assert len(run_id(spec, b"a" * 32)) == 64


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_hostile_bytes(raw: bytes) -> None:
    with pytest.raises(SpecError):
        RunSpec.from_json(b"[" + raw)


@pytest.mark.parametrize(
    "raw", [b"[" * 100_000, b" " * 300_000, b"{}[", b'"text"', b"\xff", b"null"]
)
def test_hostile_json(raw: bytes) -> None:
    with pytest.raises(SpecError):
        RunSpec.from_json(raw)


def test_addresses() -> None:
    assert split_address("[::1]:7700") == ("::1", 7700)
    assert split_address("host:0") == ("host", 0)
    for bad in ("host", ":1", "host:", "host:65536", "host:x", "host:-1"):
        with pytest.raises(ValueError, match="host:port"):
            split_address(bad)


def test_the_method_takes_its_own_codec_unless_another_is_named() -> None:
    method = RunSpec.from_dict({"outer": {"method": "sparseloco(average=senders)"}}).method()
    assert (method.codec.spec, method.feedback) == ("topk+2bit", 0.95)
    spec = RunSpec.from_dict({"compression": {"codec": "ternary"}})
    assert (spec.method().codec.spec, spec.method().feedback) == ("ternary", 0.0)
    assert RunSpec().method().codec.spec == "int8"


def test_outer_rates_of_diloco_follow_the_run_and_those_of_others_do_not() -> None:
    def rates(method: str, **outer: float) -> tuple[float, float]:
        sections = {"run": {"rounds": 10}, "outer": {"method": method, **outer}}
        return RunSpec.from_dict(sections).method().scalars(0.1)

    assert rates("diloco") == rates("streaming") == (0.8, 0.3)
    assert rates("diloco", lr=0.5) == (0.5, 0.3)
    assert rates("muloco") == (0.7, 0.6)
    assert rates("demo", inner_steps=1) == (0.1, 0.0)


def test_who_votes_is_part_of_the_run_only_if_it_is_not_the_default() -> None:
    members, keepers = RunSpec(), RunSpec.from_toml('[round]\nelectors = "keepers"\n')
    assert b"electors" not in members.canonical()
    assert b'"electors":"keepers"' in keepers.canonical()
    assert keepers.digest() != members.digest()
    assert RunSpec.from_json(keepers.canonical()) == keepers
    assert members.differences(keepers) == ["round.electors: 'members' != 'keepers'"]


def test_digests_are_part_of_the_run_only_if_they_are_there() -> None:
    before = RunSpec()
    for name in ("sha256", "revision", "split", "same_text", "tokenizer_bytes"):
        assert name.encode() not in before.canonical()
    data = {"source": "hf:a/b", "split": "test", "revision": "v1", "tokenizer": "t.json"}
    digests = {"tokenizer_sha256": "ab" * 32, "tokenizer_bytes": 900}
    model = {"custom": "m:f", "source_sha256": "cd" * 32}
    after = RunSpec.from_dict({"data": data | digests, "model": model})
    assert RunSpec.from_json(after.canonical()) == after
    assert after.digest() != before.digest()


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ({"data": {"tokenizer": "t.json", "tokenizer_sha256": "AB" * 32}}, "tokenizer_sha256"),
        ({"data": {"tokenizer": "t.json", "tokenizer_bytes": 9}}, "needs data.tokenizer_sha256"),
        ({"data": {"source": "hf:a/b", "revision": "../x"}}, "expected a commit, branch or tag"),
        ({"data": {"source": "hf:a/b", "revision": "x" * 101}}, "expected a commit"),
        ({"data": {"source": "hf:a/b", "split": "train[:9]"}}, "data.split"),
        ({"data": {"source": "hf:a/b", "same_text": True}}, "set data.revision for a Hugging"),
        ({"model": {"source_sha256": "ab" * 32}}, "is for a custom model; remove it"),
    ],
)
def test_digests_that_fit_nothing_are_refused(section: dict[str, Any], told: str) -> None:
    with pytest.raises(SpecError, match=told):
        RunSpec.from_dict(section)


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [("data", "packing", "documents"), ("inner", "state", "8bit"), ("outer", "state", "bf16")],
)
def test_a_later_setting_is_part_of_the_run_only_if_it_is_made(
    section: str, key: str, value: str
) -> None:
    before, after = RunSpec(), RunSpec.from_dict({section: {key: value}})
    assert f'"{key}":'.encode() not in before.canonical()
    assert RunSpec.from_json(after.canonical()) == after
    assert after.digest() != before.digest()


def test_liars_are_tolerated_only_among_keepers() -> None:
    with pytest.raises(SpecError, match=r"round.trust: 'byzantine' needs keepers, at least 4"):
        RunSpec.from_toml('[round]\ntrust = "byzantine"\n')
    spec = RunSpec.from_toml('[round]\nelectors = "keepers"\ntrust = "byzantine"\n')
    assert RunSpec.from_json(spec.canonical()) == spec
    assert b"trust" not in RunSpec().canonical()
    assert spec.round.min_keepers == 4


def test_the_format_of_the_outer_momentum_is_the_methods() -> None:
    spec = RunSpec.from_toml('[outer]\nmethod = "streaming(count=2)"\nstate = "bf16"\n')
    assert spec.method().memory_dtype == torch.bfloat16
    assert run_id(spec, b"k" * 32) != run_id(RunSpec.from_toml("[outer]\n"), b"k" * 32)
    for method in ("sparseloco", "noloco", "ddp"):
        text = f'[outer]\nmethod = "{method}"\nstate = "bf16"\ninner_steps = 1\n'
        with pytest.raises(SpecError, match=rf"outer.state: .*, and '{method}' has none"):
            RunSpec.from_toml(text)
    with pytest.raises(SpecError, match=r"set state as outer\.state"):
        RunSpec.from_toml('[outer]\nmethod = "diloco(state=bf16)"\n')


def test_nobody_votes_by_gossip() -> None:
    text = '[round]\nelectors = "keepers"\n[outer]\nmethod = "noloco"\n'
    with pytest.raises(SpecError, match=r"round.electors: must be 'members' with 'noloco'"):
        RunSpec.from_toml(text)


def test_the_outer_defaults_of_a_pipeline_are_for_the_peers_of_one_stage() -> None:
    dense = RunSpec.from_dict({"round": {"min_peers": 2}})
    staged = RunSpec.from_dict({"round": {"min_peers": 6}, "topology": {"stages": 3}})
    assert (dense.planned_members, staged.planned_members) == (2, 2)
    assert staged.method() == dense.method()


PATTERNS = [["slices.0.*", "slices.1.*"], ["slices.[2-9].*"], ["*head*"]]


def test_patterns_of_stages_count_them_and_belong_to_the_run() -> None:
    text = f"[topology]\nstages = {PATTERNS}\n[round]\nmin_peers = 6"
    spec = RunSpec.from_toml(text)
    assert spec.topology.num_stages == 3
    assert spec.modules == ("stage-1", "stage-2", "stage-3")
    assert spec.planned_members == 2
    assert RunSpec.from_json(spec.canonical()) == spec == RunSpec.from_toml(template(spec))
    even = RunSpec.from_toml(text.replace(str(PATTERNS), "3"))
    assert even.modules == spec.modules and even.digest() != spec.digest()
    assert "topology.stages" in even.differences(spec)[0]


def test_runs_with_a_number_of_stages_keep_their_digest() -> None:
    spec = RunSpec.from_dict({"topology": {"stages": 4}})
    assert spec.digest() == "169b8e8313b0ca88eac61b0329c95f0a14ad0b725b1c7c2e32a22f4b5ba19ca3"


@pytest.mark.parametrize(
    ("stages", "told"),
    [
        ("0", "expected a number of stages, 1 to 64, or a list of patterns for each stage, got 0"),
        ("65", "expected a number of stages, 1 to 64"),
        ("true", "expected a number of stages, 1 to 64"),
        ("'slices.0.*'", "expected a number of stages, 1 to 64"),
        ("[]", "for each of 2 to 64 stages, got 0 lists; 1 without patterns is a run whose"),
        ("[['*']]", "for each of 2 to 64 stages, got 1 lists"),
        (f"[{'[1],' * 65}]", "for each of 2 to 64 stages, got 65 lists"),
        ("['slices.0.*', ['*']]", "a list of patterns for stage 1, such as ['slices.0.*'], got 's"),
        ("[['slices.0.*'], []]", "a list of patterns for stage 2, such as ['slices.0.*'], got []"),
        ("[['slices.0.*'], [3]]", "a pattern of 1 to 200 characters in stage 2, got 3"),
        ("[['slices.0.*'], ['']]", "a pattern of 1 to 200 characters in stage 2, got ''"),
        (f"[['a'], ['{'*' * 201}']]", "a pattern of 1 to 200 characters in stage 2"),
        (str([["a"], ["b"] * 512]), "at most 512 patterns in all, got 513"),
    ],
)
def test_stages_that_no_model_could_have_are_refused(stages: str, told: str) -> None:
    (found,) = problems(f"[topology]\nstages = {stages}")
    assert found.startswith("line 2: topology.stages: expected ") and told in found
    assert " or expected" not in found
