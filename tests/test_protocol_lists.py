"""The refusal codes, the table in docs/protocol.md, and the code that gives them are one list."""

import ast
import re
from collections import Counter
from pathlib import Path

from atoll.coordinator.run.phases import RoundPhase, RoundStage
from atoll.dht.refusals import RefusalCode
from atoll.dht.transport import MAX_CODE_BYTES
from atoll.peer.training.statistics import TrainerPhase
from support.sources import parsed

ROOT = Path(__file__).parents[1]
LAYERS = ("dht", "coordinator", "peer")


def product():
    for layer in LAYERS:
        for path in sorted((ROOT / layer).rglob("*.py")):
            if path.name != "refusals.py":
                yield path, parsed(path.read_text(encoding="utf-8"))


def documented():
    """The first cells of the table's rows."""
    text = (ROOT / "docs/protocol.md").read_text(encoding="utf-8")
    section = text.partition("\n## Refusal codes\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)


def test_the_protocol_lists_every_refusal_code_once():
    assert Counter(documented()) == Counter(code.value for code in RefusalCode)


def test_every_refusal_code_fits_on_the_wire_in_one_spelling():
    for code in RefusalCode:
        assert re.fullmatch(r"[a-z]+(-[a-z]+)*", code)
        assert len(code) <= MAX_CODE_BYTES
        assert code.name == code.replace("-", "_").upper()
        assert RefusalCode.read(code) is code


def test_every_refusal_code_is_given_by_the_product():
    used = {
        node.attr
        for _, tree in product()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "RefusalCode"
    }
    assert used - {"read"} == {code.name for code in RefusalCode}


def is_text(node):
    inner = node.elts if isinstance(node, ast.Tuple | ast.List | ast.Set) else [node]
    return any(isinstance(each, ast.Constant) and isinstance(each.value, str) for each in inner)


def refusal_by_text(node):
    """Whether a code is given or compared as text."""
    if isinstance(node, ast.Call):
        name = getattr(node.func, "id", getattr(node.func, "attr", ""))
        return name in ("Refused", "Refusal") and bool(node.args) and is_text(node.args[0])
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        return any(isinstance(s, ast.Attribute) and s.attr == "code" for s in sides) and any(
            is_text(s) for s in sides
        )
    return False


def test_no_refusal_is_given_or_compared_as_text():
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path, tree in product()
        for node in ast.walk(tree)
        if refusal_by_text(node)
    ]
    assert wrong == []


def test_the_reader_of_refusals_sees_text():
    for source in ('Refused("closed", "")', 'error.code == "closed"', 'e.code in ("a", C.B)'):
        assert refusal_by_text(ast.parse(source, mode="eval").body)


def test_the_protocol_lists_every_phase_once():
    text = (ROOT / "docs/protocol.md").read_text(encoding="utf-8")
    section = text.partition("\n## Phases\n")[2].partition("\n## ")[0]
    listed = re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)
    assert listed == [phase.value for phase in (*RoundPhase, *TrainerPhase, *RoundStage)]
