"""Long-lived threads and tasks: none ends unseen, and none is started in another way."""

from __future__ import annotations

import ast
import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton import background
from baton.background import FAILURES, BackgroundThread, create_task, is_cancelled, keep_running, report_uncaught
from baton.worker.process import ServiceMetrics

ROOT = Path(__file__).resolve().parents[3]
WAIT_S = 60.0
STARTS = {"Thread", "Timer", "create_task", "ensure_future", "run_coroutine_threadsafe"}

AWAITED = "its starter awaits the result, or looks at it when the task ends"
ANSWERS = "catches what its request raises, and answers the request with it"
LISTED = {
    # What starts other than through baton.background, by file and function, with the reason why nothing is lost.
    "services/kvstore/baton_kvstore/tiers/promotion.py: start_promotion": AWAITED,
    "services/router/baton_router/dispatch/prefill_first.py: _ask": AWAITED,
    "services/router/baton_router/dispatch/request.py: _await_then": ANSWERS,
    "services/router/baton_router/frontend/batches/runner.py: _answer_lines": "a task group awaits its tasks",
    "services/router/baton_router/frontend/batches/runner.py: run": AWAITED,
    "services/router/baton_router/processor/grammar_process.py: main": "its process ends with it",
    "services/router/baton_router/registry/instance_monitor.py: _session": AWAITED,
    "services/router/baton_router/replication/replica.py: _stay_connected": "a task group awaits its tasks",
    "src/baton/background.py: create_task": "the common way",
    "src/baton/background.py: keep_running": "the common way",
    "src/baton/cli/autoscale.py: _run": AWAITED,
    "src/baton/cli/supervisor.py: start": AWAITED,
    "src/baton/cli/up.py: _up": AWAITED,
    "src/baton/client/async_client.py: map_bounded": AWAITED,
    "src/baton/client/direct.py: note": "a notice that may be lost: the router's lease ends the reservation",
    "src/baton/client/portal.py: _start_reading": "gives what it raises to the stream's reader",
    "src/baton/client/portal.py: _submit": AWAITED,
    "src/baton/kv_transfer/connector/background.py: begin": AWAITED,
    "src/baton/kv_transfer/connector/p2p/consumer.py: _begin_fetch": AWAITED,
    "src/baton/kv_transfer/connector/store/client.py: begin": AWAITED,
    "src/baton/kv_transfer/connector/store/cluster.py: _round": AWAITED,
    "src/baton/kv_transfer/connector/store/connector.py: _create_task": AWAITED,
    "src/baton/kv_transfer/connector/store/connector.py: _save_early": AWAITED,
    "src/baton/kv_transfer/connector/store/files.py: load": AWAITED,
    "src/baton/otlp.py: close": "one call, at the process's end",
    "src/baton/rpc/audit.py: _start_timer": "one call, and the next event starts another",
    "src/baton/rpc/multiplex_server.py: _start": ANSWERS,
    "src/baton/rpc/multiplex_server.py: generate_many": AWAITED,
    "src/baton/testing.py: __init__": "a test's fake router, whose error it gets",
    "src/baton/tokenizer/tokenizer.py: get": AWAITED,
    "src/baton/worker/decode.py: _events": AWAITED,
    "src/baton/worker/instance.py: serve": "one call, which ends the process",
    "src/baton/worker/prefill.py: __init__": AWAITED,
    "src/baton/worker/prefill.py: offers": AWAITED,
}


class Starts(ast.NodeVisitor):
    """Collects the functions of a file that start a thread or task."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self._function = "module"

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        outer, self._function = self._function, node.name
        self.generic_visit(node)
        self._function = outer

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Call(self, node: ast.Call) -> None:
        function = node.func
        if isinstance(function, ast.Attribute) and function.attr in STARTS:
            self.found.append(self._function)
        self.generic_visit(node)


def starts() -> Iterator[str]:
    for folder in ("src/baton", "services"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if "api/v1" in str(path):
                continue
            visitor = Starts()
            visitor.visit(ast.parse(path.read_text()))
            yield from (f"{path.relative_to(ROOT)}: {function}" for function in visitor.found)


def test_every_thread_and_task_is_started_so_that_its_end_is_seen() -> None:
    found = set(starts())
    assert found - LISTED.keys() == set(), "start these with baton.background, or say here why their end is seen"
    assert LISTED.keys() - found == set(), "these are not there any more"


def failures(name: str, outcome: background.Outcome) -> int:
    return FAILURES.snapshot().get((name, outcome), 0)


def test_a_thread_that_fails_is_counted_its_owner_told_and_it_runs_again() -> None:
    told: list[BaseException] = []
    runs: list[int] = []
    error = MemoryError("no memory")

    def work() -> None:
        runs.append(1)
        if len(runs) < 3:
            raise error

    thread = BackgroundThread("test restart", work, on_failure=told.append)
    thread.start()
    thread.join(WAIT_S)
    assert len(runs) == 3
    assert told == [error, error]
    assert failures("test restart", "restarted") == 2
    assert failures("test restart", "ended") == 0


def test_a_thread_of_an_owner_that_closes_is_not_restarted() -> None:
    def fail() -> None:
        raise RuntimeError("a bug")

    thread = BackgroundThread("test closing", fail, is_closing=lambda: True)
    thread.start()
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert failures("test closing", "ended") == 1


def test_an_owner_that_raises_when_it_is_told_does_not_end_the_thread() -> None:
    again = threading.Event()
    runs: list[int] = []

    def work() -> None:
        runs.append(1)
        if len(runs) == 1:
            raise RuntimeError("a bug")
        again.set()

    def tell(error: BaseException) -> None:
        raise ValueError("another bug")

    BackgroundThread("test owner", work, on_failure=tell).start()
    assert again.wait(WAIT_S)


def test_pauses_double_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("baton.background.time.sleep", slept.append)

    def work() -> None:
        if len(slept) < 8:
            raise RuntimeError("a bug")

    BackgroundThread("test pauses", work).run()
    assert slept == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]


async def test_a_task_runs_again_also_after_a_cancellation_that_nobody_asked_for() -> None:
    """gRPC raises it in calls whose channel is closed; the task has not been cancelled."""
    runs: list[int] = []
    running = asyncio.Event()

    async def work() -> None:
        runs.append(1)
        if len(runs) == 1:
            raise asyncio.CancelledError("Channel is closed.")
        if len(runs) == 2:
            raise RuntimeError("a bug")
        running.set()
        await asyncio.Event().wait()

    task = keep_running(work, "test task", detail="127.0.0.1:1")
    async with asyncio.timeout(WAIT_S):
        await running.wait()
    assert failures("test task", "restarted") == 2
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


async def test_a_task_that_ends_by_an_error_is_counted_and_its_owner_told() -> None:
    told: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
    error = RuntimeError("a bug")

    async def fail() -> None:
        raise error

    task = create_task(fail(), "test end", on_failure=told.set_result)
    async with asyncio.timeout(WAIT_S):
        assert await told is error
    assert task.done()
    assert failures("test end", "ended") == 1


async def test_a_cancellation_counts_as_a_failure_if_it_is_a_library_s_own() -> None:
    errors: list[BaseException] = []

    async def wait_for(future: asyncio.Future[None]) -> None:
        await future

    waited = asyncio.get_running_loop().create_future()
    surprised = create_task(wait_for(waited), "test surprise", on_failure=errors.append)
    other = create_task(asyncio.sleep(3600), "test cancel", on_failure=errors.append)
    await asyncio.sleep(0)
    waited.cancel()
    other.cancel()
    await asyncio.wait([surprised, other])
    await asyncio.sleep(0)
    assert [type(error) for error in errors] == [asyncio.CancelledError]
    assert failures("test surprise", "ended") == 1
    assert failures("test cancel", "ended") == 0


async def test_only_a_task_that_was_cancelled_counts_as_cancelled() -> None:
    seen: list[bool] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            seen.append(is_cancelled())

    assert not is_cancelled()
    task = asyncio.get_running_loop().create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert seen == [True]


def test_what_ends_another_thread_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("threading.excepthook", threading.excepthook)
    report_uncaught()
    before = failures("other thread", "ended")

    def fail() -> None:
        raise RuntimeError("a bug")

    thread = threading.Thread(target=fail)
    thread.start()
    thread.join(WAIT_S)
    assert failures("other thread", "ended") == before + 1


def test_services_show_the_counts() -> None:
    FAILURES.record("test metric", "ended", RuntimeError("a bug"))
    labels = {"name": "test metric", "outcome": "ended"}
    assert ServiceMetrics("test").get_sample_value("baton_background_failures_total", labels) == 1
