"""Calls of the gRPC router service without a server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from baton.rpc.auth import HEADER
from baton_router.accounts import Accounts
from baton_router.frontend.grpc.servicer import RouterServicer
from baton_router.processor.input_processor import InputProcessor


@dataclass(frozen=True)
class Context:
    """A call's context: which API key it shows, and whose span it is part of."""

    key: str = ""
    traceparent: str = ""

    def invocation_metadata(self) -> list[tuple[str, str]]:
        found = {HEADER: f"Bearer {self.key}" if self.key else "", "traceparent": self.traceparent}
        return [(name, value) for name, value in found.items() if value]

    def peer(self) -> str:
        return "ipv4:192.0.2.1:5000"


def servicer(
    processor: InputProcessor, accounts: Accounts | None = None, *, access_log: bool = False
) -> RouterServicer:
    """Return a service without instances or tickets."""
    nothing: Any = None
    return RouterServicer(processor, nothing, nothing, accounts, access_log=access_log)
