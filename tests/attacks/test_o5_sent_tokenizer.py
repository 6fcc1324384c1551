"""O5: a tokenizer that the organiser sends is parsed by its peers."""

import hashlib
import sys
import types

import pytest

from atoll.coordinator.rpc.client_errors import BadReply
from atoll.coordinator.run.spec import RunSpec
from atoll.optim.state.layout import Layout
from atoll.peer.daemon import sent_tokenizer
from atoll.peer.daemon.consent import Consent, Declined
from atoll.peer.daemon.membership import Membership
from atoll.peer.errors import DataError, ModelError
from atoll.peer.lab import plan
from atoll.peer.paths import PeerPaths
from atoll.peer.training.data import tokenizer_trial
from atoll.peer.training.data.tokenizer_trial import TrialFailed, try_tokenizer
from atoll.peer.training.opening import open_tokenizer
from atoll.peer.training.permission import Allowed, options_for, with_own_files
from support.beside import admitted

FILE = b'{"a tokenizer": "of the run"}'
OTHER = b'{"a tokenizer": "of another"}'
RUN_ID = bytes(range(32))


def spec_of(file=FILE, **changes):
    fields = {
        "tokenizer": "/home/organiser/t.json",
        "tokenizer_sha256": hashlib.sha256(file).hexdigest(),
        "tokenizer_bytes": len(file),
    }
    return RunSpec.from_dict({"data": fields | changes})


class FakeTokenizers(types.ModuleType):
    """The package `tokenizers`; notes what it parsed."""

    def __init__(self):
        super().__init__("tokenizers")
        self.parsed = []
        self.Tokenizer = self

    def from_buffer(self, raw):
        self.parsed.append(raw)
        return self

    def token_to_id(self, token):
        return None

    def get_vocab_size(self, with_added_tokens):
        return 256


@pytest.fixture
def package(monkeypatch):
    fake = FakeTokenizers()
    decoders = types.ModuleType("tokenizers.decoders")
    decoders.DecodeStream = None
    monkeypatch.setitem(sys.modules, "tokenizers", fake)
    monkeypatch.setitem(sys.modules, "tokenizers.decoders", decoders)
    monkeypatch.setattr(sent_tokenizer, "try_tokenizer", lambda raw: None)
    return fake


class Joining:
    """A peer that has joined, and the coordinator's answers to it."""

    def __init__(self, folder, answer=FILE, **options):
        self.fetched, self.asked, self.answer = 0, 0, answer
        self.says_yes = True
        options = {"allowed": Allowed(), **options}
        self.consent = Consent(
            paths=PeerPaths(root=folder), run_id=RUN_ID, ask=self._ask, **options
        )

    def _ask(self, stopping):
        assert not self.fetched, "nothing of the run is fetched before the yes"
        self.asked += 1
        return self.says_yes

    async def _fetch(self, *, sha256, size):
        self.fetched += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def admit(self, spec, layout=None):
        plain = replace_tokenizer(spec)
        membership = Membership(
            spec=spec,
            layout=layout or Layout.of(plan.bare_model(plain)),
            genesis_root=bytes(32),
            admission=b"",
            bootstrap=(),
        )
        admitted(self.consent, membership, self._fetch)


def replace_tokenizer(spec):
    return spec.model_copy(update={"data": RunSpec().data})


def test_it_is_fetched_once_after_the_yes_and_kept(tmp_path, package):
    peer, spec = Joining(tmp_path), spec_of()
    for _ in range(2):
        peer.admit(spec)
    assert (peer.asked, peer.fetched) == (1, 1)
    kept = peer.consent.paths.tokenizer
    assert kept.read_bytes() == FILE
    own = with_own_files(spec, data=None, tokenizer=None, sent_tokenizer=kept)
    open_tokenizer(own, Allowed(sent_tokenizer=kept))
    assert set(package.parsed) == {FILE}
    kept.write_bytes(OTHER)  # damaged, of the same length
    peer.admit(spec)
    assert peer.fetched == 2 and kept.read_bytes() == FILE


def test_after_a_no_nothing_is_fetched_or_parsed(tmp_path, package):
    peer = Joining(tmp_path)
    peer.says_yes = False
    with pytest.raises(Declined):
        peer.admit(spec_of())
    assert peer.fetched == 0 and package.parsed == []


def test_one_that_fails_its_trial_is_not_kept_and_not_parsed_here(tmp_path, package, monkeypatch):
    def fail(raw):
        raise TrialFailed("it took more than 60 s")

    monkeypatch.setattr(sent_tokenizer, "try_tokenizer", fail)
    peer = Joining(tmp_path)
    with pytest.raises(DataError, match="cannot be used: it took more than 60 s"):
        peer.admit(spec_of())
    assert not peer.consent.paths.tokenizer.exists() and package.parsed == []


def test_one_that_does_not_arrive_is_named_with_the_remedy(tmp_path, package):
    peer = Joining(tmp_path, answer=BadReply("expected a chunk"))
    with pytest.raises(DataError, match=r"did not arrive: expected a chunk; .*--tokenizer PATH"):
        peer.admit(spec_of())


def test_one_of_another_vocabulary_than_the_model_is_refused(tmp_path, package):
    small = Layout(names=("w",), shapes=((5, 5),))
    with pytest.raises(ModelError, match="expected a model of 25 parameters"):
        Joining(tmp_path).admit(spec_of(), small)


@pytest.mark.parametrize("own", [FILE, OTHER])
def test_the_owners_copy_is_read_only_if_it_is_the_same(tmp_path, package, own):
    (tmp_path / "own.json").write_bytes(own)
    path = str(tmp_path / "own.json")
    peer = Joining(
        tmp_path / "state", tokenizer=path, allowed=Allowed(files=frozenset({path})), yes=True
    )
    (tmp_path / "state").mkdir()
    if own == FILE:
        peer.admit(spec_of())
    else:
        with pytest.raises(DataError, match=r"own.json' is not the run's: expected the SHA-256"):
            peer.admit(spec_of())
        assert package.parsed == []
    assert peer.fetched == 0


def test_a_path_of_the_run_is_not_read_because_it_has_a_digest(tmp_path, package):
    (tmp_path / "secret.json").write_bytes(FILE)
    spec = spec_of(tokenizer=str(tmp_path / "secret.json"))
    for allowed in (Allowed(), Allowed(sent_tokenizer=tmp_path / "tokenizer.json")):
        with pytest.raises(DataError, match="a path on this machine"):
            open_tokenizer(spec, allowed)


def test_the_kept_file_is_no_data_and_no_tokenizer_without_a_digest(tmp_path):
    kept = tmp_path / "tokenizer.json"
    kept.write_bytes(FILE)
    allowed = Allowed(sent_tokenizer=kept)
    spec = RunSpec.from_dict({"data": {"tokenizer": str(kept), "source": str(kept)}})
    with pytest.raises(DataError):
        allowed.expect_tokenizer(spec)
    with pytest.raises(DataError):
        allowed.expect_data(spec)


@pytest.mark.parametrize(
    ("of_run", "own", "told"),
    [
        ("bytes", "t.json", "the run's tokenizer is bytes, built in, not 't.json'; omit"),
        ("t.json", "bytes", "the run's tokenizer is a file, not 'bytes'; omit --tokenizer, or"),
    ],
)
def test_a_tokenizer_of_another_kind_is_refused(of_run, own, told):
    spec = RunSpec.from_dict({"data": {"tokenizer": of_run}})
    with pytest.raises(DataError, match=told):
        with_own_files(spec, data=None, tokenizer=own)


def test_peers_need_no_option_for_a_tokenizer_that_is_sent():
    spec = spec_of()
    assert options_for(spec) == []
    large = replace_bytes(spec)
    assert options_for(large) == ["--tokenizer PATH"]


def replace_bytes(spec):
    return spec.model_copy(update={"data": spec.data.model_copy(update={"tokenizer_bytes": None})})


# --- the trial, with a package `tokenizers` of the test's own

PACKAGE = """
import os, time

class Tokenizer:
    ids = []

    @classmethod
    def from_buffer(cls, raw):
        exec(raw)
        return cls()

    def get_vocab_size(self, with_added_tokens):
        return 3

    def get_vocab(self, with_added_tokens):
        return {"a": HIGHEST}

    def encode(self, text, add_special_tokens):
        return self

    def decode(self, ids):
        pass
"""


@pytest.fixture
def trial(tmp_path, monkeypatch):
    def run(code, highest=2):
        (tmp_path / "tokenizers.py").write_text(PACKAGE.replace("HIGHEST", str(highest)))
        try_tokenizer(code)

    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return run


def test_a_trial_passes_a_tokenizer_that_works(trial):
    trial(b"pass")


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (b"raise ValueError('no tokenizer')", "no tokenizer"),
        (b"os.abort()", "ended with -6"),
        (b"os.kill(os.getpid(), 9)", "ended with -9"),
        (b"bytearray(1 << 34)", "MemoryError"),
    ],
)
def test_a_trial_survives_what_the_parser_does_not(trial, code, told):
    with pytest.raises(TrialFailed, match=told):
        trial(code)


def test_a_trial_ends_a_parser_that_hangs(trial, monkeypatch):
    monkeypatch.setattr(tokenizer_trial, "TRIAL_S", 1.0)
    with pytest.raises(TrialFailed, match="it took more than 1 s"):
        trial(b"time.sleep(60)")


def test_token_ids_beyond_the_vocabulary_are_refused(trial):
    with pytest.raises(TrialFailed, match="expected token ids below 3"):
        trial(b"pass", highest=4_000_000_000)


def test_the_trial_imports_nothing_from_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "tokenizers.py").write_text("from pathlib import Path; Path('run').touch()")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TrialFailed):
        try_tokenizer(FILE)
    assert not (tmp_path / "run").exists()
