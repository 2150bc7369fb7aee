"""A whole router in this process, over a scripted worker, with a tenant that has limits."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

from tests.support.servers.fake_worker import FakeWorker

from baton.config.router import RouterConfig
from baton.rpc.service_token import Token
from baton.types import Role
from baton_router.app import RouterApp


@contextlib.asynccontextmanager
async def app_with_limits(root: Path, **more: str) -> AsyncIterator[RouterApp]:
    """A whole router, with a tenant that may send a request a minute."""
    (root / "token").write_text("the services' token")
    tenants = {"limited": {"keys": ["sk-limited"], "requests_per_minute": 1}, "free": {"keys": ["sk-free"]}}
    (root / "keys.json").write_text(json.dumps({"tenants": tenants}))
    worker = FakeWorker(Role.DECODE, "d0", caches=False, token=Token("the services' token"))
    worker.state.model_path = "models/baton-tiny"
    await worker.start()
    flags = {
        "api_keys": str(root / "keys.json"),
        "token_file": str(root / "token"),
        "decode": (worker.address,),
        **more,
    }
    app = RouterApp(RouterConfig(port=0, grpc_port=0, **flags))  # type: ignore[arg-type]
    await app.start()
    try:
        async with asyncio.timeout(240):
            while not app.is_ready():
                await asyncio.sleep(0.01)
        yield app
    finally:
        await app.stop()
        await worker.stop()
