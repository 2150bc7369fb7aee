"""Direct mode of the synchronous client."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc

from baton.api.v1 import router_pb2, worker_pb2_grpc
from baton.client.call_state import Settings
from baton.client.direct import MAX_CHANNELS, NOTE_TIMEOUT_S, DirectAnswer, load_text_model, may_go_on
from baton.tokenizer import TextModel

_CLOSE_S = 1.0


class Stopped(grpc.RpcError):
    """The caller cancelled."""

    def code(self) -> grpc.StatusCode:
        """Return CANCELLED."""
        return grpc.StatusCode.CANCELLED

    def details(self) -> str:
        """Return why."""
        return "cancelled by the caller"

    def trailing_metadata(self) -> tuple[()]:
        """Return nothing."""
        return ()


class DirectLinks:
    """What the direct calls of one client share: channels to decode instances, the tokenizer, notices on their way.

    Args:
        settings: The client's.
        router: Stub of the router.
        tokenizer: Directory of the tokenizer; empty: the one that the instance names.
    """

    def __init__(self, settings: Settings, router: Any, tokenizer: str) -> None:
        self.router, self.metadata, self._settings = router, settings.metadata, settings
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._channels: dict[str, grpc.Channel] = {}
        self._models: dict[str, TextModel] = {}
        self._notes: set[Any] = set()

    def decode(self, address: str) -> Any:
        """Return the stub of a decode instance."""
        with self._lock:
            channel = self._channels.pop(address, None)
            if channel is None:
                if len(self._channels) >= MAX_CHANNELS:
                    # Calls that run on it keep it open until they end.
                    self._channels.pop(next(iter(self._channels)))
                channel = self._settings.channel(address)
            self._channels[address] = channel
        return worker_pb2_grpc.WorkerServiceStub(channel)

    def model(self, path: str) -> TextModel:
        """Return the text model."""
        with self._lock:
            if path not in self._models:
                self._models[path] = load_text_model(self._tokenizer, path)
            return self._models[path]

    def note(self, request: router_pb2.NoteDirectRequest) -> None:
        """Send a notice, and wait for nothing: what is lost, the router's lease makes good."""
        with contextlib.suppress(ValueError):  # the client is closed
            call = self.router.NoteDirect.future(request, timeout=NOTE_TIMEOUT_S, metadata=self.metadata)
            self._notes.add(call)
            call.add_done_callback(self._notes.discard)

    def close(self) -> None:
        """Let notices arrive, and end the connections."""
        for call in list(self._notes):
            with contextlib.suppress(grpc.RpcError, grpc.FutureTimeoutError, grpc.FutureCancelledError):
                call.result(timeout=_CLOSE_S)
        for channel in self._channels.values():
            channel.close()


class DirectCall(Iterator[router_pb2.RouterGenerateResponse]):
    """Looks like a call of the router's ``Generate``, and has its tokens from the decode instance.

    Args:
        links: The client's.
        request: What to generate.
        timeout: Seconds for all of it.
    """

    def __init__(self, links: DirectLinks, request: router_pb2.RouterGenerateRequest, timeout: float) -> None:
        self._links, self._request = links, request
        self._ends_at = time.monotonic() + timeout
        self._inner: Any = None
        self._answer: DirectAnswer | None = None
        self._stopped = threading.Event()
        self._messages = self._run()

    def __next__(self) -> router_pb2.RouterGenerateResponse:
        return next(self._messages)

    def cancel(self) -> None:
        """End the request; may be called from another thread."""
        self._stopped.set()
        if self._inner is not None:
            self._inner.cancel()
        self._end()

    def _run(self) -> Iterator[router_pb2.RouterGenerateResponse]:
        links = self._links
        route = self._unary(links.router.Route, router_pb2.RouteRequest(direct=self._request))
        answer = self._answer = DirectAnswer(self._request, route, links.model(route.direct.model_path))
        try:
            yield from self._direct(answer)
        finally:
            self._end()
        if answer.ended:
            return
        if (exhausted := answer.exhausted()) is not None:
            yield exhausted
        for index, rest in answer.rest():
            for message in self._open(links.router.Generate, rest):
                yield answer.take_rest(index, message)
                if not answer.is_open(index):
                    self._inner.cancel()
                    break

    def _direct(self, answer: DirectAnswer) -> Iterator[router_pb2.RouterGenerateResponse]:
        links = self._links
        try:
            for response in self._open(links.decode(answer.address).Generate, answer.message):
                yield answer.take(response)
                if answer.runs_on:
                    self._inner.cancel()
                    return
                if (note := answer.note()) is not None:
                    links.note(note)
        except grpc.RpcError as error:
            if self._stopped.is_set() or not (answer.ended or may_go_on(error)):
                raise
        self._end(failed=not answer.ended)

    def _end(self, *, failed: bool = False) -> None:
        answer, self._answer = self._answer, None
        if answer is not None:
            self._links.note(answer.last_note(failed=failed))

    def _open(self, method: Any, request: Any) -> Any:
        self._inner = method(request, timeout=self._left(), metadata=self._links.metadata)
        if self._stopped.is_set():
            self._inner.cancel()
        return self._inner

    def _unary(self, method: Any, request: Any) -> Any:
        self._inner = method.future(request, timeout=self._left(), metadata=self._links.metadata)
        if self._stopped.is_set():
            self._inner.cancel()
        try:
            return self._inner.result()
        except grpc.FutureCancelledError as error:
            raise Stopped from error

    def _left(self) -> float:
        return max(0.001, self._ends_at - time.monotonic())
