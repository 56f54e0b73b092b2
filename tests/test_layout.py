"""A finished trace takes the place of another one, and of nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ranklens_core.errors import UsageError
from ranklens_core.trace import check_replaceable, replace_trace


def make_trace(path: Path, text: str) -> Path:
    (path / "rank-00000").mkdir(parents=True)
    (path / "run.json").write_text(text)
    (path / "rank-00000" / "journal.jsonl").write_text(text)
    return path


def test_a_new_trace_takes_the_place(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    for text in ("first", "second"):
        replace_trace(make_trace(tmp_path / "new", text), path)
        assert (path / "rank-00000" / "journal.jsonl").read_text() == text
        assert os.listdir(tmp_path) == ["trace"]


@pytest.mark.parametrize("inside", ["notes.txt", "rank-00000/notes.txt"])
def test_what_is_no_trace_stays(tmp_path: Path, inside: str) -> None:
    path = make_trace(tmp_path / "trace", "old")
    (path / inside).write_text("mine")
    new = make_trace(tmp_path / "new", "new")
    for act in (lambda: check_replaceable(path), lambda: replace_trace(new, path)):
        with pytest.raises(UsageError, match=r"holds .*notes\.txt, which is no part of a trace"):
            act()
    assert (path / inside).read_text() == "mine"
    assert (new / "run.json").read_text() == "new"


def test_neither_a_file_nor_a_link_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(make_trace(tmp_path / "trace", "old"))
    for name in ("file", "link"):
        with pytest.raises(UsageError, match="is no directory of a trace"):
            check_replaceable(tmp_path / name)


def test_a_new_trace_that_cannot_be_moved_leaves_the_old_one(tmp_path: Path) -> None:
    path = make_trace(tmp_path / "trace", "old")
    with pytest.raises(UsageError, match="trace cannot be replaced: No such file"):
        replace_trace(tmp_path / "nowhere", path)
    assert (path / "run.json").read_text() == "old"
    assert os.listdir(tmp_path) == ["trace"]
