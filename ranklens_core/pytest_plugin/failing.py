"""How a marked test fails: with words, not with RankLens' own traceback; and a test's traceback as words."""

from __future__ import annotations

import io
from typing import NoReturn

import pytest
from _pytest._io import TerminalWriter


def fail(text: str) -> NoReturn:
    """Fail the test with ``text`` alone."""
    raise pytest.fail.Exception(text, pytrace=False) from None


def traceback_text(item: pytest.Item, error: BaseException) -> str:
    """``error`` as pytest would show it for ``item``."""
    shown = item.repr_failure(pytest.ExceptionInfo.from_exception(error))
    if isinstance(shown, str):
        return shown
    text = io.StringIO()  # str(shown) would strip the first line's indentation
    shown.toterminal(TerminalWriter(text))
    return text.getvalue().strip("\n")
