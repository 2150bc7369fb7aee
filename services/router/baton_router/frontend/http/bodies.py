"""Bodies of requests: how much memory they may take while they arrive, and how JSON becomes of them.

The event loop serves all tenants, so one tenant's bodies may neither fill the memory nor hold the loop up. A body
counts from its first byte until it is decoded. Large ones are decoded in a thread, one at a time, in turns of the
tenants. The decoder keeps the interpreter's lock, so the values of a body are counted before: a million lists would
take a second, the text of a million tokens takes a few milliseconds.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import orjson

from baton.errors import InvalidRequestError
from baton_router.processor.turns import TurnThreads

MAX_BODY_BYTES = 16 << 20
_MIN_BODY_BYTES = 4 << 20
_BYTES_PER_TOKEN = 64
INLINE_BYTES = 256 * 1024
"""Longest body that is decoded on the event loop, in bytes."""
SMALL_BYTES = 16 * 1024
"""Longest body that is served as soon as it is there. Of longer ones one is decoded and parsed per turn of the loop."""
MAX_DEPTH = 200
"""Deepest nesting of a body; the rest of what orjson can write is for the objects around it."""
_ORJSON_DEPTH = 254
MAX_CONTAINERS = 100_000
MAX_VALUES = 1_000_000
"""Most lists and objects, and most values, of a body: either takes some 30 ms to decode."""
_STRING = re.compile(rb'"[^"]*"')


def max_body_bytes(max_model_len: int) -> int:
    """Return the longest body, in bytes, that a request to a model may need.

    A token of text is some 4 bytes, up to 12 with escapes, and some 8 as a number. There may be several prompts, and
    schemas beside them.

    Args:
        max_model_len: Tokens of the model's context.
    """
    return min(MAX_BODY_BYTES, max(_MIN_BODY_BYTES, _BYTES_PER_TOKEN * max_model_len))


def decode_json(data: bytes | bytearray) -> Any:
    """Decode a JSON body.

    Raises:
        InvalidRequestError: The body is not JSON, has too many values, or is nested too deep to be written again.
    """
    if len(data) > INLINE_BYTES:
        _check_values(data)
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}") from error
    if data.count(b"{") + data.count(b"[") > MAX_DEPTH:
        around = value
        for _ in range(_ORJSON_DEPTH - MAX_DEPTH):
            around = [around]
        try:
            orjson.dumps(around)
        except TypeError as error:
            raise InvalidRequestError(f"the body is nested deeper than {MAX_DEPTH}") from error
    return value


def _check_values(data: bytes | bytearray) -> None:
    """Refuse a body with too many values, without decoding it.

    Raises:
        InvalidRequestError: Says how many there may be.
    """
    # Strings have commas and brackets, too. Counting these as well is quick, and mostly enough.
    if _find_excess(data) is None:
        return
    plain = data.replace(rb"\\", b"").replace(rb"\"", b"")
    excess = "strings" if plain.count(b'"') > MAX_VALUES else _find_excess(_STRING.sub(b"", plain))
    if excess is not None:
        raise InvalidRequestError(
            f"the body has too many {excess}: at most {MAX_CONTAINERS} lists and objects, {MAX_VALUES // 2} strings "
            f"and {MAX_VALUES} values in all are taken"
        )


def _find_excess(data: bytes | bytearray) -> str | None:
    containers = data.count(b"[") + data.count(b"{")
    if containers > MAX_CONTAINERS:
        return "lists and objects"
    return "values" if containers + data.count(b",") > MAX_VALUES else None


class Body:
    """The body of one request, from its first byte until it is decoded.

    Attributes:
        data: Bytes that have arrived so far.
        waits: Whether the next piece should wait until there is memory again.
    """

    __slots__ = ("_budget", "_resume", "_tenant", "data", "waits")

    def __init__(self, budget: BodyBudget, tenant: str, resume: Callable[[], object]) -> None:
        self._budget = budget
        self._tenant = tenant
        self._resume = resume
        self.data = bytearray()
        self.waits = False

    def add(self, piece: bytes) -> bool:
        """Add a piece; ``False``: it is not taken, as its tenant did not wait and has far too much."""
        return self._budget.add(self, self._tenant, piece)

    def close(self) -> None:
        """Free the memory; does nothing the second time."""
        self._budget.remove(self, self._tenant)

    def resume(self) -> None:
        """Go on after a wait."""
        self.waits = False
        self._resume()


@dataclass(slots=True)
class _TenantBodies:
    num_bytes: int = 0
    bodies: dict[Body, None] = field(default_factory=dict)
    """In the order of their first bytes."""


class BodyBudget:
    """Memory for the bodies of one process that are not decoded yet.

    Bodies wait for each other when a tenant or all together have too much. The tenant's oldest body goes on all the
    same while the process has memory, and the process's oldest always, so that none waits for ever. Tenants with less
    than an equal part go on until all together have twice as much: a few who are slow keep no others waiting. What is
    as short as most bodies are need not wait.

    Args:
        most: Bytes of all bodies from which on they wait.
        share: Bytes of one tenant's bodies from which on they wait; twice as many are refused.
        free: Bytes of a body that need not wait.

    Attributes:
        num_bytes: Bytes of all bodies.
    """

    def __init__(self, most: int = 96 << 20, share: int = 32 << 20, free: int = 64 << 10) -> None:
        self._most = most
        self._share = share
        self._free = free
        self._bodies: dict[Body, None] = {}
        self._tenants: dict[str, _TenantBodies] = {}
        self._waiting: dict[Body, str] = {}
        self.num_bytes = 0

    def open(self, tenant: str, resume: Callable[[], object]) -> Body:
        """Return a new body.

        Args:
            tenant: Tenant that it counts for.
            resume: Called after a wait.
        """
        return Body(self, tenant, resume)

    def add(self, body: Body, tenant: str, piece: bytes) -> bool:
        """Add a piece to a body; see :meth:`Body.add`."""
        if body not in self._bodies:
            self._bodies[body] = None
            self._tenants.setdefault(tenant, _TenantBodies()).bodies[body] = None
        of_tenant = self._tenants[tenant]
        if of_tenant.num_bytes + len(piece) > 2 * self._share and not self._may_grow(body, tenant):
            return False
        body.data += piece
        of_tenant.num_bytes += len(piece)
        self.num_bytes += len(piece)
        body.waits = len(body.data) > self._free and not self._may_grow(body, tenant)
        if body.waits:
            self._waiting[body] = tenant
        return True

    def remove(self, body: Body, tenant: str) -> None:
        """Free the memory of a body, if it has some, and let others go on."""
        if body not in self._bodies:
            return
        del self._bodies[body]
        self._waiting.pop(body, None)
        self.num_bytes -= len(body.data)
        of_tenant = self._tenants[tenant]
        of_tenant.num_bytes -= len(body.data)
        del of_tenant.bodies[body]
        if not of_tenant.bodies:
            del self._tenants[tenant]
        body.data = bytearray()  # the decoder has the old one
        for other, its_tenant in list(self._waiting.items()):
            if self._may_grow(other, its_tenant):
                del self._waiting[other]
                other.resume()

    def _may_grow(self, body: Body, tenant: str) -> bool:
        of_tenant = self._tenants[tenant]
        if self.num_bytes >= self._most:
            has_less = self.num_bytes < 2 * self._most and of_tenant.num_bytes < self._most // len(self._tenants)
            if not has_less:
                return next(iter(self._bodies)) is body
        return of_tenant.num_bytes < self._share or next(iter(of_tenant.bodies)) is body


class BodyDecoder:
    """Decodes large bodies in a thread, one at a time, in turns of their tenants."""

    def __init__(self) -> None:
        self._threads = TurnThreads(1, "body decoder", "large bodies decoded")

    async def decode(self, tenant: str, data: bytes | bytearray) -> Any:
        """Decode a JSON body; see :func:`decode_json`.

        Raises:
            UnavailableError: Other tenants' bodies took too long.
        """
        return await self._threads.run(tenant, functools.partial(decode_json, data))
