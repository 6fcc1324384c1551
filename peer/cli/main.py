"""The `atoll` command line.

Only the chosen command's module is imported, so `atoll --help` answers at once. Exit codes:

    0    done
    1    failed: the work could not be done (network, disk, ...), or the owner said no to the run
    2    the input is wrong: an argument, RUN.toml, an invite, a checkpoint, a port in use, ...;
         or it needs a yes (--yes) or a name (--allow-model, --data) that was not given
    130  stopped by Ctrl-C; 128 + N if interrupted by signal N

A foreseen failure prints one message on stderr and no traceback; nothing in it can control the
terminal. Its exit code follows from the
class that is raised, in any layer:

    exception                                   code
    defined in atoll.*, a ValueError            2     (SpecError, InviteError, CheckpointError, ...)
    defined in atoll.*, one of bad_inputs()     2
    defined in atoll.*, anything else           1     (TransportError, ...)
    OSError: address in use                     2
    OSError: no space left                      1
    OSError with a file name                    2     (not found, no permission, a directory, ...)
    OSError                                     1
    sqlite3.OperationalError                    1     (a full disk, a file that cannot be written)
    out of memory, as Python or torch say it    1

Anything else is a bug and keeps its traceback.
"""

import argparse
import atexit
import errno
import gc
import importlib
import io
import logging
import os
import sqlite3
import sys
import threading
import traceback
import warnings
from collections.abc import Sequence
from importlib.metadata import version
from types import ModuleType, TracebackType

from atoll.peer.cli import SUMMARIES

OK, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130

MESSAGE_MAX = 8000  # the end of a child's log has 2,000 characters, a spec some tens of problems

EXAMPLES = """\
examples:
  atoll demo                     train across 4 peers on this machine
  atoll init RUN.toml            write a commented configuration
  atoll coordinator RUN.toml     start the run and print its invite
  atoll peer INVITE              join the run, on as many machines as you like
  atoll dashboard INVITE         watch the run

Run `atoll COMMAND --help` for the options of a command."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    if argv is None:  # as a program
        _guard_terminal()
        _write_any_text()
    # Before torch reads it: new vectors in huge pages take half the time to fill (Linux).
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # it logs failures that we report ourselves
    atexit.register(_leave_garbage)
    try:
        return _main(list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:
        if argv is None:  # a coroutine that was made and not begun is freed below
            warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
        return INTERRUPTED


def _leave_garbage() -> None:
    """Spare the interpreter its last search for garbage, in all of torch: 1.2 s of CPU for 0.2.

    Triton, which CUDA builds of torch load, counts its objects at the end. Those in cycles would
    count as leaks, with 25 lines on stderr ("nanobind: leaked 64 types!").
    """
    if "triton" not in sys.modules:
        gc.freeze()


def _main(arguments: Sequence[str]) -> int:
    chosen = next((word for word in arguments if not word.startswith("-")), None)
    module = _load(chosen) if chosen in SUMMARIES else None
    parser = _parser(module, chosen)
    args, unknown = parser.parse_known_args(arguments)
    if unknown:
        getattr(args, "refuse_unknown", lambda _: parser.parse_args(arguments))(unknown)
    if module is None:
        parser.print_help(sys.stderr)
        return BAD_INPUT
    return _run(module, args)


def _load(name: str) -> ModuleType:
    return importlib.import_module(f"atoll.peer.cli.{name}")


def _parser(module: ModuleType | None, chosen: str | None) -> argparse.ArgumentParser:
    # argparse's own table of subcommands breaks the lines of the longer names.
    parser = argparse.ArgumentParser(
        prog="atoll",
        usage="atoll [-h] [--version] COMMAND ...",
        description=f"Train one model together over ordinary internet links.\n\n{_table()}",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"atoll {version('atoll')}")
    subparsers = parser.add_subparsers(
        prog="atoll", dest="command", metavar="COMMAND", help=argparse.SUPPRESS
    )
    for name in SUMMARIES:
        if module is not None and name == chosen:
            module.add_parser(subparsers)
        else:
            subparsers.add_parser(name)
    return parser


def _table() -> str:
    rows = (f"  {name:<13}{summary}" for name, summary in SUMMARIES.items())
    return "\n".join(["commands:", *rows])


def _run(module: ModuleType, args: argparse.Namespace) -> int:
    try:
        return int(module.run(args))
    except BrokenPipeError:
        # The reader of our output is gone; the interpreter's last flush must not fail as well.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except Exception as error:
        code = exit_code(error)
        if code is None:
            raise
        print(f"atoll {args.command}: {_printable(error)}", file=sys.stderr)
        return code


def _printable(error: BaseException) -> str:
    """Return the message without what could control a terminal: a refusal is another's text."""
    from atoll.coordinator.run.spec_problems import SpecError
    from atoll.coordinator.run.text import clean, clean_lines
    from atoll.peer.lab.children import ChildFailed, ChildRefused

    # Only these have several lines of ours; another's line must not pass for one of ours.
    if isinstance(error, (SpecError, ChildFailed, ChildRefused)):
        return clean_lines(message(error), num_max=MESSAGE_MAX)
    return clean(message(error), num_max=MESSAGE_MAX)


def _write_any_text() -> None:
    """Print characters that the terminal's encoding lacks as question marks."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _guard_terminal() -> None:
    """Clean tracebacks and the log records of processes without a log file."""

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        from atoll.coordinator.run.text import clean_lines

        text = "".join(traceback.format_exception(kind, error, trace))
        print(clean_lines(text), end="", file=sys.stderr)

    def show_of_thread(failed: threading.ExceptHookArgs) -> None:
        if failed.exc_value is not None and failed.exc_type is not SystemExit:
            show(failed.exc_type, failed.exc_value, failed.exc_traceback)

    class Formatter(logging.Formatter):
        def format(self, record: logging.LogRecord) -> str:
            from atoll.coordinator.run.text import CleanFormatter

            return CleanFormatter().format(record)

    sys.excepthook = show
    threading.excepthook = show_of_thread
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(Formatter())


def bad_inputs() -> tuple[type[Exception], ...]:
    """Return the classes that mean bad input although they are not a ValueError.

    Imported here: by the time an error is reported, its module is loaded anyway.
    """
    from atoll.coordinator.rpc import client_errors
    from atoll.coordinator.service.server import StartError
    from atoll.dht.identity import IdentityError
    from atoll.optim.log.store_errors import StoreCorrupt, WrongRun

    return (
        client_errors.NotWelcome,  # the coordinator does not accept the invite's token
        client_errors.Invalid,  # the coordinator cannot do what was asked of it
        client_errors.WrongCertificate,  # another run's, at the invite's address
        client_errors.WrongRunOrVersion,
        StartError,  # a state directory or port that is in use
        IdentityError,  # not a key file
        StoreCorrupt,  # the state directory holds a damaged log
        WrongRun,  # ... or another run's
    )


def exit_code(error: BaseException) -> int | None:
    """Return the exit code of a foreseen failure by the table above, None for a bug."""
    if type(error).__module__.partition(".")[0] == "atoll":
        bad_input = isinstance(error, ValueError) or isinstance(error, bad_inputs())
        return BAD_INPUT if bad_input else FAILED
    if isinstance(error, OSError):
        named = error.filename is not None and error.errno != errno.ENOSPC
        return BAD_INPUT if named or error.errno == errno.EADDRINUSE else FAILED
    is_foreseen = isinstance(error, sqlite3.OperationalError) or _is_out_of_memory(error)
    return FAILED if is_foreseen else None


def _is_out_of_memory(error: BaseException) -> bool:
    torch = sys.modules.get("torch")  # not imported for this: it takes seconds
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return True
    # torch has no class for this on the CPU, only the words of its allocator.
    on_cpu = isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    return on_cpu or isinstance(error, MemoryError)


def message(error: BaseException) -> str:
    """Return the message for a foreseen failure: the fact, then the remedy."""
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"{error}; free some space, or choose a folder on another disk"
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}{_remedy(error)}"
    if isinstance(error, sqlite3.OperationalError):
        return (
            f"cannot write the log of the run ({error}); free some space on the disk of --state-dir"
        )
    if _is_out_of_memory(error):
        return (
            f"out of memory ({str(error) or 'MemoryError'}); use a smaller model or batch, or a "
            "machine with more memory (`atoll plan RUN.toml` estimates the need)"
        )
    return str(error) or type(error).__name__


def _remedy(error: OSError) -> str:
    folder = os.path.dirname(os.fsdecode(error.filename))
    if error.errno != errno.ENOENT or not folder or os.path.isdir(folder):
        return ""
    return f"; create the folder {folder} first, or choose another"


if __name__ == "__main__":
    sys.exit(main())
