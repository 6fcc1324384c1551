"""The digests that the organiser's machine fills into a new run's spec."""

import hashlib
import sys
import types

import pytest

from atoll.coordinator.run.spec import RunSpec
from atoll.peer.cli import coordinator as command
from atoll.peer.cli import main as cli
from atoll.peer.errors import DataError, ExtraMissing, ModelError
from atoll.peer.training import digests
from atoll.peer.training.data.documents import text_digest
from atoll.peer.training.data.tokenizer_trial import TrialFailed
from atoll.peer.training.digests import read_tokenizer, with_digests
from atoll.peer.training.opening import open_corpus

MODEL = "def build(**anything): raise RuntimeError('not called')\n"
TOKENIZER = b'{"some": "tokenizer"}'
TOKENIZER_SHA256 = hashlib.sha256(TOKENIZER).hexdigest()
COMMIT = "0123456789abcdef" * 2 + "01234567"


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The organiser's folder, with a model, a tokenizer and a text."""
    (tmp_path / "our_model.py").write_text(MODEL)
    (tmp_path / "t.json").write_bytes(TOKENIZER)
    (tmp_path / "text.txt").write_text("some text of the organiser " * 20)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(digests, "try_tokenizer", lambda raw: None)
    monkeypatch.setitem(sys.modules, "tokenizers", types.ModuleType("tokenizers"))
    return tmp_path


def spec_of(model=None, **data):
    data = {"source": "text.txt", "tokenizer": "t.json", "seq_len": 8} | data
    model = {"custom": "our_model:build"} if model is None else model
    return RunSpec.from_dict({"model": model, "data": data})


def test_a_new_run_gets_the_digests_of_what_it_trains_with(here):
    spec, said = spec_of(), []
    filled = with_digests(spec, None, said.append)
    assert filled.model.source_sha256 == hashlib.sha256(MODEL.encode()).hexdigest()
    assert filled.data.tokenizer_sha256 == hashlib.sha256(TOKENIZER).hexdigest()
    assert filled.data.tokenizer_bytes == len(TOKENIZER)
    assert filled.data.sha256 == text_digest("text.txt")
    assert filled.digest() != spec.digest()
    assert RunSpec.from_json(filled.canonical()) == filled
    assert "our_model" not in sys.modules
    assert said == []
    assert read_tokenizer(filled) == TOKENIZER


def test_the_digest_of_a_text_is_the_one_that_a_peer_finds(here):
    filled = with_digests(spec_of({}, tokenizer="bytes", source="stdlib"), None)
    found = open_corpus(filled).summary
    assert filled.data.sha256 == found.sha256
    assert found.files > 100


def test_a_restart_keeps_the_digests_of_the_start(here):
    stored = with_digests(spec_of(), None)
    (here / "our_model.py").write_text("# changed")
    (here / "t.json").unlink()
    (here / "text.txt").unlink()
    assert with_digests(spec_of(), stored) == stored
    old = spec_of()
    assert with_digests(spec_of(), old) == old  # that of an earlier version, without digests


def test_a_restart_with_another_run_is_named_by_what_changed(here):
    stored = with_digests(spec_of(), None)
    other = with_digests(spec_of({}, tokenizer="bytes", source="stdlib"), stored)
    assert other.model.source_sha256 is other.data.tokenizer_sha256 is other.data.sha256 is None
    assert "data.tokenizer: 't.json' != 'bytes'" in stored.differences(other)


def test_a_file_that_changed_under_a_named_digest_is_refused(here):
    other = "ab" * 32
    with pytest.raises(ModelError, match=r"model.source_sha256 states another"):
        with_digests(spec_of({"custom": "our_model:build", "source_sha256": other}), None)
    with pytest.raises(DataError, match=r"'t.json' is not the run's: expected the SHA-256 abab"):
        with_digests(spec_of(tokenizer_sha256=other), None)
    assert with_digests(spec_of(sha256=other), None).data.sha256 == other  # the peers' text


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ({"tokenizer": "bytes", "tokenizer_sha256": "ab" * 32}, "data.tokenizer is 'bytes'"),
        ({"revision": "main"}, "are for Hugging Face data sets"),
        ({"split": "test"}, "are for Hugging Face data sets"),
        ({"source": "nowhere", "same_text": True}, "needs the SHA-256 of the text"),
        ({"tokenizer_sha256": TOKENIZER_SHA256, "tokenizer_bytes": 7}, "has 21 bytes; omit"),
        ({"tokenizer": "nowhere.json"}, "'nowhere.json' cannot be read"),
    ],
)
def test_settings_that_do_not_fit_are_refused_at_the_start(here, data, told):
    with pytest.raises(DataError, match=told):
        with_digests(spec_of(**data), None)


def test_a_file_that_is_no_tokenizer_is_refused_at_the_start(here, monkeypatch):
    def fail(raw):
        raise TrialFailed("expected value at line 1")

    monkeypatch.setattr(digests, "try_tokenizer", fail)
    with pytest.raises(DataError, match=r"got 't.json' \(expected value at line 1\)"):
        with_digests(spec_of(), None)


def test_a_missing_extra_is_said_with_its_cure(here, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ExtraMissing, match="install it with: pip install tokenizers"):
        with_digests(spec_of(), None)


def test_what_cannot_be_filled_in_is_said(here, monkeypatch):
    monkeypatch.setattr(digests, "pack", lambda raw: None)
    said = []
    filled = with_digests(spec_of(source="elsewhere"), None, said.append)
    assert filled.data.tokenizer_bytes is None and filled.data.tokenizer_sha256 is not None
    assert "each peer names its own copy with --tokenizer PATH" in said[0]
    assert "'elsewhere' cannot be read here" in said[1]


class FakeHub(types.ModuleType):
    """The package `huggingface_hub`."""

    def __init__(self, answer):
        super().__init__("huggingface_hub")
        self.HfApi, self.answer = lambda: self, answer

    def dataset_info(self, name, timeout):
        if isinstance(self.answer, Exception):
            raise self.answer
        return types.SimpleNamespace(sha=f"{name}/{self.answer}")


def test_the_commit_of_a_data_set_is_filled_in(here, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", FakeHub(COMMIT))
    spec = spec_of({}, source="hf:some/name@config", tokenizer="bytes")
    assert with_digests(spec, None).data.revision == f"some/name/{COMMIT}"
    fixed = spec_of({}, source="hf:some/name", tokenizer="bytes", revision="v2")
    assert with_digests(fixed, None) == fixed


def test_a_hub_that_does_not_answer_is_said(here, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", FakeHub(OSError("offline\nmore")))
    spec, said = spec_of({}, source="hf:some/name", tokenizer="bytes"), []
    assert with_digests(spec, None, said.append) == spec
    assert "'some/name': offline; peers read its newest revision: set data.revision" in said[0]


def test_the_command_fills_them_in_and_keeps_them(here, monkeypatch):
    (here / "RUN.toml").write_text('[data]\nsource = "text.txt"\nseq_len = 8\n')
    state = here / "state"
    served = []

    async def serve(spec, *anything, **options):
        served.append(spec)
        return 0

    monkeypatch.setattr(command, "_serve", serve)
    monkeypatch.setattr(command, "first_state", lambda spec, state_dir: None)
    for text in ("other words " * 30, "other words again " * 30):
        assert cli.main(["coordinator", "RUN.toml", "--state-dir", str(state)]) == 0
        state.mkdir(exist_ok=True)
        (state / "spec.json").write_bytes(served[-1].canonical())
        (here / "text.txt").write_text(text)
    assert served[0].data.sha256 is not None
    assert served[1] == served[0]
