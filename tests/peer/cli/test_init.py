"""`atoll init`: it writes a run that loads, and overwrites nothing."""

from atoll.coordinator.run.spec import RunSpec
from support.commands import refused


def test_init_writes_a_run_that_loads(atoll, tmp_path):
    result = atoll("init", "mine.toml")
    assert result.code == 0
    assert "atoll coordinator mine.toml" in result.out
    assert RunSpec.load(tmp_path / "mine.toml") == RunSpec()


def test_init_names_the_run(atoll, tmp_path):
    assert atoll("init", "--name", "fish", "--model", "nano").code == 0
    assert RunSpec.load(tmp_path / "RUN.toml").run.name == "fish"


def test_init_overwrites_nothing(atoll, tmp_path):
    (tmp_path / "RUN.toml").write_text("mine")
    assert "exists and was not changed" in refused(atoll("init"))
    assert (tmp_path / "RUN.toml").read_text() == "mine"


def test_init_of_a_folder_names_a_file_in_it(atoll, tmp_path):
    (tmp_path / "runs").mkdir()
    assert "runs is a folder; name a file in it: runs/RUN.toml" in refused(atoll("init", "runs"))


def test_init_in_a_folder_that_is_not_there(atoll):
    said = refused(atoll("init", "nowhere/RUN.toml"))
    assert "nowhere/RUN.toml: " in said and "create the folder nowhere first" in said
