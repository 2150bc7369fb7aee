"""Makes grammars in processes that can be killed.

A third-party compiler makes and checks grammars. Some schemas of 2 KB take it forever, others overflow its stack, which
ends the process. So it runs in separate processes with limits on CPU time, memory and stack. A grammar that exceeds
the limits is refused, and costs the router a new process, which starts beside a warm one. The stack is half as large as
those of the threads in which instances use grammars.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import queue
import resource
import signal
import socket
import sys
import threading
import time
import traceback
import weakref
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any, TypeAlias

import orjson

from baton.child_process import ChildProcess, start_python
from baton.dialects import REASONING_DIALECTS, TOOL_DIALECTS
from baton.dialects.builtin import Dialects
from baton.dialects.call_grammar import AnswerGrammar
from baton.dialects.tool_use import ToolUse
from baton.errors import InvalidRequestError, UnavailableError
from baton.grammar import StructuredOutputs, check_grammar, json_object_grammar
from baton.types import Grammar

log = logging.getLogger(__name__)

Asked: TypeAlias = StructuredOutputs | Grammar | AnswerGrammar
MAX_CPU_S = 0.75
"""Most CPU time per grammar, in seconds. The compiler's own refusals take up to a third of a second."""
MAX_MEMORY = 1 << 30
"""Most address space beyond that of a fresh process, in bytes."""
STACK = 1 << 20
MAX_WAIT_S = 30.0
_KEPT_MEMORY = 256 << 20
"""Growth of a process, in bytes, after which it is replaced."""
_MAX_MESSAGE = 64 << 20
_NICENESS = 5
"""How much less the processes' priority is than the router's: grammars must not delay streams where cores are few."""


START_S = 1.0
"""CPU time of a process' start, in seconds, about."""


class RefusedGrammarError(InvalidRequestError):
    """A grammar is refused.

    Attributes:
        seconds: CPU time that it took, with that of a new process if it ended one.
    """

    def __init__(self, message: str, *, field: str | None, seconds: float) -> None:
        super().__init__(message, field=field)
        self.seconds = seconds


class GrammarProcesses:
    """Makes grammars in processes of its own. Thread-safe.

    One process more than are used at once is kept started, so that a grammar that ends its process costs others no
    start.

    Args:
        count: Most processes in use; each starts when a grammar is needed while the others are busy.
        cpu_s: Most CPU time per grammar, in seconds.
        wait_s: Most time per grammar, in seconds, for processes that get no CPU time.
    """

    def __init__(self, count: int = 2, cpu_s: float = MAX_CPU_S, wait_s: float = MAX_WAIT_S) -> None:
        self._turns = threading.BoundedSemaphore(count)
        self._all = [_Process(cpu_s, wait_s) for _ in range(count + 1)]
        self._free: queue.LifoQueue[_Process] = queue.LifoQueue()
        for process in self._all[1:]:
            self._free.put(process)
        self._spare: _Process | None = self._all[0]
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="grammar-start")
        self._finalizer = weakref.finalize(self, _end_all, self._all, self._starter)

    def make(self, asked: Asked) -> tuple[Grammar, float]:
        """Make and check a grammar; return it and its CPU time in seconds.

        Raises:
            RefusedGrammarError: The constraint is wrong, not supported or too costly; names field and place.
            UnavailableError: The process got no CPU time, or was killed from outside.
        """
        message = orjson.dumps(_to_wire(asked))
        with self._turns:
            process = self._free.get()
            try:
                answer = orjson.loads(process.ask(message, _field(asked)))
                if answer["last"]:
                    process.end()
            finally:
                if process.running:
                    self._free.put(process)
                else:
                    self._start_later(process)
                if self._spare is not None:
                    self._start_later(self._spare)
                    self._spare = None
        if "error" in answer:
            field = answer["field"] or _field(asked)
            raise RefusedGrammarError(answer["error"], field=field, seconds=answer["seconds"])
        return _grammar(answer["grammar"]), answer["seconds"]

    def _start_later(self, process: _Process) -> None:
        with contextlib.suppress(RuntimeError):  # closed
            self._starter.submit(self._start, process)

    def _start(self, process: _Process) -> None:
        try:
            process.start()
        except (OSError, UnavailableError) as error:  # the next grammar's request tries again
            log.warning("a process that checks grammars did not start: %s", error)
        finally:
            self._free.put(process)

    def close(self) -> None:
        self._finalizer()


def _end_all(processes: list[_Process], starter: ThreadPoolExecutor) -> None:
    starter.shutdown(wait=False, cancel_futures=True)
    for process in processes:
        process.close()


class _Process:
    """One process; one thread at a time, apart from :meth:`close`."""

    def __init__(self, cpu_s: float, wait_s: float) -> None:
        self._cpu_s = cpu_s
        self._wait_s = wait_s
        self._child: ChildProcess | None = None
        self._line: Connection | None = None
        self._lock = threading.Lock()
        """Held while a process is started or taken away."""
        self._closed = False

    @property
    def running(self) -> bool:
        """Whether the process can be asked at once."""
        return self._child is not None and self._child.returncode is None

    def ask(self, message: bytes, field: str) -> bytes:
        if not self.running:
            self.start()
        try:
            return self._exchange(message)
        except (EOFError, OSError) as error:
            code = self.end(10.0)  # it is about to end
            seconds = self._cpu_s + START_S
            if code == -signal.SIGPROF:
                message_text = f"{field} costs too much: it takes more than {self._cpu_s:g} s to compile"
                raise RefusedGrammarError(message_text, field=field, seconds=seconds) from error
            if code in (-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS, -signal.SIGKILL):
                message_text = f"{field} costs too much: it is nested too deep, or needs too much memory"
                raise RefusedGrammarError(message_text, field=field, seconds=seconds) from error
            raise UnavailableError("the process that checks grammars was ended", retry_after_s=1.0) from error

    def _exchange(self, message: bytes | None) -> bytes:
        """Send a message, if any, and return the next one that comes."""
        line = self._line
        if line is None:
            raise EOFError
        if message is not None:
            line.send_bytes(message)
        if not line.poll(self._wait_s):
            self.end()
            raise UnavailableError("the check of a grammar got no processor time", retry_after_s=5.0)
        return line.recv_bytes(_MAX_MESSAGE)

    def start(self) -> None:
        """Start the process again, and wait until it can be asked.

        Raises:
            OSError: It cannot be started.
            UnavailableError: It ended at once, or got no CPU time.
        """
        self.end()
        own_end, child_end = socket.socketpair()
        with own_end, child_end, self._lock:
            if self._closed:
                raise UnavailableError("the router is shutting down")
            descriptor = child_end.fileno()
            args = [str(descriptor), str(self._cpu_s)]
            process = start_python(__name__, args, pass_fds=[descriptor])
            os.setpriority(os.PRIO_PROCESS, process.pid, min(19, os.getpriority(os.PRIO_PROCESS, 0) + _NICENESS))
            self._child = ChildProcess(process)
            self._line = Connection(own_end.detach())
        try:
            self._exchange(None)
        except (EOFError, OSError) as error:
            self.end()
            raise UnavailableError("the process that checks grammars did not start", retry_after_s=1.0) from error

    def end(self, patience_s: float = 0.2) -> int | None:
        """End the process; return its exit status, or ``None`` if it had to be killed after ``patience_s``."""
        with self._lock:
            line = self._line
            child = self._child
            self._line = None
            self._child = None
        if line is not None:
            line.close()  # ends an idle process
        if child is None:
            return None
        return child.stop(patience_s, None)

    def close(self) -> None:
        """End the process for good."""
        self._closed = True
        self.end()


def _field(asked: Asked) -> str:
    if isinstance(asked, Grammar):
        return "sampling.grammar"
    return asked.place


# --- on the wire ---


def _to_wire(asked: Asked) -> dict[str, Any]:
    if isinstance(asked, AnswerGrammar):
        dialects = asked.dialects
        use = asked.use
        return {
            "kind": "answer",
            "tools": dialects.tools and dialects.tools.name,
            "reasoning": dialects.reasoning and dialects.reasoning.name,
            "use": [use.tools, use.mode, use.names, use.parallel, use.places],
            "reasons": asked.reasons,
            "content": asked.content and _fields(asked.content),
            "special_tokens": asked.special_tokens,
            "thinking_budget": asked.thinking_budget,
        }
    kind = "grammar" if isinstance(asked, Grammar) else "structured"
    return {"kind": kind, "fields": _fields(asked)}


def _fields(value: StructuredOutputs | Grammar) -> dict[str, Any]:
    return {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}


def _from_wire(value: dict[str, Any]) -> Asked:
    if value["kind"] == "structured":
        return StructuredOutputs(**value["fields"])
    if value["kind"] == "grammar":
        return _grammar(value["fields"])
    tool_list, mode, names, parallel, places = value["use"]
    content = value["content"]
    tools = value["tools"]
    reasoning = value["reasoning"]
    return AnswerGrammar(
        Dialects(tools and TOOL_DIALECTS[tools], reasoning and REASONING_DIALECTS[reasoning]),
        ToolUse(tuple(tool_list), mode, tuple(names), parallel, tuple(places)),
        value["reasons"],
        content and _grammar(content),
        value["special_tokens"],
        value["thinking_budget"],
    )


def _grammar(fields: dict[str, Any]) -> Grammar:
    return Grammar(fields["kind"], fields["text"], tuple(fields["start_token_ids"]))


# --- the process ---


def _answer(message: bytes) -> dict[str, Any]:
    started = time.process_time()
    try:
        asked = _from_wire(orjson.loads(message))
        grammar = check_grammar(asked, "sampling.grammar") if isinstance(asked, Grammar) else asked.to_grammar()
    except InvalidRequestError as error:
        answer: dict[str, Any] = {"error": error.message, "field": error.field}
    except BaseException as error:  # also Rust's panics, whose class cannot be imported
        traceback.print_exc()
        answer = {"error": f"the compiler of grammars cannot read it: {type(error).__name__}", "field": ""}
    else:
        answer = {"grammar": _fields(grammar)}
    # Behind the last answer a new process takes over, as this one's memory has grown.
    return {**answer, "seconds": time.process_time() - started, "last": _memory(1) > _KEPT_MEMORY}


def _serve(line: Connection, cpu_s: float) -> None:
    json_object_grammar()  # what all of them need is loaded before anything is counted
    resource.setrlimit(resource.RLIMIT_AS, (_memory(0) + MAX_MEMORY,) * 2)
    with contextlib.suppress(EOFError, ConnectionError):
        line.send_bytes(b"ready")
        while True:
            message = line.recv_bytes()
            signal.setitimer(signal.ITIMER_PROF, cpu_s)  # which ends the process
            answer = _answer(message)
            signal.setitimer(signal.ITIMER_PROF, 0)
            line.send_bytes(orjson.dumps(answer))
            if answer["last"]:
                return


def _memory(at: int) -> int:
    """Return this process' address space (0) or memory (1) in bytes."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[at]) * resource.getpagesize()


def main() -> None:
    """Serve the router at the other end of the descriptor that is the first argument."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the router's end is this one's
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(STACK)
    thread = threading.Thread(target=_serve, args=(Connection(int(sys.argv[1])), float(sys.argv[2])))
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
