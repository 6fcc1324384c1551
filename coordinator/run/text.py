"""Numbers and untrusted strings as short text, for the dashboard and plain output alike.

Names, event texts and versions come from other machines. `clean` is the one place that removes
everything that could control a terminal: control and escape characters, bidirectional overrides,
line breaks (`clean_lines` keeps those). Nothing here is parsed as markup, so markup needs no
escaping.

Sizes are decimal (1 kB = 1000 bytes), as link speeds are. Absent, NaN and infinite numbers become a
dash.
"""

from __future__ import annotations

import logging
import math
import unicodedata
from datetime import datetime
from typing import Final

from rich.cells import cell_len, set_cell_size

from atoll.dht.identity import short

ABSENT: Final = "–"  # noqa: RUF001  (an en dash, shown for a missing number)
NUM_TEXT_MAX: Final = 500  # a longer event would fill the screen
LOG_MESSAGE_MAX: Final = 4000  # a record that is longer tells no more
_LOSS_CELLS: Final = 6  # of its columns
_UNSAFE: Final = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})


def clean(text: object, *, num_max: int = NUM_TEXT_MAX) -> str:
    """Return one line of printable text; a middle dot replaces each removed character."""
    raw = str(text)[: num_max + 1]
    if len(raw) <= num_max and raw.isprintable():  # as nearly all are: a screen cleans thousands
        return raw
    safe = "".join(_printable(character) for character in raw[:num_max])
    return safe + "…" if len(raw) > num_max else safe


def clean_lines(text: object, *, num_max: int | None = None) -> str:
    """Return printable text with its line ends and tabs, for messages of several lines."""
    raw = str(text)
    cut = raw[:num_max]
    safe = "".join(c if c in "\n\t" else _printable(c) for c in cut)
    return safe + "…" if len(raw) > len(cut) else safe


class CleanFormatter(logging.Formatter):
    """Formats log records without what could control the terminal that a log is read in.

    A message is one line, so that text from elsewhere cannot pass for a record; only a traceback
    has several.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        """Format the record with its message on one line."""
        record.message = clean(record.message, num_max=LOG_MESSAGE_MAX)
        return super().formatMessage(record)

    def format(self, record: logging.LogRecord) -> str:
        """Format the record and its traceback."""
        return clean_lines(super().format(record))


def _printable(character: str) -> str:
    if character in "\t\n\r":
        return " "
    return "·" if unicodedata.category(character) in _UNSAFE else character


def cells(text: str) -> int:
    """Return the width of `text` in terminal cells."""
    return cell_len(text)


def fit(text: str, width: int, *, right: bool = False) -> str:
    """Return `text` in exactly `width` terminal cells, padded or cut with an ellipsis."""
    if width <= 0:
        return ""
    length = cell_len(text)
    if length > width:
        return set_cell_size(text, width - 1) + "…"
    pad = " " * (width - length)
    return pad + text if right else text + pad


def finite(value: float | None) -> float | None:
    """Return `value` if it can be drawn as a number, else None."""
    return value if value is not None and math.isfinite(value) else None


def count(value: float | None) -> str:
    """Format a count in at most five characters: 999, 12.3k, 4.56M."""
    number = finite(value)
    if number is None:
        return ABSENT
    for unit in ("", "k", "M", "G", "T", "P"):
        if abs(number) < 999.5 or unit == "P":
            break
        number /= 1000
    return _three_digits(number, whole=unit == "") + unit


def _three_digits(number: float, *, whole: bool) -> str:
    if whole and (number == int(number) or abs(number) >= 99.95):
        return f"{number:.0f}"
    size = abs(number)
    return f"{number:.2f}" if size < 9.995 else f"{number:.1f}" if size < 99.95 else f"{number:.0f}"


def size(num_bytes: float | None) -> str:
    """Format bytes in decimal units: 12.3 MB."""
    text = count(num_bytes)
    if text == ABSENT:
        return text
    return f"{text[:-1]} {text[-1]}B" if text[-1].isalpha() else f"{text} B"


def compact_size(num_bytes: float | None) -> str:
    """Format bytes for a narrow column: 12.3M."""
    return count(num_bytes)


def loss_text(value: float | None) -> str:
    """Format a loss in nats in six characters: with three decimals, or 1.23e5, or 1e300."""
    number = finite(value)
    if number is None:
        return ABSENT
    if abs(number) < 100:
        return f"{number:.3f}"
    found = [f"{number:.{digits}g}".replace("e+0", "e").replace("e+", "e") for digits in (3, 2, 1)]
    return next((text for text in found if len(text) <= _LOSS_CELLS), found[-1])


def percent(fraction: float | None, *, decimals: int = 0) -> str:
    """Format a fraction of one as percent."""
    number = finite(fraction)
    return ABSENT if number is None else f"{100 * number:.{decimals}f}%"


def duration(seconds: float | None) -> str:
    """Format a time span with at most two units: 0.4s, 42s, 3m 20s, 1h 04m, 3d 02h."""
    number = finite(seconds)
    if number is None:
        return ABSENT
    number = max(0.0, number)
    if number < 9.95:
        return f"{number:.1f}s"
    whole = round(number)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    if whole < 86_400:
        return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
    return f"{whole // 86_400}d {whole % 86_400 // 3600:02d}h"


def clock_time(at: float | None, *, with_date: bool = False) -> str:
    """Format the server's time stamp in local time; never compare it with a local clock."""
    number = finite(at)
    pattern = "%Y-%m-%d %H:%M:%S" if with_date else "%H:%M:%S"
    try:
        return datetime.fromtimestamp(number).strftime(pattern) if number else "--:--:--"
    except (OverflowError, OSError, ValueError):
        return "--:--:--"


def short_id(peer_id: str) -> str:
    """Return the end of a PeerID: its beginning is the same for every key of one kind."""
    safe = clean(peer_id)
    return safe if len(safe) <= 12 else "…" + short(safe)


def short_hash(digest_hex: str) -> str:
    """Return the first eight characters of a digest."""
    return clean(digest_hex)[:8] or ABSENT
