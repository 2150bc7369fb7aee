"""An idle instance becomes one of the other role: two decode instances, then one of each, then two again."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import pytest
from tests.support.servers.cluster import slow_steps

from baton.api.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from baton.config import EngineConfig
from baton.config.router import RouterConfig
from baton.config.worker import WorkerConfig
from baton.errors import BusyError, InvalidRequestError, UnauthenticatedError
from baton.rpc.channel import open_channel
from baton.rpc.convert import role_to_pb
from baton.rpc.errors import from_rpc_error
from baton.rpc.service_token import Token
from baton.types import Role
from baton.worker.instance import WorkerInstance
from baton_router.app import RouterApp
from baton_router.indexer.events import IndexState

TOKEN = Token("sesame, of the services")
TINY = str(Path(__file__).parents[3] / "models" / "baton-tiny")


def prompt(at: int) -> list[int]:
    return [(11 * i + 37 * at) % 400 + 10 for i in range(200)]


@dataclass
class Fleet:
    app: RouterApp
    http: httpx.AsyncClient
    instances: list[WorkerInstance]

    def known(self) -> dict[str, Role]:
        """What the router may use, with whole indexes."""
        return {
            x.instance_id: x.role
            for x in self.app.registry.instances()
            if x.ready and x.events.state is IndexState.EXACT
        }

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(240):
            while not condition():
                await self.app.registry.wait_changed(0.01)

    async def complete(self, ids: list[int], **fields: Any) -> tuple[list[int], dict[str, Any]]:
        """Return the tokens, and the headers with the way that the request took."""
        body = {"prompt": ids, "max_tokens": 6, "temperature": 0, "return_token_ids": True, **fields}
        answer = await self.http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["token_ids"], dict(answer.headers)


async def set_role(instance: WorkerInstance, role: Role, token: Token | None = TOKEN) -> Role:
    async with open_channel(instance.address, token=token) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        try:
            answer = await stub.SetRole(worker_pb2.SetRoleRequest(role=role_to_pb(role)))
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
    return {common_pb2.ROLE_PREFILL: Role.PREFILL, common_pb2.ROLE_DECODE: Role.DECODE}[answer.previous]


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    token = tmp_path / "token"
    token.write_text("sesame, of the services")
    async with contextlib.AsyncExitStack() as stack:
        app = RouterApp(
            RouterConfig(model=TINY, token_file=str(token), remote_prefill_threshold=32, port=0, grpc_port=0)
        )
        await app.start()
        stack.push_async_callback(app.stop)
        engine = EngineConfig(model=TINY, dtype="float32", kv_blocks=100, prefill_chunk=64)
        instances = []
        for at in range(2):
            config = WorkerConfig(
                instance_id=f"i{at}", routers=(f"127.0.0.1:{app.grpc_port}",), token_file=str(token), pipes=("tcp",)
            )
            instance = WorkerInstance(Role.DECODE, config, engine)
            await instance.start()
            stack.push_async_callback(instance.stop, 0)
            instances.append(instance)
        url = f"http://127.0.0.1:{app.http_port}"
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=240))
        found = Fleet(app, http, instances)
        await found.until(lambda: found.known() == {"i0": Role.DECODE, "i1": Role.DECODE})
        yield found


async def test_a_decode_instance_becomes_a_prefill_instance_and_comes_back(fleet: Fleet) -> None:
    alone = [(await fleet.complete(prompt(at)))[0] for at in range(3)]
    epoch, second = fleet.instances[1].context.base.model.arena.epoch, fleet.instances[1]
    scheduler = second.context.engine.core._scheduler
    assert scheduler.step_budget is not None, "streams wait for its steps"
    assert await set_role(second, Role.PREFILL) is Role.DECODE
    assert scheduler.step_budget is None
    await fleet.until(lambda: fleet.known() == {"i0": Role.DECODE, "i1": Role.PREFILL})
    for at in range(3):
        # Another salt: nobody's cache has the prompt.
        tokens, headers = await fleet.complete(prompt(at), cache_salt="other")
        assert tokens == alone[at]
        assert (headers["x-baton-path"], headers["x-baton-prefill-instance"]) == ("remote", "i1")
        assert headers["x-baton-decode-instance"] == "i0"
    other = next(x for x in fleet.app.registry.instances() if x.instance_id == "i1")
    await fleet.until(lambda: other.events.num_blocks > 0)  # the prefix cache and its events went on
    assert await set_role(second, Role.DECODE) is Role.PREFILL
    await fleet.until(lambda: fleet.known() == {"i0": Role.DECODE, "i1": Role.DECODE})
    assert second.context.base.model.arena.epoch == epoch
    assert scheduler.step_budget is not None
    # At once: one after the other they might all go to the instance that was the faster one so far.
    answers = await asyncio.gather(*(fleet.complete(prompt(at % 3), cache_salt=str(at)) for at in range(12)))
    for at, (tokens, headers) in enumerate(answers):
        assert tokens == alone[at % 3]
        assert headers["x-baton-path"] == "local"
    assert {headers["x-baton-decode-instance"] for _, headers in answers} == {"i0", "i1"}
    for instance in fleet.instances:
        engine = instance.context.engine
        await engine.call(engine.core.check_integrity)


async def test_the_role_of_a_busy_instance_stays(fleet: Fleet) -> None:
    slow = slow_steps(*fleet.instances)
    stuck = asyncio.create_task(fleet.complete(prompt(0), max_tokens=300, ignore_eos=True))
    async with asyncio.timeout(240):
        while not any(x.context.admission.active for x in fleet.instances):
            await asyncio.sleep(0.001)
        first = next(x for x in fleet.instances if x.context.admission.active)
        with pytest.raises(BusyError, match="drain it first"):
            await set_role(first, Role.PREFILL)
    slow.clear()
    assert first.role is Role.DECODE
    assert not first.context.admission.draining
    assert len((await stuck)[0]) == 300


async def test_a_drained_instance_takes_requests_in_its_new_role(fleet: Fleet) -> None:
    second = fleet.instances[1]
    async with open_channel(second.address, token=TOKEN) as channel:
        await worker_pb2_grpc.WorkerServiceStub(channel).Drain(worker_pb2.DrainRequest(timeout_ms=240_000))
    await fleet.until(lambda: fleet.known() == {"i0": Role.DECODE})
    assert await set_role(second, Role.PREFILL) is Role.DECODE
    await fleet.until(lambda: fleet.known() == {"i0": Role.DECODE, "i1": Role.PREFILL})
    assert (await fleet.complete(prompt(5)))[1]["x-baton-prefill-instance"] == "i1"


async def test_only_who_has_the_token_may_change_a_role_and_to_one_that_there_is(fleet: Fleet) -> None:
    with pytest.raises(UnauthenticatedError):
        await set_role(fleet.instances[0], Role.PREFILL, token=None)
    async with open_channel(fleet.instances[0].address, token=TOKEN) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await worker_pb2_grpc.WorkerServiceStub(channel).SetRole(worker_pb2.SetRoleRequest())
    assert isinstance(from_rpc_error(caught.value), InvalidRequestError)
    assert await set_role(fleet.instances[0], Role.DECODE) is Role.DECODE  # no change, and no harm
