"""Change one line of the product at a time, and count the changes that a test notices.

    scripts/mutants [--only REGEX] [--jobs N] [--json]

tests/mutants.toml lists the mutants:

    [[mutant]]
    file = "peer/rounds/consensus/voter.py"
    find = "self._check_root(entry)"    # exact text that occurs once in the file
    replace = "pass"
    breaks = "a wrong state root is voted for"
    tests = ["tests/attacks/test_liars.py"]    # what should fail: paths or node ids

Each worker has a copy of the tree. It applies a mutant, runs its tests, and restores the file. A
mutant is noticed if a test fails or exceeds the limit; it survives if all pass. Before the first
one, all chosen tests run once on the unchanged copy: they must pass, or every mutant would count
as noticed.

Exit status: 0 if at least 95% are noticed and none is stale or broken, 1 otherwise, 2 if nothing
could be measured, 130 after Ctrl-C. A mutant is stale if its `find` does not occur exactly once.
It is broken if the changed file is no Python: any test would fail then. `--list` exits with 1 if
a mutant is stale.
"""

import argparse
import ast
import contextlib
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENOUGH = 0.95
LEFT_OUT = (
    *(".git", ".venv", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis"),
    *("__pycache__", "build", "dist", "out", "runs", "*.egg-info"),
)
NOTICED, SURVIVED, STALE, BROKEN = "noticed", "survived", "stale", "broken"
PASSED, FAILED, INTERRUPTED = 0, 1, 2  # pytest's statuses; a module that fails to import gives 2


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One change of one file."""

    file: str
    find: str
    replace: str
    breaks: str
    tests: tuple[str, ...]

    @property
    def name(self):
        """The file and what breaks there."""
        return f"{self.file}: {self.breaks}"

    def applied(self, text):
        """Return the changed text of the file; None if the mutant is stale."""
        return text.replace(self.find, self.replace) if text.count(self.find) == 1 else None


def read_list(path):
    """Return the mutants of a list. Raises ValueError if one lacks a field."""
    mutants = []
    for number, fields in enumerate(tomllib.loads(path.read_text("utf-8"))["mutant"], 1):
        try:
            mutants.append(Mutant(**fields | {"tests": tuple(fields["tests"])}))
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path}: mutant {number}: {error}") from None
    return mutants


class Runner:
    """Runs pytest in copies of a tree; `stop` ends what is running."""

    def __init__(self, root, limit_s):
        self._root = root
        self._limit_s = limit_s
        self._running = set()
        self._lock = threading.Lock()
        self._stopped = False

    def copy(self, folder):
        """Copy the tree, with the links under which its packages are imported."""
        shutil.copytree(self._root, folder, ignore=shutil.ignore_patterns(*LEFT_OUT))
        links = folder / "build" / "types" / "atoll"
        links.mkdir(parents=True)
        for package in ("peer", "optim", "compression", "dht", "coordinator"):
            if (folder / package).is_dir():
                (links / package).symlink_to(folder / package)

    def test(self, folder, tests, limit_s=None):
        """Return pytest's status and output; the status is None if the limit was exceeded."""
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider"]
        path = os.pathsep.join([str(folder / "build" / "types"), os.environ.get("PYTHONPATH", "")])
        env = os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
        with self._lock:
            if self._stopped:
                raise KeyboardInterrupt
            # A session of its own: a test's processes end with it.
            process = subprocess.Popen(
                [*command, "-p", "no:randomly", *tests],
                cwd=folder,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
            self._running.add(process)
        try:
            output, _ = process.communicate(timeout=limit_s or self._limit_s)
            return process.returncode, output
        except subprocess.TimeoutExpired:
            return None, "the tests exceeded the limit"
        finally:
            _kill(process)
            process.communicate()
            with self._lock:
                self._running.discard(process)

    def try_mutant(self, folder, mutant):
        """Return how a mutant fared, and why if it could not be judged."""
        path = folder / mutant.file
        text = path.read_text("utf-8") if path.is_file() else ""
        changed = mutant.applied(text)
        if changed is None:
            return STALE, f"expected its text once, got {text.count(mutant.find)}"
        try:
            ast.parse(changed)
        except SyntaxError as error:  # every test would notice it, whatever it checks
            return BROKEN, f"expected Python after the change, got: {error}"
        path.write_text(changed, "utf-8")
        try:
            status, output = self.test(folder, mutant.tests)
        finally:
            path.write_text(text, "utf-8")
        if status == PASSED:
            return SURVIVED, ""
        if status in (None, FAILED, INTERRUPTED):
            return NOTICED, ""
        return BROKEN, _last_line(output)

    def stop(self):
        """End all tests that run, and start no more."""
        with self._lock:
            self._stopped = True
            for process in self._running:
                _kill(process)


def _kill(process):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _last_line(output):
    lines = [line for line in output.splitlines() if line.strip()]
    return lines[-1] if lines else "no output"


def run_all(mutants, *, root, jobs, limit_s, report):
    """Yield (mutant, how it fared, why, seconds) as they end.

    Raises:
        RuntimeError: the tests fail without any change.
    """
    runner = Runner(root, limit_s)
    with tempfile.TemporaryDirectory(prefix="mutants-") as temporary:
        folders = queue.Queue()
        for number in range(jobs):
            folder = Path(temporary) / f"tree-{number}"
            runner.copy(folder)
            folders.put(folder)

        def work(mutant):
            folder, started = folders.get(), time.monotonic()
            try:
                return (*runner.try_mutant(folder, mutant), time.monotonic() - started)
            finally:
                folders.put(folder)

        try:
            tests = sorted({test for mutant in mutants for test in mutant.tests})
            report(f"{len(mutants)} mutants; first their tests on the unchanged tree")
            status, output = runner.test(folder, tests, limit_s * len(tests))
            if status != PASSED:
                raise RuntimeError(f"the tests fail without any change:\n{output}")
            with ThreadPoolExecutor(jobs) as pool:
                futures = {pool.submit(work, mutant): mutant for mutant in mutants}
                try:
                    for future in as_completed(futures):
                        yield futures[future], *future.result()
                except BaseException:
                    runner.stop()
                    pool.shutdown(cancel_futures=True)
                    raise
        finally:
            runner.stop()


def counts(results):
    """Return the counts of each package, and of all under ""."""
    table = {}
    for mutant, fate, _, _ in results:
        for key in (mutant.file.split("/")[0], ""):
            row = table.setdefault(key, {NOTICED: 0, SURVIVED: 0, STALE: 0, BROKEN: 0})
            row[fate] += 1
    return table


def main(arguments=None):
    """Run the mutants that were asked for; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, default=ROOT, help="tree to test (default: this one)")
    parser.add_argument("--mutants", type=Path, help="list (default: tests/mutants.toml)")
    parser.add_argument("--list", action="store_true", help="names, stale ones marked; no run")
    parser.add_argument("--only", type=re.compile, metavar="REGEX", help="those whose name matches")
    parser.add_argument("--jobs", type=int, default=1, help="copies at work at once (default 1)")
    parser.add_argument(
        "--limit", type=float, default=120.0, help="seconds for each mutant's tests (default 120)"
    )
    parser.add_argument("--json", action="store_true", help="results as JSON on the last line")
    options = parser.parse_args(arguments)
    try:
        mutants = read_list(options.mutants or options.root / "tests" / "mutants.toml")
    except (OSError, KeyError, ValueError) as error:
        print(f"mutants: the list cannot be read: {error}", file=sys.stderr)
        return 2
    if options.only is not None:
        mutants = [mutant for mutant in mutants if options.only.search(mutant.name)]
    if options.list:
        return print_list(mutants, options.root)
    if not mutants:
        print("mutants: no mutant matches --only; see --list", file=sys.stderr)
        return 2
    return measure(mutants, options)


def print_list(mutants, root):
    """Print the names, and which are stale; return 1 if any is."""
    status = 0
    for mutant in mutants:
        path = root / mutant.file
        is_stale = not path.is_file() or mutant.applied(path.read_text("utf-8")) is None
        status |= is_stale
        print(f"stale: {mutant.name}" if is_stale else mutant.name)
    return int(status)


def measure(mutants, options):
    """Run mutants, report each, and return the exit status."""
    results = []
    try:
        for result in run_all(
            mutants,
            root=options.root.resolve(),
            jobs=max(1, min(options.jobs, len(mutants))),
            limit_s=options.limit,
            report=lambda text: print(text, flush=True),
        ):
            results.append(result)
            mutant, fate, why, seconds = result
            text = f"{len(results)}/{len(mutants)} {fate} ({seconds:.0f} s) {mutant.name}"
            print(f"{text}: {why}" if why else text, flush=True)
    except RuntimeError as error:
        print(f"mutants: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"mutants: stopped after {len(results)} of {len(mutants)}", file=sys.stderr)
        return 130
    table = counts(results)
    total = table[""]
    judged = total[NOTICED] + total[SURVIVED]
    share = total[NOTICED] / judged if judged else 0.0
    print(f"{total[NOTICED]} of {judged} noticed ({share:.1%}), {total[STALE]} stale")
    if options.json:
        fates = {mutant.name: fate for mutant, fate, _, _ in results}
        print(json.dumps({"counts": table, "share": share, "mutants": fates}, sort_keys=True))
    return int(share < ENOUGH or bool(total[STALE] or total[BROKEN]))


if __name__ == "__main__":
    sys.exit(main())
