"""Process groups under a name that is the same on every rank and in every run.

torch's own names depend on how many groups the process has made. The key here is the group's
global ranks and how many groups of those very ranks came before: ``"0-3"``, ``"0-3#1"``, ``"0,2"``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import ProcessGroup

from ranklens_core.patches import Patches
from ranklens_core.schema import GroupRecord
from ranklens_core.text import ranks_text


class Groups:
    """The process groups of this process, in the order they were made.

    ``on_new`` is told of every group before its first call.
    """

    def __init__(self, on_new: Callable[[GroupRecord], None]) -> None:
        self._on_new = on_new
        self._unnamed: list[ProcessGroup] = []
        self._made: dict[str, int] = {}
        # keyed by torch's name, not by the object: a record must not keep a group alive
        self._records: dict[str, GroupRecord] = {}
        self._lock = threading.Lock()
        self._patches = Patches()
        register = c10d._register_process_group

        def patched(name: Any, pg: ProcessGroup) -> None:
            register(name, pg)
            # a destroyed group's name may be used again (a second init_process_group)
            self._records.pop(str(name), None)
            self._unnamed.append(pg)

        self._patches.set(c10d, "_register_process_group", patched)
        self._unnamed.extend(c10d._world.pg_map)

    def record(self, pg: ProcessGroup) -> GroupRecord:
        """The record of ``pg``; names all groups made up to now."""
        found = self._records.get(pg.group_name)
        if found is None:
            self.name_new()
            found = self._records[pg.group_name]
        return found

    def key_of(self, pg: ProcessGroup) -> str | None:
        """The key of ``pg`` if it is a group of this world, for adapters."""
        self.name_new()
        found = self._records.get(pg.group_name)
        return found.key if found else None

    def name_new(self) -> None:
        """Name the groups made since the last time, in the order they were made."""
        with self._lock:
            self._name_new()

    def _name_new(self) -> None:
        waiting, self._unnamed = self._unnamed, []
        for pg in waiting:
            if pg not in c10d._world.pg_map:
                continue  # destroyed before its first call
            ranks = tuple(c10d.get_process_group_ranks(pg))
            text = ranks_text(ranks)
            nth = self._made.get(text, 0)
            self._made[text] = nth + 1
            record = GroupRecord(
                key=f"{text}#{nth}" if nth else text,
                pg_name=pg.group_name,
                # torch's word for a group that nobody described
                pg_desc="" if pg.group_desc == "undefined" else pg.group_desc,
                backend=str(c10d._world.pg_map[pg][0]),
                ranks=ranks,
            )
            self._records[pg.group_name] = record
            self._on_new(record)

    def close(self) -> None:
        """Stop watching for new groups."""
        self._patches.undo()
