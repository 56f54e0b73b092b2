"""Text of a trace is a stranger's: what reaches a terminal holds no control characters."""

from __future__ import annotations

import re

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    r"""``text`` with control characters, but for line ends and tabs, as escapes.

    >>> printable("a\x1b[31mred")
    'a\\x1b[31mred'
    """
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)
