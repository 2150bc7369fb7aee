"""A router with API keys over workers without a model, to be looked at from outside."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from tests.support.servers.fake_worker import FakeWorker

from baton.cli.main import main
from baton.config.router import RouterConfig
from baton.rpc.service_token import read_token
from baton.types import Role
from baton_router.app import RouterApp
from baton_router.indexer.events import IndexState

TINY = str(Path(__file__).parents[2] / "models" / "baton-tiny")
SALT = "salt-of-a-tenant"
KEY = "sesame"
PROMPT = [701, 702, 703, 704, 705, 706, 707, 708]


@dataclass
class Watched:
    app: RouterApp
    http: httpx.AsyncClient
    workers: list[FakeWorker]
    key_file: str

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.app.http_port}"

    async def complete(self, request_id: str, **fields: Any) -> httpx.Response:
        body = {"prompt": PROMPT, "max_tokens": 3, "cache_salt": SALT, **fields}
        return await self.http.post("/v1/completions", json=body, headers={"x-request-id": request_id})

    async def scrape(self) -> str:
        return (await self.http.get("/metrics")).text

    async def get(self, path: str) -> Any:
        answer = await self.http.get(path)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(240):
            while not condition():
                await self.app.registry.wait_changed(0.01)

    async def explain(self, *args: str) -> int:
        return await asyncio.to_thread(main, ["explain", "--url", self.url, *args])


@contextlib.asynccontextmanager
async def watched_router(
    directory: Path, prefills: int = 1, decodes: int = 2, *, max_model_len: int = 4096
) -> AsyncIterator[Watched]:
    """Run prefill instances p0, p1, ... and decode instances d0, d1, ... behind a router that wants a key."""
    async with contextlib.AsyncExitStack() as stack:
        keys = directory / "keys"
        keys.write_text(f"{KEY}\n")
        token = directory / "token"
        token.write_text("the services' token")
        workers = [FakeWorker(Role.PREFILL, f"p{at}", token=read_token(str(token))) for at in range(prefills)]
        workers += [FakeWorker(Role.DECODE, f"d{at}", token=read_token(str(token))) for at in range(decodes)]
        for worker in workers:
            worker.state.model_path, worker.state.max_model_len = TINY, max_model_len
            await worker.start()
            stack.push_async_callback(worker.stop)
        config = RouterConfig(
            port=0,
            grpc_port=0,
            prefill=tuple(x.address for x in workers[:prefills]),
            decode=tuple(x.address for x in workers[prefills:]),
            api_keys=str(keys),
            token_file=str(token),
            reconnect_max_s=0.2,
            no_instance_wait_s=0.2,
            batch_store=str(directory / "batches"),
        )
        app = RouterApp(config)
        await app.start()
        stack.push_async_callback(app.stop)
        headers = {"authorization": f"Bearer {KEY}"}
        http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{app.http_port}", headers=headers, timeout=60)
        await stack.enter_async_context(http)
        watched = Watched(app, http, workers, str(keys))
        await watched.until(
            lambda: all(x.ready and x.events.state is IndexState.EXACT for x in app.registry.instances())
        )
        yield watched
