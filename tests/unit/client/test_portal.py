"""The background event loop of the synchronous client."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading

import pytest

from baton import Client
from baton.client.portal import Portal
from baton.errors import DeadlineError, InvalidRequestError, UnavailableError

WAIT_S = 240.0


_others: set[threading.Thread] = set()


@pytest.fixture(autouse=True)
def _only_own_threads() -> None:
    """A client that a test before has not closed is not this one's."""
    _others.clear()
    _others.update(threading.enumerate())


def loops() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "baton client" and thread not in _others]


async def value(result: int) -> int:
    await asyncio.sleep(0)
    return result


def test_calls_from_many_threads_at_once() -> None:
    portal = Portal()
    results: list[int] = []

    def work(first: int) -> None:
        for at in range(first, first + 50):
            results.append(portal.call(value(at), WAIT_S))

    threads = [threading.Thread(target=work, args=(50 * number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert len(loops()) == 1
    portal.close()
    assert sorted(results) == list(range(400))
    assert not loops()


def test_the_thread_starts_with_the_first_call_and_ends_with_its_client() -> None:
    client = Client("127.0.0.1:1", retries=0)
    with pytest.raises(InvalidRequestError):
        Client("nowhere")
    assert not loops()
    with pytest.raises(UnavailableError):
        client.models()
    assert len(loops()) == 1
    del client
    gc.collect()
    assert not loops()


def test_closing_ends_calls_that_wait_and_refuses_others() -> None:
    portal = Portal()
    begun = threading.Event()
    errors: list[BaseException] = []

    async def forever() -> None:
        begun.set()
        await asyncio.Event().wait()

    def work() -> None:
        try:
            portal.call(forever(), WAIT_S)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert begun.wait(WAIT_S)
    portal.close()
    for thread in threads:
        thread.join(WAIT_S)
    assert [(type(error), str(error)) for error in errors] == [(UnavailableError, "this client is closed")] * 3
    with pytest.raises(UnavailableError, match="closed"):
        portal.call(forever(), WAIT_S)
    portal.close()
    assert not loops()


def test_closing_and_calling_at_the_same_time_never_hangs() -> None:
    for _ in range(50):
        portal = Portal()
        portal.call(value(1), WAIT_S)
        closing = threading.Thread(target=portal.close)
        closing.start()
        try:
            while True:
                portal.call(value(1), WAIT_S)
        except UnavailableError:
            closing.join(WAIT_S)
            assert not closing.is_alive()


def test_a_loop_that_does_not_answer_is_given_up_and_its_work_cancelled() -> None:
    portal = Portal()
    cancelled = threading.Event()

    async def slow() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    with pytest.raises(DeadlineError):
        portal.call(slow(), 0.05)
    assert cancelled.wait(WAIT_S)
    portal.close()


def test_an_interrupt_cancels_what_was_waited_for() -> None:
    portal = Portal()
    cancelled = threading.Event()

    async def slow() -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    with pytest.raises(KeyboardInterrupt):
        portal.call(slow(), WAIT_S)
    assert cancelled.wait(WAIT_S)
    assert portal.call(value(3), WAIT_S) == 3
    portal.close()


def test_a_call_from_the_loop_itself_is_refused() -> None:
    portal = Portal()

    async def inside() -> None:
        portal.call(value(1), WAIT_S)

    with pytest.raises(RuntimeError, match="own event loop"):
        portal.call(inside(), WAIT_S)
    portal.close()


FORK = """
import asyncio, os, sys
from baton.client.portal import Portal
from baton.errors import UnavailableError

async def one():
    return 1

unused, used = Portal(), Portal()
used.call(one(), 20)
child = os.fork()
if child == 0:
    try:
        used.call(one(), 20)
    except UnavailableError as error:
        used.post(print)
        used.close()
        works = unused.call(one(), 20) == 1
        unused.close()
        os._exit(0 if "fork" in str(error) and works else 3)
    os._exit(4)
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
assert used.call(one(), 20) == 1
used.close()
sys.exit(code)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_portal_belongs_to_one_process() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", FORK], timeout=240, check=False)
    assert done.returncode == 0


def test_an_open_client_does_not_keep_the_interpreter_from_exiting() -> None:
    code = (
        "import baton\n"
        "client = baton.Client('127.0.0.1:1', retries=0)\n"
        "try:\n    client.models()\nexcept baton.errors.UnavailableError:\n    print('refused')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=240, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "refused\n", "")


def test_an_interrupt_while_the_thread_starts_leaves_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        monkeypatch.undo()
        raise KeyboardInterrupt

    portal = Portal()
    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        portal.call(value(1), WAIT_S)
    assert portal.call(value(2), WAIT_S) == 2
    assert len(loops()) == 1
    portal.close()
    assert not loops()


def test_a_system_that_gives_no_thread_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    portal = Portal()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        with pytest.raises(RuntimeError):
            portal.call(value(1), WAIT_S)
    assert portal.call(value(2), WAIT_S) == 2
    portal.close()


def test_what_the_work_raises_is_not_taken_for_a_silent_loop() -> None:
    async def times_out() -> None:
        raise TimeoutError("a file system did not answer")

    portal = Portal()
    with pytest.raises(TimeoutError, match="file system"):
        portal.call(times_out(), WAIT_S)
    portal.close()


FORK_AMID_A_START = """
import asyncio, os, sys, threading
from baton.client.portal import Portal
from baton.errors import UnavailableError

async def one():
    return 1

portal, starting, go_on = Portal(), threading.Event(), threading.Event()
new_loop = asyncio.new_event_loop

def slow():
    starting.set()
    go_on.wait(240)
    return new_loop()

asyncio.new_event_loop = slow
caller = threading.Thread(target=lambda: portal.call(one(), 20))
caller.start()
starting.wait(240)
child = os.fork()
if child == 0:
    try:
        portal.call(one(), 20)
    except UnavailableError as error:
        portal.close()
        os._exit(0 if "fork" in str(error) else 3)
    os._exit(4)
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
go_on.set()
caller.join()
portal.close()
sys.exit(code)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_while_another_thread_starts_the_portal() -> None:
    command = [sys.executable, "-W", "ignore", "-c", FORK_AMID_A_START]
    assert subprocess.run(command, timeout=240, check=False).returncode == 0
