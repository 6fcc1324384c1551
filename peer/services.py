"""Services of this user: commands that the system starts at boot, and again when they fail.

systemd on Linux, launchd on macOS, both without root. A service is one file that names the command;
nothing else of Atoll knows of it. Exit code 2 means wrong input, which a restart does not mend.
"""

from __future__ import annotations

import os
import plistlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from atoll.coordinator.run.text import clean

RESTART_S = 30
STOP_S = 60  # a peer saves its state, and leaves its round
ANSWER_S = 60.0
NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
MARK = "Written by `atoll service`"


class ServiceError(ValueError):
    """A service that cannot be made or removed; nothing was changed."""


class ServiceFailed(RuntimeError):
    """The system's service manager refused what was asked."""


@dataclass(frozen=True, kw_only=True)
class UserService:
    """A command to start at boot."""

    name: str
    words: Sequence[str]
    """the program and its arguments"""
    folder: Path
    """where it runs, so that relative paths mean what they mean now"""
    environment: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise ServiceError(
                f"expected a name of letters a-z, digits, '.', '_' and '-', got {self.name[:64]!r}"
            )
        if any(
            "\n" in word or "\0" in word
            for word in (*self.words, str(self.folder), *self.environment.values())
        ):
            raise ServiceError("expected arguments of one line each; put long ones into a file")


class Manager(Protocol):
    """Starts services at boot."""

    def text(self, service: UserService) -> str:
        """Return the file that describes a service."""
        ...

    def install(self, service: UserService) -> Path:
        """Write that file, and start the service now and at each boot. Raises ServiceFailed."""
        ...

    def remove(self, name: str) -> None:
        """Stop a service, and delete its file. Raises ServiceError, ServiceFailed."""
        ...

    def names(self) -> list[str]:
        """Return the services that `install` made."""
        ...

    def advice(self, name: str) -> list[str]:
        """Return what the owner should know of a service that runs."""
        ...


def manager() -> Manager:
    """Return this system's. Raises ServiceError if there is none."""
    if sys.platform == "darwin":
        return Launchd(Path.home() / "Library" / "LaunchAgents")
    if shutil.which("systemctl"):
        config = Path(os.environ.get("XDG_CONFIG_HOME", ""))
        base = config if config.is_absolute() else Path.home() / ".config"
        return Systemd(base / "systemd" / "user")
    raise ServiceError(
        "found neither systemd nor launchd; print the unit with --print, or use docs/deploy"
    )


@dataclass(frozen=True)
class Systemd:
    """systemd's manager of this user."""

    folder: Path

    def text(self, service: UserService) -> str:
        return "\n".join(
            [
                f"# {MARK}; `atoll service remove {service.name}` deletes it.",
                "[Unit]",
                f"Description=Atoll {service.name}",
                "StartLimitIntervalSec=0",
                "",
                "[Service]",
                f"WorkingDirectory={_percent(str(service.folder))}",
                *(f"Environment={_in_quotes(f'{k}={v}')}" for k, v in service.environment.items()),
                f"ExecStart={' '.join(map(_quoted, service.words))}",
                "Restart=on-failure",
                f"RestartSec={RESTART_S}",
                "RestartPreventExitStatus=2",
                f"TimeoutStopSec={STOP_S}",
                "",
                "[Install]",
                "WantedBy=default.target",
                "",
            ]
        )

    def install(self, service: UserService) -> Path:
        path = self._path(service.name)
        with _written(path, self.text(service)):
            self._systemctl("daemon-reload")
            self._systemctl("enable", path.name)
            self._systemctl("restart", path.name)  # starts it, or takes up what has changed
        return path

    def remove(self, name: str) -> None:
        path = self._path(name)
        _expect_own(path, self.names())
        self._systemctl("disable", "--now", path.name)
        path.unlink()
        self._systemctl("daemon-reload")

    def names(self) -> list[str]:
        return _own_names(self.folder, "atoll-", ".service")

    def advice(self, name: str) -> list[str]:
        unit = self._path(name).name
        lines = [f"its messages: journalctl --user -u {unit} -f"]
        if not _lingers():
            lines.append("it ends when you log out; to keep it: loginctl enable-linger")
        return lines

    def _path(self, name: str) -> Path:
        return self.folder / f"atoll-{name}.service"

    def _systemctl(self, *words: str) -> None:
        _run("systemctl", "--user", *words)


def _quoted(word: str) -> str:
    """Return a word of ExecStart, in which systemd would put in variables for `$`."""
    return _in_quotes(word.replace("$", "$$"))


def _in_quotes(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{_percent(escaped)}"'


def _percent(text: str) -> str:
    return text.replace("%", "%%")


def _lingers() -> bool:
    user = os.environ.get("USER", str(os.getuid()))
    try:
        told = subprocess.run(
            ["loginctl", "show-user", user, "--property=Linger", "--value"],
            capture_output=True,
            text=True,
            timeout=ANSWER_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return told.stdout.strip() == "yes"


@dataclass(frozen=True)
class Launchd:
    """launchd's manager of this user."""

    folder: Path

    def text(self, service: UserService) -> str:
        log = str(self._log(service.name))
        told = {
            "Label": _label(service.name),
            "AtollNote": MARK,
            "ProgramArguments": list(service.words),
            "WorkingDirectory": str(service.folder),
            "EnvironmentVariables": dict(service.environment),
            "RunAtLoad": True,
            # launchd knows no exit code 2, so it tries again what cannot work, each time.
            "KeepAlive": {"SuccessfulExit": False},
            "ThrottleInterval": RESTART_S,
            "ExitTimeOut": STOP_S,
            "StandardOutPath": log,
            "StandardErrorPath": log,
        }
        return plistlib.dumps(told).decode()

    def install(self, service: UserService) -> Path:
        path = self._path(service.name)
        if path.exists():
            self.remove(service.name)
        with _written(path, self.text(service)):
            _run("launchctl", "bootstrap", f"gui/{os.getuid()}", str(path))
        return path

    def remove(self, name: str) -> None:
        path = self._path(name)
        _expect_own(path, self.names())
        _run("launchctl", "bootout", f"gui/{os.getuid()}/{_label(name)}")
        path.unlink()

    def names(self) -> list[str]:
        return _own_names(self.folder, "org.atoll.", ".plist")

    def advice(self, name: str) -> list[str]:
        return [f"its messages: tail -f {self._log(name)}"]

    def _path(self, name: str) -> Path:
        return self.folder / f"{_label(name)}.plist"

    def _log(self, name: str) -> Path:
        return Path.home() / "Library" / "Logs" / f"atoll-{name}.log"


def _label(name: str) -> str:
    return f"org.atoll.{name}"


@contextmanager
def _written(path: Path, text: str) -> Iterator[None]:
    """Write the file of a service; put back what was there if the block fails."""
    if path.exists() and not _is_own(path):
        raise ServiceError(
            f"{path} is not one of `atoll service` and was not changed; choose another --name"
        )
    before = path.read_text() if path.exists() else None
    _write(path, text)
    try:
        yield
    except ServiceFailed:
        if before is None:
            path.unlink()
        else:
            _write(path, before)
        raise


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        partial.write_text(text)
        partial.replace(path)
    except OSError as error:
        raise ServiceFailed(f"{path}: cannot be written: {error.strerror}") from None


def _is_own(path: Path) -> bool:
    try:
        return MARK in path.read_text(errors="replace")
    except OSError:
        return False


def _own_names(folder: Path, before: str, after: str) -> list[str]:
    found = sorted(folder.glob(f"{before}*{after}"))
    return [path.name[len(before) : -len(after)] for path in found if _is_own(path)]


def _expect_own(path: Path, names: Sequence[str]) -> None:
    if not _is_own(path):
        told = f"there are {', '.join(names)}" if names else "there is none"
        raise ServiceError(f"{path.name}: no service of `atoll service`; {told}")


def _run(*words: str) -> None:
    """Ask the service manager. Raises ServiceFailed."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=ANSWER_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ServiceFailed(f"{' '.join(words)}: {clean(error)}") from None
    if done.returncode:
        told = clean(done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}")
        raise ServiceFailed(
            f"{' '.join(words)}: {told}; with --print the unit is printed, to install by hand"
        )
