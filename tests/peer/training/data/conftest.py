import json

import pytest

from support.texts import text


@pytest.fixture
def folder(tmp_path):
    for number in range(60):
        (tmp_path / f"part{number % 3}").mkdir(exist_ok=True)
        (tmp_path / f"part{number % 3}" / f"{number}.txt").write_text(text(number))
    return tmp_path


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A data set of Hugging Face on this machine, 90 documents in three files."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    pytest.importorskip("datasets")
    (tmp_path / "set").mkdir()
    for shard in range(3):
        rows = [json.dumps({"text": text(shard * 100 + i)}) for i in range(30)]
        (tmp_path / "set" / f"{shard}.jsonl").write_text("\n".join(rows))
    return f"hf:{tmp_path / 'set'}"
