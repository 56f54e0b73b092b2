"""A test's fixtures, in two parts: what pytest's process sets up once, and what each rank sets up itself.

A fixture of function scope may do what the test does: make process groups, build the model. It runs where the
test's body runs, inside the rank. Wider ones (class, module, session) are for several tests, and run before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

SHARED = frozenset({"tmp_path", "tmpdir", "tmp_path_factory", "tmpdir_factory"})
"""Of function scope, but one for all ranks: the ranks of a job see one file system."""

_NAMES = pytest.StashKey[list[str]]()
_INSIDE = pytest.StashKey[bool]()


def postpone_fixtures(item: pytest.Function) -> None:
    """Leave the function-scoped fixtures out of pytest's own set-up, which is about to begin."""
    names = item.stash.setdefault(_NAMES, list(item.fixturenames))
    definitions = item._fixtureinfo.name2fixturedefs
    item.fixturenames = [
        name
        for name in names
        if name in SHARED or name not in definitions or definitions[name][-1].scope != "function"
    ]


def is_inside(item: pytest.Function) -> bool:
    """Whether ``run_body`` is running the test: this call of it is to be an ordinary one."""
    return item.stash.get(_INSIDE, False)


def run_body(item: pytest.Function) -> None:
    """Set up the postponed fixtures, run the test's body, finish the fixtures. Raises what they raise."""
    with _own_fixtures(item):
        item.stash[_INSIDE] = True
        try:
            item.ihook.pytest_pyfunc_call(pyfuncitem=item)
        finally:
            item.stash[_INSIDE] = False


@contextmanager
def _own_fixtures(item: pytest.Function) -> Iterator[None]:
    # pytest finishes a fixture with the item's other finalizers, which are not the rank's to run: a forked
    # rank would delete the tmp_path of all. So the list is another one for as long as the rank lives.
    stack = item.session._setupstate.stack
    finalizers, problem = stack[item]
    own: list[object] = []
    stack[item] = (own, problem)  # type: ignore[assignment]
    item.fixturenames = item.stash[_NAMES]
    try:
        item._request._fillfixtures()
        yield
    finally:
        with ExitStack() as finishing:
            finishing.callback(stack.__setitem__, item, (finalizers, problem))
            for finish in own:
                finishing.callback(finish)  # type: ignore[arg-type]
