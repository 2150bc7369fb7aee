"""The SDK: :class:`Client` and :class:`AsyncClient` speak gRPC to a Baton router.

::

    with baton.Client("127.0.0.1:8001") as client:
        print(client.generate("def main():", max_tokens=32, temperature=0).text)
        with client.generate([{"role": "user", "content": "Hello"}], stream=True) as stream:
            for chunk in stream:
                print(chunk.text, end="")

Whatever goes wrong is a :class:`baton.errors.BatonError`; the ones that a caller meets are

::

    BatonError
    ├── InvalidRequestError     the request is wrong; ``.field`` says where (often found before anything is sent)
    ├── NotFoundError           no such model
    ├── QueueFullError          every instance is full; ``.retry_after_s`` says when to come back
    ├── UnavailableError        no router or no instance is there; was tried again ``retries`` times
    ├── DeadlineError           it took longer than ``timeout``
    ├── CancelledError          the server gave the request up
    ├── UnauthenticatedError    the token is wrong
    └── InternalError           Baton is at fault

A call is repeated only if it failed with UNAVAILABLE and no token of it had come.
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
