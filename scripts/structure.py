"""Count what a reader of the code meets: lines, loose modules, shared names, comments.

scripts/structure.py                 this tree
scripts/structure.py --root OTHER    another checkout, for example of an earlier commit
"""

import argparse
import ast
import io
import json
import re
import tokenize
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LAYERS = ("compression", "optim", "dht", "coordinator", "peer")
# The lab before it was a folder.
LAB = {
    *("advice", "baseline", "children", "demo", "measured", "plan", "plotting", "simulate"),
    *("simulation_report", "simulation_settings", "simulation_time", "step_time", "summary"),
    "work",
}
SHORT = 8  # lines of a helper that may as well stand where it is used
HEADLESS = re.compile(r"(What|Who|Whoever|Whether|How|Where|Of|Those)\b")


def modules(root):
    for layer in LAYERS:
        for path in sorted((root / layer).rglob("*.py")):
            if not path.stem.endswith("_pb2"):
                yield path.relative_to(root), path.read_text(encoding="utf-8")


def is_lab(path):
    return path.parts[0] == "peer" and ("lab" in path.parts or path.stem in LAB)


def comments(text):
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(token.type == tokenize.COMMENT for token in tokens)


def functions(tree):
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    return [node for node in ast.walk(tree) if isinstance(node, kinds)]


def used_once(tree, text):
    """Return the private functions of a module that are short and used exactly once in it."""
    words = Counter(re.findall(r"\w+", text))
    return [
        node
        for node in functions(tree)
        if node.name.startswith("_")
        and not node.name.startswith("__")
        and node.end_lineno - node.lineno < SHORT
        and words[node.name] == 2
    ]


def docstrings(tree):
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module
    found = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds))
    return [text for text in found if text]


def count(root):
    lines = Counter()
    classes = defaultdict(set)
    totals = Counter()
    for path, text in modules(root):
        tree = ast.parse(text)
        size = text.count("\n")
        kind = "lab" if is_lab(path) else "dashboard" if "dashboard" in path.parts else "core"
        lines[kind] += size
        totals["files"] += 1
        totals["comments"] += comments(text)
        totals["functions"] += len(functions(tree))
        totals["used_once"] += len(used_once(tree, text))
        told = docstrings(tree)
        totals["docstrings"] += len(told)
        totals["headless"] += sum(bool(HEADLESS.match(text)) for text in told)
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                classes[node.name].add(path)
            is_import = isinstance(node, ast.ImportFrom) and node.module
            if is_import and path.parts[0] == "peer":
                totals["coordinator_imports"] += node.module.startswith("atoll.coordinator")
                inside = node.module.startswith("atoll.coordinator.run")
                totals["coordinator_imports_beyond_run"] += (
                    node.module.startswith("atoll.coordinator") and not inside
                )
    loose = [p for p, _ in modules(root) if len(p.parts) == 2 and p.parts[0] == "peer"]
    all_lines = sum(lines.values())
    return {
        "files": totals["files"],
        "lines": all_lines,
        "lines_without_lab_and_dashboard": lines["core"],
        "modules_loose_in_peer": sum(path.stem != "__init__" for path in loose),
        "class_names_shared": sum(len(paths) > 1 for paths in classes.values()),
        "imports_of_coordinator_by_peer": totals["coordinator_imports"],
        "of_them_beyond_run": totals["coordinator_imports_beyond_run"],
        "comments_per_1000_lines": round(1000 * totals["comments"] / all_lines, 1),
        "helpers_used_once_percent": round(100 * totals["used_once"] / totals["functions"], 1),
        "headless_docstrings_percent": round(100 * totals["headless"] / totals["docstrings"], 1),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--root", type=Path, default=ROOT, help="Checkout to count (default: this)."
    )
    print(json.dumps(count(parser.parse_args().root), indent=1))


if __name__ == "__main__":
    main()
