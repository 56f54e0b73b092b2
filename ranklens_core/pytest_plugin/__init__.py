"""The pytest plugin: ``@pytest.mark.ranklens("traces/gpt8", rank=5)`` runs a test as rank 5 of a job, alone.

``pytest --ranklens-record`` records the traces, with local ranks. pytest loads this at every start, so it
imports neither torch nor pyarrow before a marked test runs. docs/pytest.md is for users.
"""

from __future__ import annotations

import pytest

from ranklens_core.pytest_plugin.fixtures import is_inside, postpone_fixtures
from ranklens_core.pytest_plugin.marking import (
    RANK_PARAMETER,
    SIGNATURE,
    Marking,
    marking_of,
    refuse_what_is_no_function,
)

_MARKING = pytest.StashKey[Marking]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--ranklens-record``."""
    parser.getgroup("ranklens").addoption(
        "--ranklens-record",
        action="store_true",
        help="Run each test marked `ranklens` with local ranks and record its trace anew.",
    )


def pytest_configure(config: pytest.Config) -> None:
    """The marker is known, also to ``--strict-markers``."""
    config.addinivalue_line(
        "markers", f"{SIGNATURE}: run the test as one rank of a recorded job, alone (docs/pytest.md)."
    )


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """``rank=[0, 5]`` is a test for each."""
    marking = marking_of(metafunc.definition)
    if marking is not None and marking.is_swept:
        metafunc.fixturenames.append(RANK_PARAMETER)
        metafunc.parametrize(RANK_PARAMETER, marking.ranks, ids=lambda rank: f"rank{rank}")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Function-scoped fixtures belong to the rank: they wait for it."""
    marking = marking_of(item)
    if marking is not None:
        function = refuse_what_is_no_function(item)
        item.stash[_MARKING] = marking
        postpone_fixtures(function)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> object | None:
    """Run a marked test as its rank, or as all ranks of the recording."""
    marking = pyfuncitem.stash.get(_MARKING, None)
    if marking is None or is_inside(pyfuncitem):
        return None
    # both import torch
    if pyfuncitem.config.getoption("ranklens_record"):
        from ranklens_core.pytest_plugin.recording import record_test

        record_test(pyfuncitem, marking)
    else:
        from ranklens_core.pytest_plugin.replaying import replay_test

        replay_test(pyfuncitem, marking)
    return True
