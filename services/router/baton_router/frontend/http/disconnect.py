"""Cancels the work for a request when nobody waits for it any more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType

from starlette.types import Message, Receive, Send

from baton.errors import BatonError, CancelledError, DeadlineError

OnDisconnect = Callable[[Callable[[], None] | None], None]


class ClientGone(CancelledError):
    """The client closed its connection."""

    code = "client_gone"


class RequestGuard:
    """An async context manager: cancels its body when the client goes, doesn't read, or the time is up.

    The body runs in the caller's own task, so that no queue stands between the generation and the socket; a watcher
    beside it waits for the disconnect. On leaving, the cancellation becomes the error that says why.

    Raises:
        ClientGone: The client closed the connection, or took nothing for too long.
        DeadlineError: The request took too long.
    """

    def __init__(
        self,
        receive: Receive,
        *,
        limit_s: float,
        send_timeout_s: float,
        on_disconnect: OnDisconnect | None = None,
    ) -> None:
        """Prepare.

        Args:
            receive: Tells of the disconnect, if nothing else does.
            limit_s: Seconds that the body may take.
            send_timeout_s: Seconds that the client may leave a message untaken.
            on_disconnect: Takes what is to be called when the client has gone; see ``protocol.DISCONNECT``.
        """
        self._receive = receive
        self._on_disconnect = on_disconnect
        self._limit_s = limit_s
        self._send_timeout_s = send_timeout_s
        self._reason: BatonError | None = None
        self._sending_since: float | None = None

    async def __aenter__(self) -> RequestGuard:
        """Begin to watch."""
        self._loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        self._task: asyncio.Task[object] = task
        # Servers can tell of a disconnect; with others a task has to wait for it.
        self._watcher = None if self._on_disconnect is not None else asyncio.create_task(self._watch())
        if self._on_disconnect is not None:
            self._on_disconnect(self._gone)
        too_late = DeadlineError(f"the request took longer than {self._limit_s:g} s")
        self._deadline = self._loop.call_later(self._limit_s, self._cancel, too_late)
        self._stall = self._loop.call_later(self._send_timeout_s, self._check_sending)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop watching."""
        if self._watcher is not None:
            self._watcher.cancel()
        if self._on_disconnect is not None:
            self._on_disconnect(None)
        self._deadline.cancel()
        self._stall.cancel()
        # Cancelled by somebody else as well (a server that shuts down): then that goes first.
        if self._reason is not None and self._task.uncancel() == 0 and kind is not None:
            raise self._reason from error

    async def send(self, send: Send, message: Message) -> None:
        """Send a message, under the guard's eye."""
        self._sending_since = self._loop.time()
        await send(message)
        self._sending_since = None

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._gone()

    def _gone(self) -> None:
        self._cancel(ClientGone("the client closed the connection"))

    def _check_sending(self) -> None:
        """Look from time to time whether the client takes what is sent: cheaper than a timer per message."""
        since = self._sending_since
        if since is not None and self._loop.time() - since >= self._send_timeout_s:
            self._cancel(ClientGone(f"the client took nothing for {self._send_timeout_s:g} s"))
        else:
            self._stall = self._loop.call_later(self._send_timeout_s / 2, self._check_sending)

    def _cancel(self, reason: BatonError) -> None:
        if self._reason is None:
            self._reason = reason
            self._task.cancel()
