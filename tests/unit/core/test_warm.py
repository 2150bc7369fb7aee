"""Processes that start warm, and how processes end: what a test sees of them is what it would see of any other."""

from __future__ import annotations

import asyncio
import fcntl
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest
from tests.support.servers.warm import WarmProcess, WarmStarter

from baton.cli.supervisor import ManagedProcess, ProcessSpec

RUN = "tests.support.run_code"
SLEEP = "import time; time.sleep(60)"


@pytest.fixture(scope="module")
def small() -> Iterator[WarmStarter]:
    """Has imported next to nothing."""
    starter = WarmStarter("tests")
    yield starter
    starter.close()


def output_of(starter: WarmStarter, code: str, **options: object) -> tuple[str, int]:
    """Run some code by ``python -m``; returns what it wrote, and its exit status."""
    ours, theirs = os.pipe()
    with os.fdopen(ours) as reader:
        options = {"output": theirs, "errors": theirs, **options}
        process = starter.start(RUN, [code], **options)  # type: ignore[arg-type]
        os.close(theirs)
        return reader.read(), process.wait(240)


def test_it_has_a_command_line_an_environment_and_an_output_of_its_own(small: WarmStarter) -> None:
    code = "import os, sys; print(len(sys.argv), os.environ.get('HERE'), os.environ.get('PATH')); sys.exit(3)"
    assert output_of(small, code, env={"HERE": "yes"}) == ("2 yes None\n", 3)
    text, status = output_of(small, "raise KeyError('lost')")
    assert "KeyError: 'lost'" in text
    assert status == 1
    assert output_of(small, "import sys; sys.exit('why')")[1] == 1


def test_it_has_the_descriptors_that_it_was_given_and_no_other(small: WarmStarter) -> None:
    ours, theirs = os.pipe()
    sleeper = small.start(RUN, [SLEEP])  # whose status is nobody else's
    code = f"import os; os.write({theirs}, b'kept'); print(len(os.listdir('/proc/self/fd')))"
    told = output_of(small, code, keep=theirs)
    os.close(theirs)
    assert told == ("5\n", 0), "those of every process, what was kept, and the folder that is read"
    with os.fdopen(ours, "rb") as reader:
        assert reader.read() == b"kept"
    sleeper.kill()
    assert sleeper.wait(240) == -signal.SIGKILL


def test_it_runs_until_it_is_killed(small: WarmStarter) -> None:
    process = small.start(RUN, [SLEEP])
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.05)
    assert process.poll() is None
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(240) == process.poll() == -signal.SIGTERM
    process.kill()  # long dead


async def test_a_supervisor_can_have_it(small: WarmStarter) -> None:
    lines: list[str] = []
    code = "import time; print('here', flush=True); time.sleep(60)"
    process = ManagedProcess(
        ProcessSpec("one", RUN, (code,), "", "decode"),
        lambda _, line: lines.append(line),
        os.environ,
        start=small.spawn,
    )
    async with asyncio.timeout(240):
        while not lines:
            await asyncio.sleep(0.01)
        assert process.returncode is None
        await asyncio.gather(process.wait_closed(), process.end(240.0))
    assert (lines, process.returncode) == (["here"], -signal.SIGTERM)


def test_descriptors_have_any_numbers(small: WarmStarter) -> None:
    """Above 1023, too: a process that runs thousands of tests keeps as many open."""
    beyond = min(1500, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 10)
    process = small.start(RUN, ["raise SystemExit(3)"])
    far = WarmProcess(process.pid, fcntl.fcntl(process.status, fcntl.F_DUPFD, beyond))
    assert far.wait(240) == 3


def test_all_end_with_their_starter() -> None:
    starter = WarmStarter()
    process = starter.start(RUN, [SLEEP])
    starter.close()
    assert process.wait(240) == -signal.SIGKILL


def test_the_process_to_fork_from_is_replaced_when_it_was_killed(caplog: pytest.LogCaptureFixture) -> None:
    starter = WarmStarter()
    process = starter.start(RUN, [SLEEP])
    (server,) = [x for x in psutil.Process().children() if x.pid == psutil.Process(process.pid).ppid()]
    server.kill()
    assert process.wait(240) == -signal.SIGKILL, "nobody is left who could tell its status"
    assert output_of(starter, "print('again')") == ("again\n", 0)
    assert "ended with status -9" in caplog.text
    starter.close()


def test_what_was_registered_for_the_end_runs_and_what_was_printed_is_written() -> None:
    lines = (
        "import atexit",
        "from baton.worker.process import end_process",
        "atexit.register(print, 'end')",
        "print('out')",
        "end_process(3)",
    )
    done = subprocess.run([sys.executable, "-c", "; ".join(lines)], stdout=subprocess.PIPE, text=True)
    assert (done.stdout, done.returncode) == ("out\nend\n", 3)
