"""docs/trace-format.md says what the code writes, field by field."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from ranklens_core import schema
from ranklens_core.trace.streams import ROW_TYPES, Stream, schema_of

DOC = (Path(__file__).parents[1] / "docs" / "trace-format.md").read_text()


@pytest.mark.parametrize("stream", list(Stream))
def test_columns_of_each_stream(stream: Stream) -> None:
    section = DOC.split(f"### {stream.file}\n")[1].split("\n#")[0]
    documented = re.findall(r"^\| `(\w+)` \| (.+) \|$", section, re.MULTILINE)
    assert documented == [(field.name, str(field.type)) for field in schema_of(ROW_TYPES[stream])]


@pytest.mark.parametrize(
    "record",
    [
        schema.RunRecord,
        schema.RankRecord,
        schema.GroupRecord,
        schema.Step,
        schema.EnvironmentItem,
        schema.Printed,
    ],
)
def test_fields_of_each_record(record: type[msgspec.Struct]) -> None:
    assert ", ".join(f"`{name}`" for name in record.__struct_fields__) in DOC


def test_the_version() -> None:
    assert DOC.startswith(f"# Trace format, version {schema.TRACE_VERSION}\n")
