"""When, of which commit and on which machine something was measured."""

import os
import platform
import subprocess
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def circumstances() -> dict[str, str]:
    """Return date, commit and machine, for a saved result."""
    return {"date": today(), "commit": commit(), "machine": machine()}


def today() -> str:
    """Return the date in UTC."""
    return time.strftime("%Y-%m-%d", time.gmtime())


def commit() -> str:
    """Return the commit of this checkout; 'unknown' outside one."""
    words = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def machine() -> str:
    """Return processor, cores and kernel in words."""
    return f"{processor()}, {os.cpu_count()} cores, {platform.system()} {platform.release()}"


def processor() -> str:
    """Return the processor's name, or its architecture if nobody names it."""
    told = Path("/proc/cpuinfo")
    for line in told.read_text().splitlines() if told.exists() else ():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip().replace("(R)", "").replace("(TM)", "")
    return platform.machine()
