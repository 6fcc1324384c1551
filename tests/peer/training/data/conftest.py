import pytest

from support.texts import text


@pytest.fixture
def folder(tmp_path):
    for number in range(60):
        (tmp_path / f"part{number % 3}").mkdir(exist_ok=True)
        (tmp_path / f"part{number % 3}" / f"{number}.txt").write_text(text(number))
    return tmp_path
