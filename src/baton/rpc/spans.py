"""What spans say of a request: what its trace has, in their words."""

from __future__ import annotations

from baton.api.v1 import common_pb2
from baton.rpc.convert import path_from_pb
from baton.tracing import Attribute


def trace_attributes(trace: common_pb2.RequestTrace) -> dict[str, Attribute]:
    """Return the fields of a trace that are set, as a span's attributes ``baton.<field>``."""
    found: dict[str, Attribute] = {}
    for field, value in trace.ListFields():
        name = f"baton.{field.name}"
        if field.name == "path":
            found[name] = str(path_from_pb(value))
        else:
            found[name] = tuple(value) if field.name == "failed_prefills" else value
    return found
