"""Where a call was made: the frame outside torch, the user's own line, and what the call is for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
import torch.distributed.distributed_c10d as c10d

from ranklens_core.c10d.site import Site, Sites
from ranklens_core.schema import Purpose

SITE_PACKAGES = Path(pytest.__file__).parents[1]


def function(source: str, file: str | Path, **names: Any) -> Callable[..., Site]:
    """The function ``f`` of ``source``, as if it stood in ``file``."""
    namespace: dict[str, Any] = dict(names)
    code: CodeType = compile(source, str(file), "exec")
    exec(code, namespace)  # noqa: S102 the source is this file's own
    made: Callable[..., Site] = namespace["f"]
    return made


def through(file: str | Path, inner: Callable[[], Site], name: str = "f") -> Callable[[], Site]:
    """A function called ``name`` in ``file`` that calls ``inner`` on its second line."""
    return function(f"def {name}():\n    return inner()\nf = {name}\n", file, inner=inner)


@pytest.fixture
def sites() -> Sites:
    return Sites(("megatron/core/timers.py",))


def test_program_that_calls_torch_itself(sites: Sites) -> None:
    all_reduce = through(c10d.__file__, sites.find, "all_reduce")
    found = through("/home/user/train.py", all_reduce, "step")()
    assert found == Site("/home/user/train.py:2 step", "/home/user/train.py:2 step", None)


def test_program_that_calls_a_framework(sites: Sites) -> None:
    framework = SITE_PACKAGES / "megatron/core/mappings.py"
    found = through("/home/user/train.py", through(framework, through(c10d.__file__, sites.find), "reduce"))()
    assert found.site == f"{framework}:2 reduce"
    assert found.program_site == "/home/user/train.py:2 f"
    assert found.purpose is None


def test_innermost_frame_of_the_users_own(sites: Sites) -> None:
    """Not the main program: the file of theirs that is nearest to the call."""
    model = through("/home/user/model.py", through(c10d.__file__, sites.find), "forward")
    found = through("/home/user/train.py", through(SITE_PACKAGES / "torch_like/module.py", model))()
    assert found.program_site == "/home/user/model.py:2 forward"
    assert found.site == found.program_site


@pytest.mark.parametrize("name", ["all_gather_object", "broadcast_object_list", "_send_object"])
def test_object_collectives(sites: Sites, name: str) -> None:
    inner = through(c10d.__file__, sites.find, "all_gather")
    found = through("/home/user/train.py", through(c10d.__file__, inner, name))()
    assert found.purpose is Purpose.OBJECT
    # the same name in the user's own file says nothing
    assert through("/home/user/train.py", inner, name)().purpose is None


def test_timers_of_a_framework(sites: Sites) -> None:
    timers = SITE_PACKAGES / "megatron/core/timers.py"
    inner = through(timers, through(c10d.__file__, sites.find), "barrier")
    assert through("/home/user/train.py", inner)().purpose is Purpose.TIMER
    assert Sites().find is not sites.find
    assert through(timers, Sites().find)().purpose is None


def test_call_from_a_thread_that_torch_started(sites: Sites) -> None:
    """No frame of the user's: the backward of an autograd thread, say."""
    found: list[Site] = []
    made_by_torch = function(
        "def f():\n    found.append(find())\n", c10d.__file__, found=found, find=sites.find
    )
    thread = threading.Thread(target=made_by_torch)
    thread.start()
    thread.join()
    # python's own threading is neither torch nor the user's
    assert found[0].program_site == ""
    assert "threading.py" in found[0].site


def test_same_place_is_the_same_object(sites: Sites) -> None:
    inner = through(c10d.__file__, sites.find)
    step = through("/home/user/train.py", inner)
    assert step() is step()
    assert step() is not through("/home/user/other.py", inner)()


def test_two_lines_of_one_function(sites: Sites) -> None:
    inner = through(c10d.__file__, sites.find)
    source = "def f():\n    a = inner()\n    b = inner()\n    return a, b\n"
    both: Any = function(source, "/home/user/train.py", inner=inner)
    first, second = both()
    assert (first.site, second.site) == ("/home/user/train.py:2 f", "/home/user/train.py:3 f")


def test_same_code_in_another_file_is_another_place(sites: Sites) -> None:
    """Python calls code objects equal that stand in the same line and do the same."""
    inner = through(c10d.__file__, sites.find)
    first, second = through("/home/user/a.py", inner), through("/home/user/b.py", inner)
    assert first.__code__ == second.__code__
    assert [first().site, second().site] == ["/home/user/a.py:2 f", "/home/user/b.py:2 f"]
