"""Detects regular expressions in files that take too long to match, such as an adapter's `target_modules`.

Python's `re` backtracks: an expression such as `((a+)+)+b` can take years. It holds the GIL meanwhile, so no
other thread of the process runs. Expressions that could do that are first tried in a child process with a
time limit.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Sequence

from penstock.isolation import isolated_python

TIME_LIMIT_S = 10.0
_MAX_REPEATS = 3  # with no more, matching a short name takes polynomial time, so it is not tried
_MAX_NAME_CHARS = 256
_REPEAT = re.compile(r"[*+{]")
_REPEATED_GROUP = re.compile(r"\)[*+{]")
_TRY = """
import json, re, sys
expression, names = json.load(sys.stdin)
compiled = re.compile(expression)
for name in names:
    compiled.match(name)
    compiled.fullmatch(name)
"""


def first_endless(expressions: Sequence[str], names: Sequence[str]) -> str | None:
    """The first of these expressions that cannot be matched against all names in `TIME_LIMIT_S`."""
    has_long_names = any(len(name) > _MAX_NAME_CHARS for name in names)
    risky = [each for each in expressions if has_long_names or _is_risky(each)]
    return next((each for each in risky if not _ends(each, names)), None)


def _is_risky(expression: str) -> bool:
    has_repeated_group = _REPEATED_GROUP.search(expression) is not None
    return has_repeated_group or len(_REPEAT.findall(expression)) > _MAX_REPEATS


def _ends(expression: str, names: Sequence[str]) -> bool:
    command = isolated_python("-I", "-S", "-c", _TRY)
    given = json.dumps([expression, list(names)]).encode()
    try:
        subprocess.run(command, input=given, capture_output=True, timeout=TIME_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return False
    return True
