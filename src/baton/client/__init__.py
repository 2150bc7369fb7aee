"""The SDK: :class:`Client` and :class:`AsyncClient` speak gRPC to a Baton router.

::

    with baton.Client("127.0.0.1:8001") as client:
        print(client.generate("def main():", max_tokens=32, temperature=0).text)
        with client.generate([{"role": "user", "content": "Hello"}], stream=True) as stream:
            for chunk in stream:
                print(chunk.text, end="")

All errors are :class:`baton.errors.BatonError`. Callers meet

::

    BatonError
    ├── InvalidRequestError     an argument is invalid; ``.field`` names it (often before anything is sent)
    ├── NotFoundError           there is no such model, request or instance
    ├── QueueFullError          all instances are full; ``.retry_after_s`` says when to retry
    ├── UnavailableError        no router or instance is available, after ``retries`` retries
    ├── DeadlineError           the call took longer than ``timeout``
    ├── CancelledError          the server cancelled the request
    ├── UnauthenticatedError    the API key or token is invalid
    └── InternalError           a fault in Baton

A call is retried only if it failed with UNAVAILABLE before its first token.
"""

from baton.client.async_client import AsyncClient
from baton.client.async_stream import AsyncStream
from baton.client.portal import Stream
from baton.client.request import Options, Prompt
from baton.client.scaling import Switch
from baton.client.sync_client import Client
from baton.client.types import (
    Choice,
    Chunk,
    Generation,
    Instance,
    Load,
    Model,
    Quantiles,
    RouteCandidate,
    RouteDecision,
    Stats,
    Trace,
)

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "Choice",
    "Chunk",
    "Client",
    "Generation",
    "Instance",
    "Load",
    "Model",
    "Options",
    "Prompt",
    "Quantiles",
    "RouteCandidate",
    "RouteDecision",
    "Stats",
    "Stream",
    "Switch",
    "Trace",
]
