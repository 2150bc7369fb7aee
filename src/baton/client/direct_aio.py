"""Direct mode of the asynchronous client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import grpc
import grpc.aio

from baton.api.v1 import router_pb2, worker_pb2_grpc
from baton.client.call_state import Settings
from baton.client.direct import MAX_CHANNELS, NOTE_TIMEOUT_S, DirectAnswer, load_text_model, may_go_on
from baton.tokenizer import TextModel

_CLOSE_S = 1.0


class AsyncDirectLinks:
    """What the direct calls of one client share; see :class:`baton.client.direct_sync.DirectLinks`."""

    def __init__(self, settings: Settings, router: Any, tokenizer: str) -> None:
        self.router, self.metadata, self._settings = router, settings.metadata, settings
        self._tokenizer = tokenizer
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._models: dict[str, TextModel] = {}
        self._notes: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()

    def decode(self, address: str) -> Any:
        """Return the stub of a decode instance."""
        channel = self._channels.pop(address, None)
        if channel is None:
            if len(self._channels) >= MAX_CHANNELS:
                # Calls that run on it keep it open until they end.
                self._channels.pop(next(iter(self._channels)))
            channel = self._settings.aio_channel(address)
        self._channels[address] = channel
        return worker_pb2_grpc.WorkerServiceStub(channel)

    async def model(self, path: str) -> TextModel:
        """Return the text model."""
        if path not in self._models:
            self._models[path] = await asyncio.to_thread(load_text_model, self._tokenizer, path)
        return self._models[path]

    def note(self, request: router_pb2.NoteDirectRequest) -> None:
        """Send a notice, and wait for nothing: what is lost, the router's lease makes good."""
        if not self._loop.is_running():
            return
        task = self._loop.create_task(self._note(request))
        self._notes.add(task)
        task.add_done_callback(self._notes.discard)

    async def _note(self, request: router_pb2.NoteDirectRequest) -> None:
        try:
            await self.router.NoteDirect(request, timeout=NOTE_TIMEOUT_S, metadata=self.metadata)
        except (grpc.RpcError, grpc.aio.UsageError):
            return  # the lease ends it

    async def close(self) -> None:
        """Let notices arrive, and end the connections."""
        if self._notes:
            await asyncio.wait(self._notes, timeout=_CLOSE_S)
        for task in self._notes:
            task.cancel()
        for channel in self._channels.values():
            await channel.close(None)


class AsyncDirectCall:
    """Looks like a call of the router's ``Generate``, and has its tokens from the decode instance.

    Args are those of :class:`baton.client.direct_sync.DirectCall`.
    """

    def __init__(self, links: AsyncDirectLinks, request: router_pb2.RouterGenerateRequest, timeout: float) -> None:
        self._links, self._request = links, request
        self._loop = asyncio.get_running_loop()
        self._ends_at = self._loop.time() + timeout
        self._inner: Any = None
        self._answer: DirectAnswer | None = None
        self._stopped = False
        self._messages = self._run()

    async def read(self) -> Any:
        """Return the next message, or grpc's ``EOF``."""
        return await anext(self._messages, grpc.aio.EOF)  # type: ignore[attr-defined]

    def cancel(self) -> None:
        """End the request."""
        self._stopped = True
        if self._inner is not None:
            self._inner.cancel()
        self._end()

    async def _run(self) -> AsyncGenerator[router_pb2.RouterGenerateResponse, None]:
        links = self._links
        route = await self._open(links.router.Route, router_pb2.RouteRequest(direct=self._request))
        answer = self._answer = DirectAnswer(self._request, route, await links.model(route.direct.model_path))
        try:
            async with aclosing(self._direct(answer)) as messages:
                async for message in messages:
                    yield message
        finally:
            self._end()
        if answer.ended:
            return
        if (exhausted := answer.exhausted()) is not None:
            yield exhausted
        for index, rest in answer.rest():
            async for response in self._open(links.router.Generate, rest):
                yield answer.take_rest(index, response)
                if not answer.is_open(index):
                    self._inner.cancel()
                    break

    async def _direct(self, answer: DirectAnswer) -> AsyncGenerator[router_pb2.RouterGenerateResponse, None]:
        links = self._links
        try:
            async for response in self._open(links.decode(answer.address).Generate, answer.message):
                yield answer.take(response)
                if answer.runs_on:
                    self._inner.cancel()
                    return
                if (note := answer.note()) is not None:
                    links.note(note)
        except grpc.RpcError as error:
            if self._stopped or not (answer.ended or may_go_on(error)):
                raise
        self._end(failed=not answer.ended)

    def _end(self, *, failed: bool = False) -> None:
        answer, self._answer = self._answer, None
        if answer is not None:
            self._links.note(answer.last_note(failed=failed))

    def _open(self, method: Any, request: Any) -> Any:
        left = max(0.001, self._ends_at - self._loop.time())
        self._inner = method(request, timeout=left, metadata=self._links.metadata)
        if self._stopped:
            self._inner.cancel()
        return self._inner
