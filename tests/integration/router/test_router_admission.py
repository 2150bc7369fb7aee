"""Admission over HTTP and gRPC: a real router process over scripted workers."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from tests.integration.router.test_router_process import Process, router
from tests.support.servers.fake_worker import FakeWorker

from baton.api.v1 import common_pb2, worker_pb2
from baton.client import AsyncClient
from baton.errors import QueueFullError, SloError
from baton.rpc.server import free_port
from baton.rpc.service_token import Token, read_token
from baton.types import Role

ONE_SLOT = ("--instance-slots", "1")


class TimedWorker(FakeWorker):
    """Says that every prompt took it ``ttft_ms``."""

    ttft_ms = 500

    def _trace(self, request: worker_pb2.GenerateRequest) -> common_pb2.RequestTrace:
        trace = super()._trace(request)
        trace.recomputed_tokens, trace.cached_tokens = len(request.prompt_token_ids), 0
        trace.ttft_us = 1000 * self.ttft_ms
        return trace


@contextlib.asynccontextmanager
async def worker(name: str = "d0", *, timed: bool = False, token: Token | None = None) -> AsyncIterator[FakeWorker]:
    worker = (TimedWorker if timed else FakeWorker)(Role.DECODE, name, caches=False, token=token)
    worker.state.model_path = "models/baton-tiny"
    await worker.start()
    try:
        yield worker
    finally:
        await worker.stop()


class Client:
    """Sends completions and remembers in which order they were answered."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http
        self.answered: list[str] = []
        self.metrics_url = "/metrics"

    async def send(self, name: str, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        body = {"prompt": [5, 6, 7], "max_tokens": 2, "request_id": name, **fields}
        answer = await self.http.post("/v1/completions", json=body, headers=headers)
        self.answered.append(name)
        return answer

    def start(self, name: str, headers: dict[str, str] | None = None, **fields: Any) -> asyncio.Task[httpx.Response]:
        return asyncio.create_task(self.send(name, headers, **fields))

    async def metric(self, sample: str) -> float:
        for line in (await self.http.get(self.metrics_url)).text.splitlines():
            if line.startswith(sample + " "):
                return float(line.rpartition(" ")[2])
        return 0.0

    async def until(self, sample: str, value: float) -> None:
        async with asyncio.timeout(240):
            while await self.metric(sample) != value:
                await asyncio.sleep(0.005)

    async def queued(self, count: int) -> None:
        """Wait until so many wait."""
        async with asyncio.timeout(240):
            while sum([await self.metric(f'baton_router_queue_requests{{priority="{x}"}}') for x in CLASSES]) != count:
                await asyncio.sleep(0.005)


CLASSES = ("high", "normal", "low")


@contextlib.asynccontextmanager
async def serving(*flags: str, decode: FakeWorker) -> AsyncIterator[tuple[Process, Client]]:
    async with (
        router("--decode", decode.address, *flags) as process,
        httpx.AsyncClient(base_url=f"http://{process.http}", timeout=240) as http,
    ):
        async with asyncio.timeout(240):
            while (await http.get("/readyz")).status_code != 200:
                await asyncio.sleep(0.01)
        yield process, Client(http)


def go_on(decode: FakeWorker) -> None:
    decode.state.pause_after = None
    decode.changed()


async def occupied(client: Client, decode: FakeWorker) -> asyncio.Task[httpx.Response]:
    """Fill the only slot."""
    decode.state.pause_after = 1
    first = client.start("first")
    await decode.wait_until(lambda: len(decode.state.running) == 1)
    return first


def long(number: int) -> list[int]:
    """A prompt that is as much work as two turns, and shares nothing with others."""
    return [5 + number] * 1000


def order_of(decode: FakeWorker) -> list[str]:
    """The requests as the worker got them."""
    return [request.request_id.split("-")[0] for request in decode.state.requests]


async def test_what_has_no_room_waits_by_priority_and_deadline_and_in_turns() -> None:
    # It waits longer than any deadline of these.
    async with worker() as decode, serving(*ONE_SLOT, "--queue-timeout-s", "3600", decode=decode) as (_, client):
        first = await occupied(client, decode)
        tasks = [client.start(f"greedy{i}", user="greedy", prompt=long(i)) for i in range(12)]
        await client.queued(12)
        tasks.append(client.start("low", user="low", priority=5))
        tasks.append(client.start("modest", user="modest", prompt=long(20)))
        tasks.append(client.start("mine", user="mine"))
        tasks.append(client.start("mysoon", user="mine", ttft_ms=600_000))
        tasks.append(client.start("high", {"x-baton-priority": "-1"}, user="greedy", priority=7))
        await client.queued(17)
        assert await client.metric('baton_router_queue_requests{priority="high"}') == 1
        assert len(decode.state.requests) == 1, "the worker has no queue of its own"
        go_on(decode)
        answers = await asyncio.gather(first, *tasks)
        assert {answer.status_code for answer in answers} == {200}
        assert float(answers[0].headers["x-baton-queue-ms"]) == 0
        assert all(float(answer.headers["x-baton-queue-ms"]) > 0 for answer in answers[1:])
        order = order_of(decode)
        assert order[:2] == ["first", "high"]
        assert order[-1] == "low"
        greedy = [name for name in order if name.startswith("greedy")]  # they came at the same time, in any order
        assert order.index("mysoon") < order.index("mine") < order.index(greedy[4]), order
        assert order.index("modest") < order.index(greedy[4]), order
        await client.queued(0)
        (decision,) = (await client.http.get("/debug/decisions", params={"id": "modest"})).json()["decisions"]
        assert decision["router_queue_ms"] > 0
        told = (await client.http.get(f"/debug/decisions/{decision['id']}")).json()
        assert "in the router's queue" in told["why"][0]
        assert await client.metric('baton_router_queue_wait_seconds_count{priority="low"}') == 1
        assert await client.metric("baton_router_admitted_at_once_total") == 1


async def test_hints_of_agents_order_the_queue_and_spread_the_outputs() -> None:
    def hints(**fields: Any) -> dict[str, Any]:
        return {"nvext": {"agent_hints": fields}}

    async with worker() as decode, serving(*ONE_SLOT, decode=decode) as (_, client):
        tasks = [await occupied(client, decode)]
        for at, (name, fields) in enumerate(
            (
                ("plain", {}),
                ("late", {"priority": -1}),
                ("soon", {"priority": 9}),
                ("first tier", {"strict_priority": 1}),
            )
        ):
            tasks.append(client.start(name, **hints(**fields)))
            await client.queued(at + 1)
        go_on(decode)
        await asyncio.gather(*tasks)
        assert order_of(decode) == ["first", "first tier", "soon", "plain", "late"]
        assert [x.priority for x in decode.state.requests] == [0, -(2**16), -9, 0, 1]
    async with (
        worker("d0") as one,
        worker("d1") as two,
        serving("--decode", f"{one.address},{two.address}", decode=one) as (_, client),
    ):
        for each in (one, two):
            each.state.pause_after = 1
        long = client.start("long", prompt=[5], max_tokens=400, **hints(osl=4000))
        async with asyncio.timeout(240):
            while not (one.state.running or two.state.running):
                await asyncio.sleep(0.005)
        busy, idle = (one, two) if one.state.running else (two, one)
        short = [client.start(f"short{i}", prompt=[7 + i], **hints(osl=2)) for i in range(3)]
        await idle.wait_until(lambda: len(idle.state.running) == 3)
        assert len(busy.state.requests) == 1
        go_on(one)
        go_on(two)
        await asyncio.gather(*short)
        answer = await long
        assert (answer.status_code, answer.headers["x-baton-clipped"]) == (200, "osl")


async def test_a_full_queue_answers_at_once_and_says_when_to_come_back() -> None:
    flags = (*ONE_SLOT, "--queue-requests", "4")
    async with worker() as decode, serving(*flags, decode=decode) as (_, client):
        first = await occupied(client, decode)
        greedy = [client.start(f"g{i}", user="greedy") for i in range(2)]
        await client.queued(2)
        refused = await client.send("g2", user="greedy")
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert "of this tenant" in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) >= 1
        others = [client.start(f"o{i}", user=f"other{i}", priority=i) for i in range(2)]
        await client.queued(4)
        full = await client.send("late", user="late", priority=9)
        assert (full.status_code, full.json()["error"]["code"]) == (429, "queue_full")
        important = client.start("important", user="late", priority=-1)
        done, _ = await asyncio.wait(greedy, return_when=asyncio.FIRST_COMPLETED)
        (pushed,) = done  # of who has most, and not of who asked for less
        assert pushed.result().status_code == 429
        assert "more right" in pushed.result().json()["error"]["message"]
        greedy.remove(pushed)
        assert await client.metric('baton_router_admission_refusals_total{reason="tenant_share"}') == 1
        assert await client.metric('baton_router_admission_refusals_total{reason="queue_full"}') == 1
        assert await client.metric('baton_router_admission_refusals_total{reason="pushed_out"}') == 1
        go_on(decode)
        assert {x.status_code for x in await asyncio.gather(first, *greedy, *others, important)} == {200}
        assert order_of(decode)[1] == "important"


async def test_overload_is_said_before_it_is_waited_for() -> None:
    async with worker() as decode, serving(*ONE_SLOT, "--queue-timeout-s", "1", decode=decode) as (_, client):
        first = await occupied(client, decode)
        # Nothing was served yet, so nothing is known of the time that a request takes: it waits, in vain.
        unlucky = await client.send("unlucky")
        assert (unlucky.status_code, unlucky.json()["error"]["code"]) == (503, "overloaded")
        assert await client.metric('baton_router_admission_refusals_total{reason="expired"}') == 1
        go_on(decode)  # the first one has taken longer than that
        assert (await first).status_code == 200
        first = await occupied(client, decode)
        answers = await asyncio.gather(*(client.send(f"r{i}", user=f"u{i}", max_tokens=100) for i in range(10)))
        assert {answer.status_code for answer in answers} == {503}
        assert {answer.json()["error"]["code"] for answer in answers} == {"overloaded"}
        assert all(int(answer.headers["retry-after"]) >= 1 for answer in answers)
        messages = [answer.json()["error"]["message"] for answer in answers]
        assert sum("of work wait ahead" in message for message in messages) >= 8  # the others came first, and waited
        assert await client.metric('baton_router_admission_refusals_total{reason="overloaded"}') >= 8
        go_on(decode)
        assert (await first).status_code == 200


async def test_a_ttft_that_cannot_be_had_is_refused_at_once() -> None:
    async with worker(timed=True) as decode, serving(decode=decode) as (process, client):
        untried = await client.send("untried", ttft_ms=100)
        assert untried.status_code == 200, "nothing was measured yet, so nobody is refused"
        assert (await client.send("second")).status_code == 200
        refused = await client.send("refused", ttft_ms=100)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "slo_unattainable")
        assert refused.json()["error"]["param"] == "ttft_ms"
        assert "even if nothing else ran" in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) == 60
        assert (await client.send("header", {"x-baton-ttft-ms": "100"}, ttft_ms=900_000)).status_code == 503
        assert (await client.send("fine", ttft_ms=900_000)).status_code == 200
        assert (await client.send("itl", itl_ms=1e-6)).json()["error"]["param"] == "itl_ms"
        measured = (await client.send("itl", {"x-baton-itl-ms": "0.000001"})).json()["error"]["message"]
        assert "d0, measures" in measured
        assert (await client.send("itl", itl_ms=900_000)).status_code == 200
        for name, value in (("x-baton-ttft-ms", "soon"), ("x-baton-itl-ms", "-1"), ("x-baton-priority", "1.5")):
            wrong = await client.send("wrong", {name: value})
            assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, name)
        assert (await client.send("wrong", ttft_ms=0)).json()["error"]["param"] == "ttft_ms"
        async with AsyncClient(process.grpc, retries=0) as sdk:
            with pytest.raises(SloError) as caught:
                await sdk.generate([5, 6, 7], max_tokens=2, ttft_ms=100)
            assert caught.value.field == "ttft_ms"
            assert caught.value.retry_after_s == 60
            done = await sdk.generate([5, 6, 7], max_tokens=2, ttft_ms=900_000, user="me")
            assert done.trace is not None
            assert done.trace.router_queue_us == 0


async def test_a_deadline_that_passes_in_the_queue_is_answered_then() -> None:
    async with worker() as decode, serving(*ONE_SLOT, decode=decode) as (_, client):
        for i in range(3):
            await client.send(f"quick{i}")  # so short requests that the wait looks short too
        first = await occupied(client, decode)
        late = await client.send("late", ttft_ms=3000)
        assert (late.status_code, late.json()["error"]["code"]) == (503, "slo_unattainable")
        assert late.headers["retry-after"]
        assert "had any more: it waited" in late.json()["error"]["message"]
        assert await client.metric('baton_router_admission_refusals_total{reason="expired"}') == 1
        await client.queued(0)
        go_on(decode)
        assert (await first).status_code == 200


async def test_a_client_that_leaves_leaves_the_queue() -> None:
    async with worker() as decode, serving(*ONE_SLOT, decode=decode) as (_, client):
        first = await occupied(client, decode)
        gone, stays = client.start("gone"), client.start("stays")
        await client.queued(2)
        gone.cancel()
        await client.queued(1)
        assert await client.metric("baton_router_queue_cancelled_total") == 1
        go_on(decode)
        assert (await stays).status_code == (await first).status_code == 200
        assert order_of(decode) == ["first", "stays"]
        await client.until("baton_router_queue_tokens", 0)


async def test_the_queue_drains_when_an_instance_comes_back() -> None:
    async with worker() as decode, serving(*ONE_SLOT, "--no-instance-wait-s", "240", decode=decode) as (_, client):
        first = await occupied(client, decode)
        waiting = [client.start(f"w{i}") for i in range(5)]
        await client.queued(5)
        await decode.stop()
        await client.until('baton_router_instance_healthy{instance="d0",role="decode"}', 0)
        decode.state.pause_after = None
        await decode.start(decode.port)
        assert {x.status_code for x in await asyncio.gather(first, *waiting)} == {200}


async def test_tenants_are_api_keys_where_there_are_any(tmp_path: Any) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# two\none\ntwo\n")
    names = [f"key-{hashlib.sha256(key).hexdigest()[:8]}" for key in (b"one", b"two")]
    (tmp_path / "token").write_text("the services' token")
    port = free_port()
    keyed = ("--api-keys", str(keys), "--token-file", str(tmp_path / "token"), "--metrics-port", str(port))
    token = read_token(str(tmp_path / "token"))
    async with worker(token=token) as decode, serving(*ONE_SLOT, *keyed, decode=decode) as (_, client):
        client.metrics_url = f"http://127.0.0.1:{port}/metrics"
        one, two = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
        decode.state.pause_after = 1
        first = client.start("first", one)
        await decode.wait_until(lambda: len(decode.state.running) == 1)
        tasks = [client.start(f"a{i}", one, user=f"u{i}", prompt=long(i)) for i in range(9)]
        await client.queued(9)
        tasks.append(client.start("b", two, prompt=long(20)))
        await client.queued(10)
        assert await client.metric(f'baton_router_queue_tenant_requests{{tenant="{names[0]}"}}') == 9
        assert await client.metric(f'baton_router_queue_tenant_requests{{tenant="{names[1]}"}}') == 1
        go_on(decode)
        await asyncio.gather(first, *tasks)
        assert order_of(decode).index("b") < 5, "users of one key share its turns"


async def test_texts_count_against_their_tenants_limits_whether_they_are_placed_or_not(tmp_path: Any) -> None:
    keys = tmp_path / "keys.toml"
    names = ("tokenize", "chat", "detokenize", "long", "route")
    limits = "requests_per_minute = 1000\ntokens_per_minute = 20000"
    keys.write_text("\n".join(f'[tenants.{x}]\nkeys = ["{x}"]\n{limits}' for x in names) + '\n[tenants.o]\nkeys=["o"]')
    (tmp_path / "token").write_text("the services' token")
    port = free_port()
    flags = ("--api-keys", str(keys), "--token-file", str(tmp_path / "token"), "--metrics-port", str(port))
    token = read_token(str(tmp_path / "token"))
    async with worker(token=token) as decode, serving(*flags, decode=decode) as (process, client):
        client.metrics_url = f"http://127.0.0.1:{port}/metrics"

        async def post(tenant: str, path: str, **body: Any) -> httpx.Response:
            return await client.http.post(path, json=body, headers={"authorization": f"Bearer {tenant}"}, timeout=300)

        large = "a quick brown fox " * 10_000
        answers = await asyncio.gather(*(post("tokenize", "/tokenize", prompt=large) for _ in range(24)))
        assert sorted(x.status_code for x in answers) == [200] + 23 * [429]
        refused = next(x for x in answers if x.status_code == 429)
        assert "tokens a minute" in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) > 1
        assert (await post("tokenize", "/v1/completions", prompt="x", max_tokens=1)).status_code == 429
        assert (await post("o", "/tokenize", prompt=large)).status_code == 200, "others are not limited by it"

        messages = [{"role": "user", "content": large}]
        answers = await asyncio.gather(*(post("chat", "/v1/chat/completions", messages=messages) for _ in range(24)))
        assert sorted(x.status_code for x in answers) == [400] + 23 * [429], "a text that is too long counts, too"

        ids = [5] * 30_000
        answers = await asyncio.gather(*(post("detokenize", "/detokenize", tokens=ids) for _ in range(4)))
        assert sorted(x.status_code for x in answers) == [200] + 3 * [429]

        for _ in range(4):
            answer = await post("long", "/v1/completions", prompt="a quick brown fox " * 250, max_tokens=2)
            assert answer.status_code == 200, answer.text
        assert await client.metric('baton_router_admission_refusals_total{reason="tenant_limit"}') == 50
        async with AsyncClient(process.grpc, token="route") as sdk:
            answers = [sdk.route("a quick brown fox " * 250) for _ in range(40)]
            refusals = await asyncio.gather(*answers, return_exceptions=True)
            assert any(isinstance(x, QueueFullError) for x in refusals)


async def test_a_tenant_is_charged_what_it_generated_whatever_was_expected(tmp_path: Any) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[tenants.o]\nkeys = ["o"]\n[tenants.long]\nkeys = ["long"]\ntokens_per_minute = 2000\n')
    (tmp_path / "token").write_text("the services' token")
    flags = ("--api-keys", str(keys), "--token-file", str(tmp_path / "token"))
    async with (
        worker(token=read_token(str(tmp_path / "token"))) as decode,
        serving(*flags, decode=decode) as (_, client),
    ):
        long, other = ({"authorization": f"Bearer {key}"} for key in ("long", "o"))
        for i in range(20):
            assert (await client.send(f"short{i}", other, max_tokens=1)).status_code == 200
        answer = await client.send("long", long, max_tokens=900, n=8, ignore_eos=True)
        assert answer.json()["usage"]["completion_tokens"] == 7200, "expected were few: answers are short on average"
        refused = await client.send("next", long, max_tokens=1)
        assert refused.status_code == 429, refused.text
        assert "2000 tokens a minute" in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) >= 120, "what it used beyond its minute is paid first"
        assert (await client.send("other", other, max_tokens=1)).status_code == 200
