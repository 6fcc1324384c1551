"""The rows of a benchmark in its page of docs/benchmarks, between two marks."""

from pathlib import Path


def put_between(page: Path, marks: tuple[str, str], text: str) -> None:
    """Write a text between the marks of a page, in place of what was there.

    Raises:
        ValueError: the page does not have each mark once.
    """
    before, rest = page.read_text().split(marks[0])
    _, after = rest.split(marks[1])
    page.write_text(f"{before}{marks[0]}\n\n{text}\n\n{marks[1]}{after}")
