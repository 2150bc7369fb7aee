"""How an engine's thread ends, and what its requests are told."""

from __future__ import annotations

import asyncio
import threading

import pytest
from tests.support.models.toy_runner import ToyRunner

from baton.config import EngineConfig
from baton.engine.core import EngineCore
from baton.engine.executor.base import ExecutorLostError
from baton.engine.request import EngineRequest, SequenceOutput
from baton.errors import BatonError, InternalError, UnavailableError
from baton.types import SamplingParams
from baton.worker.engine_thread import EngineThread, RequestStream


async def read_on(stream: RequestStream) -> None:
    while True:
        await stream.next()


@pytest.mark.parametrize(
    ("error", "told"),
    [(ExecutorLostError("rank 1 was killed"), UnavailableError), (InternalError("a bug"), InternalError)],
)
async def test_requests_of_an_engine_that_lost_a_process_may_go_on_elsewhere(
    error: BatonError, told: type[BatonError]
) -> None:
    """A router goes on at once where an instance went away; a bug may come with the request, so that costs budget."""
    runner, failed = ToyRunner(max_model_len=40_000), asyncio.Event()
    core = EngineCore(EngineConfig(model="toy", block_size=4), runner, runner.make_arena(10_000))
    engine = EngineThread(core, asyncio.get_running_loop(), failed.set)
    engine.start()
    try:
        # So long that it does not end before it fails, however late this thread gets a processor.
        request = EngineRequest("r", [3, 4, 5], SamplingParams(max_tokens=39_000, ignore_eos=True, seed=1))
        stream = await engine.submit(request)
        engine.fail(error)
        with pytest.raises(told, match=error.message) as end:
            await asyncio.wait_for(read_on(stream), 240)
        assert type(end.value) is told
        assert failed.is_set()
    finally:
        await engine.stop()


@pytest.mark.parametrize("how", ["fails", "stops"])
async def test_calls_that_come_amid_the_engines_end_are_answered(how: str) -> None:
    runner, failed = ToyRunner(), asyncio.Event()
    core = EngineCore(EngineConfig(model="toy", block_size=4), runner, runner.make_arena(32))
    engine = EngineThread(core, asyncio.get_running_loop(), failed.set)
    engine.start()
    begun, go_on = threading.Event(), threading.Event()

    def last() -> None:
        begun.set()
        go_on.wait(240)

    running = asyncio.create_task(engine.call(last))
    await asyncio.to_thread(begun.wait, 240)
    if how == "fails":
        engine.fail(InternalError("a bug"))
        late = asyncio.create_task(engine.call(lambda: 1))
    else:
        late = asyncio.create_task(engine.call(lambda: 1))
        await asyncio.sleep(0)
    ended = asyncio.create_task(engine.stop()) if how == "stops" else asyncio.create_task(failed.wait())
    await asyncio.sleep(0)
    go_on.set()
    await asyncio.wait_for(ended, 240)
    await asyncio.wait_for(running, 240)
    if how == "fails":
        with pytest.raises(UnavailableError):
            await asyncio.wait_for(late, 240)
    else:
        assert isinstance((await asyncio.gather(late, return_exceptions=True))[0], int | UnavailableError)
    await engine.stop()
    with pytest.raises(UnavailableError):
        await engine.call(lambda: 1)


async def test_a_step_that_does_not_end_ends_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    """As when a device hangs: health checks are answered, so that only the engine itself can see it."""
    runner, failed, go_on = ToyRunner(), asyncio.Event(), threading.Event()
    core = EngineCore(EngineConfig(model="toy", block_size=4), runner, runner.make_arena(32))
    engine = EngineThread(core, asyncio.get_running_loop(), failed.set, step_timeout_s=0.2)

    def step() -> list[SequenceOutput]:
        go_on.wait(240)
        return []

    core.step = step  # type: ignore[method-assign]
    engine.start()
    try:
        stream = await engine.submit(EngineRequest("r", [3, 4, 5], SamplingParams(max_tokens=4)))
        with pytest.raises(UnavailableError, match="a step has not ended"):
            await asyncio.wait_for(read_on(stream), 240)
        assert failed.is_set()
        assert engine.hangs
        assert "go_on.wait" in caplog.text, "where it hangs is logged"
        with pytest.raises(UnavailableError):
            await engine.call(lambda: 1)
        await engine.stop()  # does not wait for the thread
    finally:
        go_on.set()
    await asyncio.to_thread(engine._thread.join, 240)
    assert not engine._thread.is_alive()
