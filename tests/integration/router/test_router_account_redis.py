"""API keys that stand in Redis: a real redis-server, real routers."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.support.servers.redis_server import RedisServer, missing_redis

from baton.config.router import RouterConfig
from baton.errors import ConfigError
from baton.rpc.redis import open_redis
from baton_router.accounts import accounts_key
from baton_router.app import RouterApp

pytestmark = pytest.mark.skipif(missing_redis() is not None, reason=missing_redis() or "")


def tenants(**keys: str) -> str:
    return json.dumps({"tenants": {name: {"keys": [key]} for name, key in keys.items()}})


async def test_keys_come_go_and_stay_while_redis_is_away(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("a secret that routers share")
    (tmp_path / "token").write_text("the services' token")
    server = RedisServer()
    await server.start()
    key = accounts_key("baton")
    flags: dict[str, Any] = {
        **{"port": 0, "grpc_port": 0, "redis": server.url, "api_keys": "redis"},
        **{"tenant_secret_file": str(tmp_path / "secret"), "token_file": str(tmp_path / "token")},
    }
    redis = open_redis(server.url)
    try:
        for wrong in (None, "[]", "no JSON", tenants()):
            if wrong is not None:
                await redis.set(key, wrong)
            with pytest.raises(ConfigError) as caught:
                await started(flags)
            assert caught.value.field == "api_keys"
        await redis.set(key, tenants(a="one"))
        app = await started(flags)
        try:
            assert app._credentials.accounts is not None
            assert await statuses(app, "one", "two") == [503, 401]
            await redis.set(key, tenants(a="one", b="two"))
            await until_statuses(app, 503, 503)
            await redis.set(key, "broken")
            await app._reload.look()
            assert await statuses(app, "one", "two") == [503, 503]
            await redis.set(key, tenants(b="two"))
            await until_statuses(app, 401, 503)
            await server.kill()
            await app._reload.look()
            assert await statuses(app, "one", "two") == [401, 503]
        finally:
            await app.stop()
        with pytest.raises(ConfigError, match="Redis"):
            await started(flags)
    finally:
        await redis.aclose()
        await server.kill()


async def started(flags: dict[str, Any]) -> RouterApp:
    app = RouterApp(RouterConfig(**flags))
    try:
        await app.start()
    except BaseException:
        await app.stop()
        raise
    return app


async def until_statuses(app: RouterApp, *wanted: int) -> None:
    """Have the router look until its answers to "one" and "two" are these: a busy Redis may be too late for a look."""
    async with asyncio.timeout(240):
        while await statuses(app, "one", "two") != list(wanted):
            await app._reload.look()


async def statuses(app: RouterApp, *keys: str) -> list[int]:
    """What requests with these keys are answered: 503 if they are let in, as nobody is there to serve them."""
    body = {"model": "m", "prompt": "x"}
    found = []
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{app.http_port}", timeout=240) as client:
        for key in keys:
            headers = {"authorization": f"Bearer {key}"}
            found.append((await client.post("/v1/completions", json=body, headers=headers)).status_code)
    return found


def test_what_it_needs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        RouterConfig(api_keys="redis")
    assert caught.value.field == "redis"
    with pytest.raises(ConfigError) as caught:
        RouterConfig(api_keys="redis", redis="redis://127.0.0.1:1/0")
    assert caught.value.field == "token_file"
    (tmp_path / "token").write_text("the services' token")
    token_file = str(tmp_path / "token")
    with pytest.raises(ConfigError) as caught:
        RouterApp(RouterConfig(api_keys="redis", redis="redis://127.0.0.1:1/0", token_file=token_file))
    assert caught.value.field == "tenant_secret_file"
