#!/usr/bin/env python3
"""Make the picture of the dashboard, docs/images/dashboard.png, from a real demo.

    ./.venv/bin/python scripts/dashboard_picture.py            some minutes
    ./.venv/bin/python scripts/dashboard_picture.py --run DIR  of a demo that runs or ran there

A demo kills a peer and starts it again, with its dashboard in tmux. After some rounds,
`atoll dashboard --screenshot` draws the run as SVG, and Chromium draws that: the SVG places each
piece of text by its width, which librsvg does not heed where it begins with a space. Needs tmux
and Chromium (Debian's `chromium`), and a monospaced font with braille and block characters
(`fonts-dejavu-core`).
"""

import argparse
import json
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "images" / "dashboard.png"
ATOLL = [sys.executable, "-m", "atoll.peer.cli.main"]
CHROMIUM = ("chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars")
FONT = "DejaVu Sans Mono"
ROUND = 10  # after which it is drawn: the killed peer is back by then
SCALE = 1.25
COLOURS = 224  # fewer lose the rare ones
MAX_BYTES = 200_000
DEMO_S, LOOK_S = 1500.0, 5.0


def demo(folder: Path) -> None:
    """Run a demo in tmux until it has enough rounds."""
    words = [*ATOLL, "demo", "--chaos", "--inner-steps", "10", "--rounds", str(ROUND + 4)]
    command = shlex.join([*words, "--out", str(folder)])
    tmux("new-session", "-d", "-s", "atoll-picture", "-x", "140", "-y", "44", command)
    until_s = time.monotonic() + DEMO_S
    while position(folder) < ROUND:
        if time.monotonic() > until_s:
            raise SystemExit(f"the demo had no {ROUND} rounds within {DEMO_S:.0f} s: see {folder}")
        time.sleep(LOOK_S)


def tmux(*words: str) -> str:
    """Run tmux; return what it prints."""
    return subprocess.run(["tmux", *words], check=True, capture_output=True, text=True).stdout


def position(folder: Path) -> int:
    """Return the round of a demo; 0 before the first."""
    words = [*ATOLL, "status", str(folder / "invite.txt"), "--json"]
    told = subprocess.run(words, capture_output=True, text=True, check=False)
    return int(json.loads(told.stdout)["position"]) if told.returncode == 0 else 0


def draw(run: Path, svg: Path) -> None:
    """Draw a run's dashboard as SVG, in a font that this machine has."""
    subprocess.run([*ATOLL, "dashboard", str(run), "--screenshot", str(svg)], check=True)
    text = svg.read_text(encoding="utf-8")
    text = re.sub(r"@font-face\s*\{.*?\}", "", text, flags=re.DOTALL)  # of the web
    text = re.sub(r"font-family:\s*Fira Code[^;]*;", f"font-family: {FONT};", text)
    svg.write_text(text.replace("Fira Code", FONT), encoding="utf-8")


def shoot(svg: Path, png: Path) -> None:
    """Let Chromium draw an SVG, and save it with few colours."""
    box = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg.read_text(encoding="utf-8"))
    if box is None:
        raise SystemExit(f"{svg}: expected a viewBox")
    width, height = (round(float(side)) for side in box.groups())
    page = svg.with_suffix(".html")
    page.write_text(f'<body style="margin:0"><img src="{svg.name}" width="{width}"></body>')
    size = [f"--window-size={width},{height}", f"--force-device-scale-factor={SCALE}"]
    where = [f"--screenshot={png}", f"file://{page}"]
    # Its font rendering differs by machine; subpixel colours would only cost bytes.
    words = [*CHROMIUM, "--disable-lcd-text", "--default-background-color=00000000", *size, *where]
    subprocess.run(words, check=True, capture_output=True, timeout=120)
    with Image.open(png) as drawn:
        few = drawn.convert("RGB").quantize(
            COLOURS, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE
        )
    few.save(png, optimize=True)


def main() -> None:
    """Make the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", type=Path, metavar="DIR", help="folder of a demo (its --out)")
    parser.add_argument("--out", type=Path, default=PICTURE, help="(default %(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.run or Path(scratch) / "demo"
        try:
            if options.run is None:
                demo(folder)
            is_live = position(folder) > 0
            svg = Path(scratch) / "dashboard.svg"
            draw(folder / ("invite.txt" if is_live else "coordinator"), svg)
        finally:
            if options.run is None:
                tmux("send-keys", "-t", "atoll-picture", "q")
        shoot(svg, options.out)
    num_bytes = options.out.stat().st_size
    print(f"{options.out}: {num_bytes:,} bytes")
    if num_bytes > MAX_BYTES:
        raise SystemExit(f"expected at most {MAX_BYTES:,} bytes; choose fewer COLOURS")


if __name__ == "__main__":
    main()
