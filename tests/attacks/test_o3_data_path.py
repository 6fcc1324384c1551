"""O3: a run names files of its peers as its data; what the model learns, it sends as gradients."""

import sys
import types

import pytest

from atoll.coordinator.run.spec import RunSpec
from atoll.peer.errors import DataError
from atoll.peer.training.data import documents
from atoll.peer.training.opening import open_corpus, open_tokenizer
from atoll.peer.training.permission import Allowed, options_for, with_own_files


def spec_of(source="stdlib", **data):
    return RunSpec.from_dict({"data": {"source": source, "seq_len": 8, **data}})


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home with a secret, and the list of files that were opened in it."""
    keys = tmp_path / ".ssh"
    keys.mkdir()
    (keys / "id_rsa").write_text("the secret key " * 100)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("source", ["~/.ssh", "~/.ssh/id_rsa", ".ssh", "../../etc", "/etc/passwd"])
@pytest.mark.parametrize("format", ["auto", "text", "jsonl"])
def test_a_path_that_the_run_names_is_not_read(home, monkeypatch, source, format):
    monkeypatch.setattr(documents, "documents", None)
    with pytest.raises(DataError, match="name your copy with --data PATH"):
        open_corpus(spec_of(source, format=format))
    with pytest.raises(DataError, match="--data PATH"):
        Allowed(files=frozenset({"~/.ssh/id", "texts"})).expect(spec_of(source, format=format))


@pytest.mark.parametrize(
    ("source", "format"),
    [
        ("hf:text", "auto"),  # a loader of `datasets`, which reads the working directory
        ("hf:json@x", "auto"),
        ("hf:.ssh", "auto"),
        ("hf:~/.ssh", "auto"),
        ("hf:/etc", "auto"),
        ("hf:../x", "auto"),
        ("hf:", "auto"),
        (".ssh", "hf"),
        ("/etc/passwd", "hf"),
        ("stdlib", "hf"),
        ("hf:mine/texts", "auto"),  # the name of a folder here
        ("hf:https://example.org/x", "auto"),
    ],
)
def test_the_name_of_a_data_set_reaches_no_file(home, source, format):
    (home / "mine" / "texts").mkdir(parents=True)
    with pytest.raises(DataError, match="expected OWNER/NAME on the Hugging Face hub"):
        open_corpus(spec_of(source, format=format))


class FakeHub:
    """The package `datasets`; a data set on the hub describes its own files."""

    def __init__(self, files):
        self.config = types.SimpleNamespace(HF_DATASETS_TRUST_REMOTE_CODE=None)
        self.files, self.opened, self.token = files, False, "unset"

    def load_dataset_builder(self, path, config, token, revision=None):
        self.token, self.revision = token, revision
        assert self.config.HF_DATASETS_TRUST_REMOTE_CODE is False
        described = types.SimpleNamespace(data_files=self.files)
        return types.SimpleNamespace(config=described, as_streaming_dataset=self._open)

    def _open(self, split):
        self.opened, self.split = True, split


@pytest.mark.parametrize(
    "file",
    [
        "/home/me/.ssh/id_rsa",
        "file:///etc/passwd",
        "zip://*.txt::/home/me/secrets.zip",
        "simplecache::/etc/passwd",
        "hf://datasets/some/name@1/a.txt::/etc/passwd",
        "http://169.254.169.254/latest/meta-data",
        "https://router.local/admin",
        "hf://datasets/me/private@1/a.txt",
        "hf://datasets/some/name-of-mine@1/a.txt",
        None,
    ],
)
def test_a_data_set_on_the_hub_reaches_no_file_or_address_here(home, monkeypatch, file):
    own = "hf://datasets/some/name@1/a.txt"
    hub = FakeHub({"valid": [own], "train": [own, file]} if file else None)
    monkeypatch.setitem(sys.modules, "datasets", hub)
    with pytest.raises(DataError, match="expected files of its own on the Hugging Face hub"):
        open_corpus(spec_of("hf:some/name"))
    assert not hub.opened


@pytest.mark.parametrize("file", ["", "zip://b.txt::"])
def test_a_data_set_of_files_on_the_hub_is_opened(home, monkeypatch, file):
    hub = FakeHub({"train": [f"{file}hf://datasets/some/name@1/a.txt"]})
    monkeypatch.setitem(sys.modules, "datasets", hub)
    open_corpus(spec_of("hf:some/name@config"))
    assert hub.opened
    assert hub.token is False  # what the run names is read without the owner's login
    open_corpus(spec_of("hf:some/name"), Allowed(files=frozenset({"hf:some/name"})))
    assert hub.token is None


def test_a_data_set_is_opened_at_the_runs_revision_and_split(home, monkeypatch):
    hub = FakeHub({"train": ["hf://datasets/some/name@1/a.txt"]})
    monkeypatch.setitem(sys.modules, "datasets", hub)
    spec = spec_of("hf:some/name", revision="v2", split="test")
    open_corpus(spec)
    assert (hub.revision, hub.split) == ("v2", "test")
    own = with_own_files(spec, data="hf:some/name@config", tokenizer=None)
    open_corpus(own, Allowed(files=frozenset({"hf:some/name@config"})))
    assert (hub.revision, hub.split) == (None, "train")  # they are of the run's data set


@pytest.mark.parametrize("source", ["stdlib", "hf:some/name", "hf:some/name@a.config-1"])
def test_public_data_is_allowed(home, source):
    Allowed().expect(spec_of(source))


def test_a_tokenizer_that_the_run_names_is_not_read(home):
    spec = spec_of(tokenizer="~/.ssh/id_rsa")
    for refuse in (open_corpus, open_tokenizer):
        with pytest.raises(DataError, match="name your copy with --tokenizer PATH"):
            refuse(spec)


def test_the_owners_own_path_is_read_instead(home):
    (home / "mine.txt").write_text("my own words " * 50)
    allowed = Allowed(files=frozenset({"mine.txt"}))
    spec = with_own_files(spec_of("~/.ssh"), data="mine.txt", tokenizer=None)
    corpus = open_corpus(spec, allowed)
    assert b"secret" not in bytes(corpus.train_N) + bytes(corpus.valid_N)
    with pytest.raises(DataError):
        open_corpus(spec_of("~/.ssh"), allowed)


def test_the_organiser_is_told_what_the_owners_of_peers_must_name(home):
    assert options_for(spec_of()) == options_for(spec_of("hf:some/name")) == []
    model = {"model": {"custom": "mine:build"}}
    spec = RunSpec.from_dict(model | {"data": {"source": "texts", "tokenizer": "t.json"}})
    assert options_for(spec) == ["--allow-model mine:build", "--data PATH", "--tokenizer PATH"]
