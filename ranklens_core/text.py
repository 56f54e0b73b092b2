"""Words for people. Text of a trace is a stranger's: what reaches a terminal holds no control characters."""

from __future__ import annotations

import re
from collections.abc import Sequence

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    r"""``text`` with control characters, but for line ends and tabs, as escapes.

    >>> printable("a\x1b[31mred")
    'a\\x1b[31mred'
    """
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks in short: runs of three or more as ``first-last``, else listed.

    >>> ranks_text([0, 1, 2, 3, 8, 10])
    '0-3,8,10'
    """
    parts: list[str] = []
    start = 0
    for i in range(1, len(ranks) + 1):
        if i < len(ranks) and ranks[i] == ranks[i - 1] + 1:
            continue
        run = ranks[start:i]
        parts.extend([f"{run[0]}-{run[-1]}"] if len(run) > 2 else [str(rank) for rank in run])
        start = i
    return ",".join(parts)


def ranks_words(ranks: Sequence[int]) -> str:
    """Ranks in any order, in words.

    >>> ranks_words([5, 0, 2, 1])
    'ranks 0-2,5'
    """
    ordered = sorted(set(ranks))
    return f"rank{'s' if len(ordered) != 1 else ''} {ranks_text(ordered)}"
