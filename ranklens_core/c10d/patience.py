"""How long a program may ask a Store that nobody else answers.

A polling loop (``while not store.check(["go"]): sleep``) ends when a peer has spoken; alone it never ends.
The Store cannot tell a hopeless loop from one that another thread of the program will end, so it waits, says
that it waits, and gives up only on what shows no sign of work.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from ranklens_core.clock import Clock, MonotonicClock
from ranklens_core.errors import UnsupportedError

log = logging.getLogger("ranklens")

MAX_ASKS = 100
"""Times that a question gets the same answer before it can be given up ..."""

MAX_NS = 60_000_000_000
"""... and for how long."""

TELL_ASKS = 10
TELL_NS = 10_000_000_000
"""When a log line says that the program seems to wait for a peer."""

IDLE_CPU_NS = 100_000
IDLE_SHARE = 0.1
"""The process is idle between two questions if it used less CPU time than this, or this share of the time. A
program that looks at an abort key between two pieces of work is not."""


class StuckProgram(SystemExit):
    """The program caught the ``UnsupportedError`` and went on asking: it ends here."""


class _Poll:
    __slots__ = ("answer", "asks", "since_ns", "told")

    def __init__(self, answer: object, now_ns: int) -> None:
        self.answer = answer
        self.since_ns = now_ns
        self.asks = 0
        self.told = False


class Patience:
    """Watches the questions of one process to its Stores.

    ``progress`` is anything that changes as the training goes on (calls made, steps done); ``site`` tells
    where the program is; ``on_stuck`` is given the error before it is raised, in case the program swallows
    it. ``cpu_ns`` is the CPU time of the whole process.
    """

    def __init__(
        self,
        *,
        clock: Clock | None = None,
        cpu_ns: Callable[[], int] = time.process_time_ns,
        progress: Callable[[], object] = lambda: None,
        site: Callable[[], str] = lambda: "",
        on_stuck: Callable[[UnsupportedError], None] = lambda _: None,
    ) -> None:
        self._clock = clock or MonotonicClock()
        self._cpu_ns = cpu_ns
        self._progress = progress
        self._site = site
        self._on_stuck = on_stuck
        self._lock = threading.Lock()
        self._polls: dict[tuple[int, str], _Poll] = {}
        self._seen: object = None
        self._asked_ns = self._asked_cpu_ns = 0
        self._stuck = False

    @property
    def site(self) -> str:
        """Where the program asks, as ``file:line function``; ``""`` if that is unknown."""
        return self._site()

    def asked(self, question: str, answer: object) -> None:
        """A thread asked ``question`` (``check('go')``) and is about to get ``answer``.

        Raises:
            UnsupportedError: the main thread has had this answer ``MAX_ASKS`` times and for ``MAX_NS``, while
                the training did not go on and the process was idle.
            StuckProgram: it asks again after that.
        """
        with self._lock:
            in_main = threading.current_thread() is threading.main_thread()
            if self._stuck and in_main:
                raise StuckProgram(UnsupportedError.exit_status)
            poll, now_ns = self._same(question, answer)
        waited_s = (now_ns - poll.since_ns) / 1e9
        if poll.asks >= TELL_ASKS and now_ns - poll.since_ns >= TELL_NS and not poll.told:
            poll.told = True
            log.warning(
                "the program seems to wait for a peer, and there is none in a replay: store.%s gave %s "
                "%d times in %.0f s%s",
                question,
                answer,
                poll.asks,
                waited_s,
                _at(self.site),
            )
        if in_main and poll.asks >= MAX_ASKS and now_ns - poll.since_ns >= MAX_NS:
            self._stuck = True
            error = UnsupportedError(
                f"The program waits for a peer{_at(self.site)}: store.{question} gave {answer} "
                f"{poll.asks} times in {waited_s:.0f} s, and nothing else went on. In a replay there are no "
                "peers, and values passed through a Store are not recorded. Pass them through a collective "
                "(broadcast_object_list), or wait with dist.barrier() instead."
            )
            self._on_stuck(error)
            raise error

    def _same(self, question: str, answer: object) -> tuple[_Poll, int]:
        """The poll that this question goes on with; a new one where something has happened since."""
        now_ns, cpu_ns = self._clock.now_ns(), self._cpu_ns()
        used_ns, gap_ns = cpu_ns - self._asked_cpu_ns, now_ns - self._asked_ns
        self._asked_ns, self._asked_cpu_ns = now_ns, cpu_ns
        progress = self._progress()
        if progress != self._seen or used_ns > max(IDLE_CPU_NS, IDLE_SHARE * gap_ns):
            self._polls.clear()
            self._seen = progress
        key = (threading.get_ident(), question)
        poll = self._polls.get(key)
        if poll is None or poll.answer != answer:
            poll = self._polls[key] = _Poll(answer, now_ns)
        poll.asks += 1
        return poll, now_ns


def _at(site: str) -> str:
    return f" (at {site})" if site else ""
