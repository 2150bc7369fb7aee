"""The synchronous client's threads and streams, against a scripted router."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from tests.integration.client.test_client import STOP, WAIT_S, Both, both, delta, endless, message, router

from baton import Client
from baton.client import Stream
from baton.client.portal import Portal
from baton.errors import UnavailableError

__all__ = ["both"]  # the fixture


def loops() -> int:
    return sum(thread.name == "baton client" for thread in threading.enumerate())


async def all_ended() -> None:
    """Wait until no client's thread is left."""
    async with asyncio.timeout(WAIT_S):
        while loops():
            await asyncio.sleep(0.01)


async def echo(request: Any) -> AsyncIterator[Any]:
    for at, word in enumerate(request.text.split()):
        yield message(delta(word, at))
    yield message(delta(".", 99, end=STOP))


def in_threads(count: int, work: Callable[[int], None]) -> list[BaseException]:
    """Run ``work`` in threads to the end and return what they raised."""
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert not any(thread.is_alive() for thread in threads)
    return errors


async def test_many_threads_share_a_client() -> None:
    async with router() as (servicer, address):
        servicer.script = echo

        def work(number: int) -> None:
            for turn in range(5):
                words = f"thread {number} turn {turn}"
                assert client.generate(words).text == words.replace(" ", "") + "."
                with client.generate(words, stream=True) as stream:
                    assert "".join(chunk.text for chunk in stream) == words.replace(" ", "") + "."

        with Client(address) as client:
            assert await asyncio.to_thread(in_threads, 12, work) == []
            assert loops() == 1
        await all_ended()


async def test_closing_the_client_ends_streams_that_are_read() -> None:
    async with router() as (servicer, address):
        servicer.script = endless
        client = Client(address)
        reading = threading.Barrier(4)

        def read(_: int) -> None:
            with client.generate("hi", stream=True) as stream:
                next(stream)
                reading.wait(WAIT_S)
                for _ in stream:
                    pass

        reader = asyncio.create_task(asyncio.to_thread(in_threads, 3, read))
        await asyncio.to_thread(reading.wait, WAIT_S)
        await asyncio.to_thread(client.close)
        errors = await asyncio.wait_for(reader, WAIT_S)
        assert [(type(error), str(error)) for error in errors] == [(UnavailableError, "this client is closed")] * 3
        await asyncio.wait_for(servicer.cancelled.wait(), WAIT_S)
        await all_ended()
        with pytest.raises(UnavailableError, match="closed"):
            client.generate("hi")


async def test_closing_the_client_ends_a_stream_that_is_not_read() -> None:
    async with router() as (servicer, address):
        servicer.script = endless
        client = Client(address)
        stream = await asyncio.to_thread(client.generate, "hi", stream=True)
        assert await asyncio.to_thread(next, stream) is not None
        await asyncio.to_thread(client.close)
        await asyncio.wait_for(servicer.cancelled.wait(), WAIT_S)
        with pytest.raises(UnavailableError, match="closed"):
            await asyncio.to_thread(list, stream)
        assert await asyncio.to_thread(list, stream) == []


async def test_an_abandoned_iterator_is_cancelled_and_the_client_goes_on() -> None:
    async with router() as (servicer, address):
        servicer.script = endless

        def leave() -> None:
            for _ in client.generate("hi", stream=True):
                break
            gc.collect()

        with Client(address) as client:
            await asyncio.to_thread(leave)
            await asyncio.wait_for(servicer.cancelled.wait(), WAIT_S)
            servicer.script = echo
            assert (await asyncio.to_thread(client.generate, "a b")).text == "ab."


async def test_a_stream_keeps_its_client() -> None:
    async with router() as (servicer, address):
        servicer.script = echo

        def use() -> str:
            return "".join(chunk.text for chunk in Client(address).generate("a b c", stream=True))

        assert await asyncio.to_thread(use) == "abc."
        gc.collect()
        await all_ended()


async def test_a_cancelled_stream_ends_at_once_whatever_was_read_ahead() -> None:
    sent = asyncio.Event()

    async def ahead(request: Any) -> AsyncIterator[Any]:
        for at in range(100):
            yield message(delta("a", at))
        sent.set()
        await asyncio.Event().wait()

    async with router() as (servicer, address):
        servicer.script = ahead
        with Client(address) as client:
            stream: Stream = await asyncio.to_thread(client.generate, "hi", stream=True)
            await asyncio.to_thread(next, stream)
            await asyncio.wait_for(sent.wait(), WAIT_S)
            stream.cancel()
            assert await asyncio.to_thread(list, stream) == []
            await asyncio.wait_for(servicer.cancelled.wait(), WAIT_S)


async def test_a_wait_between_tries_is_cut_short_by_cancelling() -> None:
    refused = asyncio.Event()

    async def later(request: Any) -> AsyncIterator[Any]:
        refused.set()
        raise UnavailableError("no instance", retry_after_s=3600.0)
        yield

    async with router() as (servicer, address):
        servicer.script = later
        with Client(address, timeout=36000.0) as client:
            stream = await asyncio.to_thread(client.generate, "hi", stream=True)
            reader = asyncio.create_task(asyncio.to_thread(list, stream))
            await asyncio.wait_for(refused.wait(), WAIT_S)
            done, _ = await asyncio.wait([reader], timeout=0.1)
            assert not done
            stream.cancel()
            assert await asyncio.wait_for(reader, WAIT_S) == []


async def test_after_a_cancel_not_even_the_rest_of_a_message_comes(both: Both) -> None:
    async def one_message(request: Any) -> AsyncIterator[Any]:
        yield message(delta("a", 1), delta("b", 2), delta("c", 3))
        await asyncio.Event().wait()

    async with router() as (servicer, address), both.connect(address) as client:
        servicer.script = one_message
        stream = await client.call("generate", "hi", stream=True)
        first = await client.next(stream)
        assert first is not None
        assert first.text == "a"
        stream.cancel()
        assert await client.rest(stream) == []


async def test_every_thread_that_reads_a_stream_hears_of_its_end() -> None:
    go_on = asyncio.Event()

    async def held(request: Any) -> AsyncIterator[Any]:
        await go_on.wait()
        async for item in echo(request):
            yield item

    async with router() as (servicer, address):
        servicer.script = held
        with Client(address) as client:
            stream = await asyncio.to_thread(client.generate, "a b c", stream=True)
            texts: list[str] = []

            def read(_: int) -> None:
                texts.extend(chunk.text for chunk in stream)

            reader = asyncio.create_task(asyncio.to_thread(in_threads, 3, read))
            done, _ = await asyncio.wait([reader], timeout=0.3)
            assert not done
            go_on.set()
            assert await reader == []
            assert sorted(texts) == [".", "a", "b", "c"]


async def test_an_interrupt_before_the_caller_has_the_stream_ends_the_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    call = Portal.call

    begun = threading.Event()

    async def noted(request: Any) -> AsyncIterator[Any]:
        begun.set()
        async for item in endless(request):
            yield item

    def interrupted(*args: Any) -> Any:
        call(*args)
        assert begun.wait(WAIT_S)
        raise KeyboardInterrupt

    async with router() as (servicer, address):
        servicer.script = noted
        with Client(address) as client:
            monkeypatch.setattr(Portal, "call", interrupted)
            with pytest.raises(KeyboardInterrupt):
                await asyncio.to_thread(client.generate, "hi", stream=True)
            await asyncio.wait_for(servicer.cancelled.wait(), WAIT_S)


async def test_a_deadline_in_thousands_of_years_is_none(both: Both) -> None:
    async with router() as (_, address), both.connect(address, timeout=1e12) as client:
        assert (await client.call("models"))[0].name == "tiny"
        assert (await client.call("generate", "hi", n=2)).text == "hello"


FORK = """
import os, sys
from pathlib import Path

def look():
    global names
    names = [(task / "comm").read_text() for task in Path("/proc/self/task").iterdir()]

os.register_at_fork(before=look)  # what is registered first is called last
from baton import Client
from baton.errors import UnavailableError

address, how = sys.argv[1:]
client = Client(address, retries=0, timeout=240)
assert client.models()
if how == "closed":
    client.close()
child = os.fork()
if child == 0:
    with Client(address, retries=0, timeout=240) as other:
        try:
            os._exit(10 if other.models() else 2)
        except UnavailableError as error:
            os._exit(11 if "fork" in str(error) else 3)
        except BaseException:
            os._exit(4)
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
if how == "open":
    assert client.models()
elif any(name.startswith("event_engine") for name in names):
    code = 5  # a child that was forked while gRPC ended may wait for it for ever
os._exit(code)
"""


@pytest.mark.parametrize(("how", "code"), [("open", 11), ("closed", 10)])
async def test_a_fork_beside_an_open_client_is_refused_at_once_and_harms_nobody(how: str, code: int) -> None:
    """gRPC's event loop of the child would take what belongs to the parent's."""
    async with router() as (_, address):
        done = await asyncio.create_subprocess_exec(sys.executable, "-W", "ignore", "-c", FORK, address, how)
        assert await asyncio.wait_for(done.wait(), WAIT_S) == code
