"""Large answers that are kept: how many of them a tenant reads at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator

from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from baton.errors import QueueFullError

PIECE_BYTES = 64 * 1024


class Readers:
    """Counts the answers that each tenant reads, and refuses more than it may read at once.

    Args:
        most: Most answers of a tenant.
        kind: Kind of the answers, as messages name them.
    """

    def __init__(self, most: int, kind: str) -> None:
        self._most = most
        self._kind = kind
        self._reading: Counter[str] = Counter()

    def check(self, tenant: str) -> None:
        """Check whether a tenant may read another one.

        Raises:
            QueueFullError: It may not.
        """
        if self._reading[tenant] >= self._most:
            message = f"{self._most} {self._kind} are read already, as many as may be read at once"
            raise QueueFullError(message, retry_after_s=1.0)

    def whole(self, content: bytes, tenant: str) -> Response:
        """Return the answer with some JSON, which counts as being read if it is long."""
        if len(content) <= PIECE_BYTES:
            return Response(content, media_type="application/json")
        return self.stream(_pieces(content), len(content), tenant, "application/json")

    def stream(self, content: AsyncIterator[bytes], size: int, tenant: str, media_type: str) -> Response:
        """Return the answer with a content of ``size`` bytes, which is made as its client reads it."""
        return _CountedResponse(content, size, media_type, self._reading, tenant)


async def _pieces(content: bytes) -> AsyncIterator[bytes]:
    for at in range(0, len(content), PIECE_BYTES):
        yield content[at : at + PIECE_BYTES]


class _CountedResponse(StreamingResponse):
    """An answer that counts as being read until it is sent or its client has gone.

    Args:
        content: The content.
        size: Bytes of the content.
        media_type: Type of the content.
        reading: Number of answers being read, by tenant.
        tenant: Name of the tenant.
    """

    def __init__(
        self, content: AsyncIterator[bytes], size: int, media_type: str, reading: Counter[str], tenant: str
    ) -> None:
        super().__init__(content, headers={"content-length": str(size)}, media_type=media_type)
        self._reading = reading
        self._tenant = tenant

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._reading[self._tenant] += 1
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._reading[self._tenant] -= 1
            if not self._reading[self._tenant]:
                del self._reading[self._tenant]
