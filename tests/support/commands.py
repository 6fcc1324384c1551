"""What the tests of several commands share."""

import subprocess
import sys

from atoll.coordinator.run.invite import Invite


def refused(result):
    """One clear message, and none of Python's."""
    assert result.code == 2
    assert "Traceback" not in result.err
    assert result.out == ""
    return result.err


def loaded_by(*arguments):
    """Which of the modules that take long to import a command imports."""
    program = (
        f"import sys, atoll.peer.cli.main as c\ntry: c.main({list(map(str, arguments))})\n"
        "except SystemExit: pass\n"
        "print(*({'torch', 'hivemind', 'grpc', 'textual'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    return set(done.stdout.splitlines()[-1].split())


INVITE = Invite(
    addresses=("127.0.0.1:9",),
    run_id=bytes(32),
    run_key=bytes(32),
    tls_sha256=bytes(32),
).encode()


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
