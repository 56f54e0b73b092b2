"""The user's program: parsing, identity, and running it as python would."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash

from ranklens_core.errors import UsageError
from ranklens_core.preimport import guess_preimports
from ranklens_core.program import Program, exit_status, program_traceback

RUN = """
import sys
from ranklens_core.program import Program, exit_status, print_program_error
program = Program.parse(sys.argv[1:])
try:
    program.run()
except SystemExit as error:
    sys.exit(exit_status(error))
except BaseException as error:
    print_program_error(error)
    sys.exit(1)
"""


@pytest.fixture
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def same_as_python(in_tmp_path: Path, run_python: Callable[..., object]) -> Callable[..., str]:
    """Run a command line by ``python`` and by ``Program.run``, in fresh interpreters: all must be equal."""

    def compare(*tokens: str) -> str:
        real = subprocess.run(
            [sys.executable, *tokens],
            capture_output=True,
            text=True,
            timeout=60,
            cwd=in_tmp_path,
            check=False,
        )
        ours = run_python(RUN, *tokens)
        assert (ours.returncode, ours.stdout, ours.stderr) == (real.returncode, real.stdout, real.stderr)
        return real.stdout + real.stderr

    return compare


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (["t.py"], Program("t.py")),
        (["t.py", "--lr", "1", "--", "x"], Program("t.py", args=("--lr", "1", "--", "x"))),
        (["python", "t.py"], Program("t.py")),
        (["python3", "-m", "json.tool", "-h"], Program("json.tool", True, ("-h",))),
        ([sys.executable, "t.py", "python"], Program("t.py", args=("python",))),
        (["-mjson", "a b"], Program("json", True, ("a b",))),
    ],
)
def test_parse(in_tmp_path: Path, tokens: list[str], expected: Program) -> None:
    write(in_tmp_path / "t.py", "")
    write(in_tmp_path / "json/__main__.py", "")
    write(in_tmp_path / "json/__init__.py", "")
    write(in_tmp_path / "json/tool.py", "")
    program = Program.parse(tokens)
    assert program == expected
    assert Program.parse(shlex.split(program.describe())) == program


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([], "no program"),
        (["python"], "no program"),
        (["missing.py"], "missing.py: no such program file"),
        (["-m", "no_such_module_anywhere"], "no module named 'no_such_module_anywhere'"),
        (["-m"], "no module named ''"),
        (["-m", "xml"], "no module named 'xml'"),
        (["python", "-u", "t.py"], "python -u -m ranklens_core"),
        (["bash", "train.sh"], "bash: PROGRAM is a .py file"),
        (["/usr/bin/torchrun", "t.py"], "torchrun ... -m ranklens_core record"),
        (["python2", "t.py"], "python2 is not the interpreter RankLens runs in"),
        (["/other/bin/python", "t.py"], "/other/bin/python -m ranklens_core"),
    ],
)
def test_what_cannot_be_run_is_a_usage_error(in_tmp_path: Path, tokens: list[str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        Program.parse(tokens)
    assert message in str(caught.value)


def test_fingerprint_is_that_of_the_main_file_and_imports_nothing(in_tmp_path: Path) -> None:
    write(in_tmp_path / "rl_pkg/__init__.py", "raise AssertionError('imported')")
    main = write(in_tmp_path / "rl_pkg/sub/__main__.py", "print(1)\n")
    write(in_tmp_path / "rl_pkg/sub/__init__.py", "raise AssertionError('imported')")
    expected = xxhash.xxh3_128_hexdigest(b"print(1)\n")
    assert Program("rl_pkg.sub", is_module=True).fingerprint() == expected
    assert Program(str(main)).fingerprint() == expected
    assert "rl_pkg" not in sys.modules
    main.write_text("print(2)\n")
    assert Program(str(main)).fingerprint() != expected
    main.unlink()
    with pytest.raises(UsageError, match="cannot read the program"):
        Program(str(main)).fingerprint()


SHOW = """
import inspect, os, sys
import __main__
names = ["__name__", "__file__", "__package__", "__cached__", "__doc__"]
print({name: globals()[name] for name in names}, getattr(__spec__, "name", None), type(__loader__).__name__)
print(sys.argv, sys.path[0], __main__.names is names, "annotations" in globals())
def f(x: undefined_name_is_evaluated_at_once = 1): pass
"""


def test_a_script_finds_itself_as_under_python(same_as_python: Callable[..., str], in_tmp_path: Path) -> None:
    write(in_tmp_path / "dir/show.py", SHOW.rpartition("\ndef")[0])
    assert "'__name__': '__main__'" in same_as_python("dir/show.py", "--x", "1")
    (in_tmp_path / "link.py").symlink_to("dir/show.py")
    assert f" {in_tmp_path}/dir " in same_as_python("link.py")


def test_future_imports_of_ours_do_not_reach_the_program(
    same_as_python: Callable[..., str], in_tmp_path: Path
) -> None:
    write(in_tmp_path / "show.py", SHOW)
    assert "NameError: name 'undefined_name_is_evaluated_at_once'" in same_as_python("show.py")


def test_a_module_finds_itself_as_under_python(same_as_python: Callable[..., str], in_tmp_path: Path) -> None:
    write(in_tmp_path / "rl_pkg/__init__.py", "print('package')\n")
    write(in_tmp_path / "rl_pkg/other.py", "value = 5\n")
    write(in_tmp_path / "rl_pkg/__main__.py", SHOW.rpartition("\ndef")[0] + "\nfrom .other import value\n")
    write(in_tmp_path / "rl_pkg/train.py", SHOW.rpartition("\ndef")[0] + "\nfrom .other import value\n")
    assert "rl_pkg.__main__ SourceFileLoader" in same_as_python("-m", "rl_pkg", "-x")
    assert "rl_pkg.train SourceFileLoader" in same_as_python("-m", "rl_pkg.train")


@pytest.mark.parametrize(
    "source",
    [
        "def inner():\n    raise ValueError('no')\n\ntry:\n    inner()\nexcept ValueError as e:\n"
        "    raise RuntimeError('outer') from e\n",
        "x = (1,\n",
        "import missing_module_of_the_program\n",
        "import importlib; importlib.import_module('missing_module_of_the_program')\n",
        "import sys\nsys.excepthook = lambda t, e, tb: print('mine', t, tb.tb_lineno)\nraise OSError\n",
        "import sys; sys.exit('a message')\n",
        "import sys; sys.exit(-1)\n",
        "raise SystemExit\n",
    ],
    ids=["chained", "syntax", "import", "import_module", "hook", "exit-message", "exit--1", "exit-none"],
)
def test_a_failure_looks_as_under_python(
    same_as_python: Callable[..., str], in_tmp_path: Path, source: str
) -> None:
    write(in_tmp_path / "fails.py", source)
    same_as_python("fails.py")


def test_classes_of_main_can_be_pickled_and_sent_to_workers(
    same_as_python: Callable[..., str], in_tmp_path: Path
) -> None:
    write(
        in_tmp_path / "workers.py",
        """
import multiprocessing, pickle
class Point:
    def __init__(self, x): self.x = x
def double(p): return Point(2 * p.x)
if __name__ == "__main__":
    assert type(pickle.loads(pickle.dumps(Point(1)))) is Point
    for method in ("fork", "spawn"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            print(method, pool.map(double, [Point(3)])[0].x, multiprocessing.current_process().name)
""",
    )
    assert "spawn 6 MainProcess" in same_as_python("workers.py")


def test_run_puts_everything_back(in_tmp_path: Path) -> None:
    write(
        in_tmp_path / "p.py", "import sys\nsys.argv.append('x'); sys.path.insert(0, 'y')\nraise KeyError(1)\n"
    )
    before = (sys.argv, list(sys.argv), sys.path, list(sys.path), sys.modules["__main__"])
    with pytest.raises(KeyError) as caught:
        Program("p.py").run()
    assert (sys.argv, list(sys.argv), sys.path, list(sys.path), sys.modules["__main__"]) == before
    first = program_traceback(caught.value)
    assert first is not None
    assert first.tb_frame.f_code.co_filename == str(in_tmp_path / "p.py")
    assert first.tb_next is None


def test_globals_outlive_the_run(in_tmp_path: Path) -> None:
    write(
        in_tmp_path / "p.py", "import sys\nvalue = 7\ndef get(): return value\nsys.rl_test_callback = get\n"
    )
    try:
        Program("p.py").run()
        assert sys.rl_test_callback() == 7  # type: ignore[attr-defined]
    finally:
        del sys.rl_test_callback  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("code", "status"), [(None, 0), (0, 0), (3, 3), (-1, 255), (258, 2), (True, 1), ("text", 1)]
)
def test_exit_status(code: object, status: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status(SystemExit(code)) == status
    assert capsys.readouterr().err == ("text\n" if code == "text" else "")


def test_preimports_are_the_frameworks_the_program_names(in_tmp_path: Path) -> None:
    write(
        in_tmp_path / "main.py",
        """
import os, helper
from numpy import linalg
try:
    import torch.utils.data
except ImportError:
    pass
def main():
    import deepspeed
""",
    )
    write(in_tmp_path / "helper.py", "import helper2\nfrom rl_local import thing\n")
    write(in_tmp_path / "helper2.py", "import helper\nif True:\n    from torch.nn import functional\n")
    write(in_tmp_path / "rl_local/__init__.py", "")
    write(in_tmp_path / "rl_local/thing.py", "import numpy.random\nthis is no python\n")
    assert guess_preimports(Program("main.py")) == [
        "torch",
        "torch.distributed",
        "torch._dynamo",
        "numpy",
        "torch.utils.data",
        "torch.nn",
    ]


@pytest.mark.parametrize("source", ["import os\n", "import (\n", "\0", "import numpy_but_not_it\n"])
def test_no_framework_no_preimport(in_tmp_path: Path, source: str) -> None:
    write(in_tmp_path / "main.py", source)
    assert guess_preimports(Program("main.py")) == []


def test_the_users_own_modules_are_never_preimported(in_tmp_path: Path) -> None:
    write(in_tmp_path / "numpy.py", "raise AssertionError('imported')")
    write(in_tmp_path / "main.py", "import numpy\n")
    assert guess_preimports(Program("main.py")) == []
    assert os.path.basename(sys.modules.get("numpy", os).__file__ or "") != "numpy.py"
