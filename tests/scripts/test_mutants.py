"""scripts/mutants.py on a tree of one module; and the product's own list is up to date."""

import json
from pathlib import Path

import mutants
import pytest

ROOT = Path(__file__).parents[2]

MODULE = """\
def largest(values):
    if not values:
        raise ValueError("no values")
    while len(values) > 1:
        values = values[1:] if values[0] < values[1] else [values[0], *values[2:]]
    return values[0]
"""
TEST = """\
from atoll.optim.module import largest

def test_largest():
    assert largest([1, 3, 2]) == 3
"""


@pytest.fixture
def tree(tmp_path):
    root = tmp_path / "tree"
    for folder in ("optim", "tests"):
        (root / folder).mkdir(parents=True)
    (root / "optim" / "__init__.py").touch()  # before any other package of this name
    (root / "optim" / "module.py").write_text(MODULE)
    (root / "tests" / "test_module.py").write_text(TEST)
    return root


def write_list(tree, *changes):
    text = "".join(
        f'[[mutant]]\nfile = "optim/module.py"\nfind = {json.dumps(find)}\n'
        f"replace = {json.dumps(replace)}\nbreaks = {json.dumps(breaks)}\n"
        'tests = ["tests/test_module.py"]\n'
        for find, replace, breaks in changes
    )
    (tree / "tests" / "mutants.toml").write_text(text)


SMALLEST = ("values[0] < values[1]", "values[0] > values[1]", "the smallest is returned")
EMPTY = ("if not values:", "if False:", "an empty list is accepted")
ENDLESS = (
    "return values[0]",
    'while True:\n        __import__("time").sleep(0.1)',  # which takes no processor
    "no end",
)


def run(tree, capsys, *arguments):
    status = mutants.main(["--root", str(tree), "--json", *arguments])
    return status, capsys.readouterr().out.splitlines()


def test_mutants_are_counted_and_the_tree_is_left_alone(tree, capsys):
    write_list(tree, SMALLEST, EMPTY)
    status, lines = run(tree, capsys)
    result = json.loads(lines[-1])
    assert status == 1  # half is less than 95%
    assert result["share"] == 0.5
    assert result["mutants"] == {
        "optim/module.py: the smallest is returned": "noticed",
        "optim/module.py: an empty list is accepted": "survived",
    }
    assert result["counts"]["optim"] == {"noticed": 1, "survived": 1, "stale": 0, "broken": 0}
    assert (tree / "optim" / "module.py").read_text() == MODULE


def test_only_those_that_match_run(tree, capsys):
    write_list(tree, SMALLEST, EMPTY)
    assert mutants.main(["--root", str(tree), "--list", "--only", "smallest"]) == 0
    assert capsys.readouterr().out.splitlines() == ["optim/module.py: the smallest is returned"]


def test_a_text_that_does_not_occur_exactly_once_is_stale(tree, capsys):
    write_list(tree, SMALLEST, ("values[9]", "None", "never"), ("values[0]", "None", "twice"))
    status, lines = run(tree, capsys)
    assert status == 1
    found = json.loads(lines[-1])["mutants"]
    assert found["optim/module.py: never"] == found["optim/module.py: twice"] == "stale"


def test_a_change_that_is_no_python_is_broken(tree, capsys):
    """Its file cannot be imported, so any test would seem to notice it."""
    write_list(tree, SMALLEST, ('raise ValueError("no values")', "", "no refusal"))
    status, lines = run(tree, capsys)
    assert status == 1
    assert json.loads(lines[-1])["mutants"]["optim/module.py: no refusal"] == "broken"


def test_tests_that_exceed_the_limit_notice_the_mutant(tree, capsys):
    write_list(tree, ENDLESS)
    status, lines = run(tree, capsys, "--limit", "30")  # the unchanged tests took 10 s once
    assert (status, json.loads(lines[-1])["share"]) == (0, 1.0)


def test_tests_that_fail_without_a_change_measure_nothing(tree, capsys):
    write_list(tree, SMALLEST)
    (tree / "tests" / "test_module.py").write_text(TEST.replace("== 3", "== 4"))
    assert mutants.main(["--root", str(tree)]) == 2
    assert "fail without any change" in capsys.readouterr().err


def test_the_list_is_printed_without_a_run(tree, capsys):
    write_list(tree, SMALLEST, EMPTY)
    assert mutants.main(["--root", str(tree), "--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_a_stale_mutant_is_named_in_the_list(tree, capsys):
    write_list(tree, SMALLEST, ("values[9]", "None", "nothing"))
    assert mutants.main(["--root", str(tree), "--list"]) == 1
    assert capsys.readouterr().out.splitlines()[1].startswith("stale: optim/module.py: nothing")


def test_the_products_own_list_is_sound():
    found = mutants.read_list(ROOT / "tests" / "mutants.toml")
    assert len(found) >= 150
    assert len({mutant.name for mutant in found}) == len(found)
    for mutant in found:
        assert mutant.find != mutant.replace and mutant.tests, mutant.name


def test_no_mutant_of_the_products_list_is_stale(capsys):
    """Change an entry of tests/mutants.toml with its line; delete it with its rule."""
    status = mutants.main(["--list"])
    stale = [line for line in capsys.readouterr().out.splitlines() if line.startswith("stale: ")]
    assert (status, stale) == (0, [])


def test_the_tests_of_the_products_list_exist():
    """A test that cannot be found would stop the script before its first mutant."""
    found = mutants.read_list(ROOT / "tests" / "mutants.toml")
    texts = {}
    for test in {test for mutant in found for test in mutant.tests}:
        path, *names = test.split("::")
        if path not in texts:
            texts[path] = (ROOT / path).read_text("utf-8") if (ROOT / path).is_file() else ""
        missing = [name for name in names if f" {name.partition('[')[0]}(" not in texts[path]]
        assert texts[path] and not missing, test
