"""The syntax of source files, which several tests walk: 70,000 lines take seconds to parse."""

import ast
import functools


@functools.cache
def parsed(source: str) -> ast.Module:
    """Return the syntax of a module, parsed once a process; do not change it."""
    return ast.parse(source)
