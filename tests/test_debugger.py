"""Time stands still at pdb's prompt: with a manual clock, and in a replay whose pdb reads a pipe."""

from __future__ import annotations

import io
import json
import pdb
from pathlib import Path

from conftest import RunCli

from ranklens_core.clock import ManualClock, PausableClock
from ranklens_core.debugger import pause_at_prompts
from ranklens_core.patches import Patches

STOPPING = Path(__file__).parent / "programs" / "stopping.py"


def stopped_debugger(commands: str) -> tuple[pdb.Pdb, io.StringIO]:
    shown = io.StringIO()
    debugger = pdb.Pdb(stdin=io.StringIO(commands), stdout=shown, nosigint=True, readrc=False)
    debugger.prompt = ""
    return debugger, shown


def test_time_stands_still_at_the_prompt_alone() -> None:
    below = ManualClock(100)
    clock = PausableClock(below)
    # 1000 pass at the first prompt, 5 in the line that is stepped over, 2000 at the second prompt
    debugger, shown = stopped_debugger(
        "!below.advance(1000)\np clock.now_ns()\nn\n!below.advance(2000)\np clock.now_ns()\nc\n"
    )
    with Patches() as patches:
        pause_at_prompts(patches, clock.pause, clock.resume)
        debugger.set_trace()
        below.advance(5)
        below.advance(7)
    printed = [line for line in shown.getvalue().splitlines() if line.isdigit()]
    assert printed == ["100", "105"]
    assert (clock.now_ns(), clock.lost_ns) == (112, 3000)


def test_a_post_mortem_is_a_prompt() -> None:
    below = ManualClock(100)
    clock = PausableClock(below)
    debugger, _ = stopped_debugger("!frame_clock.advance(40)\nq\n")
    with Patches() as patches:
        pause_at_prompts(patches, clock.pause, clock.resume)
        try:
            frame_clock = below
            raise ValueError(frame_clock)
        except ValueError as error:
            debugger.reset()
            debugger.interaction(None, error.__traceback__)
    assert (clock.now_ns(), clock.lost_ns) == (100, 40)


def test_a_stop_in_a_replay_counts_for_no_step(run_cli: RunCli, tmp_path: Path) -> None:
    recorded = run_cli("record", "--nproc", "2", "--out", "trace", "--", STOPPING)
    assert recorded.returncode == 0, recorded.stderr
    replayed = run_cli(
        *("replay", "trace", "--rank", "0", "--task", "profile", "--verdict", "v.json", "--", STOPPING),
        env={"STOP": "1"},
        stdin="import time\ntime.sleep(1)\np work.is_completed() in (True, False)\nc\n",
    )
    assert replayed.returncode == 0, replayed.stderr
    verdict = json.loads((tmp_path / "v.json").read_text())
    assert "(Pdb) True" in replayed.stdout
    assert verdict["timing"]["paused_ns"] > 1e9
    assert "time stood still for" in replayed.stderr
    assert len(verdict["steps"]) == 4
    assert all(step["wall_ns"] < 1e9 for step in verdict["steps"])
    assert verdict["timing"]["lateness"]["max_ns"] < 1e9
