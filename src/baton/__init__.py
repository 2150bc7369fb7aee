"""Baton serves large language models with prefill and decode on separate instances.

``import baton`` is cheap: it loads neither torch nor grpc. The SDK's classes load on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from baton.version import __version__

if TYPE_CHECKING:
    from baton.client import AsyncClient, Client
    from baton.types import SamplingParams

__all__ = ["AsyncClient", "Client", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    """Load the SDK when it is asked for."""
    if name == "SamplingParams":
        from baton.types import SamplingParams

        return SamplingParams
    if name in {"Client", "AsyncClient"}:
        import baton.client

        return getattr(baton.client, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
