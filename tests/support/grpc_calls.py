"""Calls of the gRPC router service without a server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from baton.rpc.auth import HEADER
from baton_router.accounts.accounts import Accounts
from baton_router.frontend.grpc.servicer import RouterServicer
from baton_router.processor.input_processor import InputProcessor


@dataclass(frozen=True)
class Context:
    """A call's context: which API key it shows."""

    key: str = ""

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return [(HEADER, f"Bearer {self.key}")] if self.key else []


def servicer(processor: InputProcessor, accounts: Accounts | None = None) -> RouterServicer:
    """Return a service without instances or tickets."""
    nothing: Any = None
    return RouterServicer(processor, nothing, nothing, accounts)
