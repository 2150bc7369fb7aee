"""What a benchmark reports: a record per line of ``--json``; each benchmark documents its kinds in docs/bench-*.md."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Record:
    """A line: its fields, and ``record``, its kind."""

    record: ClassVar[str]

    def to_json(self) -> str:
        """Write as one line of JSON."""
        return json.dumps({"record": self.record, **dataclasses.asdict(self)}, allow_nan=False)


@dataclass(frozen=True)
class ResultRecord(Record):
    """Last line: the exit status and what led to it."""

    record: ClassVar[str] = "result"
    exit_code: int
    failures: tuple[str, ...]
    seconds: float
