"""Grammars that cost for ever, end processes or fill memory: what a client may ask for, and what that costs others."""

from __future__ import annotations

import socket
import subprocess
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from baton.dialects import TOOL_DIALECTS
from baton.dialects.builtin import Dialects
from baton.dialects.call_grammar import AnswerGrammar
from baton.dialects.tool_use import read_tools
from baton.errors import InvalidRequestError
from baton.grammar import StructuredOutputs, lark_grammar, regex_grammar
from baton.grammar.validation import check_grammar, count_parts
from baton.types import Grammar
from baton_router.processor import grammar_process, grammars
from baton_router.processor.grammar_process import START_S, GrammarProcesses, RefusedGrammarError
from baton_router.processor.grammars import GrammarCache, GrammarMetrics


def chain(length: int, link: Any) -> dict[str, Any]:
    """Return a schema whose definitions lead from one to the next."""
    names = {f"d{at}": link({"$ref": f"#/$defs/d{at + 1}"}) for at in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": {**names, f"d{length}": {"type": "string", "pattern": "a+"}}}


@pytest.fixture(scope="module")
def processes() -> Iterator[GrammarProcesses]:
    """One process, as they are in a router."""
    made = GrammarProcesses(1, cpu_s=0.25, wait_s=600.0)
    yield made
    made.close()


BOMBS = {
    "twice the same, 40 deep": StructuredOutputs(json=chain(40, lambda ref: {"allOf": [ref, ref]})),
    "multiples": StructuredOutputs(json={"type": "integer", "multipleOf": 1000003}),
    "a stack of references": StructuredOutputs(json=chain(5000, lambda ref: ref)),
    "a stack of objects": StructuredOutputs(
        json=chain(1000, lambda ref: {"type": "object", "properties": {"a": ref}, "required": ["a"]})
    ),
    "a stack of rules": StructuredOutputs(
        grammar="start: t0\n" + "\n".join(f't{at}: t{at + 1} "a"' for at in range(9000)) + '\nt9000: "b"'
    ),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_grammar_that_would_take_for_ever_or_end_the_process_is_refused(
    processes: GrammarProcesses, name: str
) -> None:
    with pytest.raises(RefusedGrammarError, match="costs too much") as caught:
        processes.make(BOMBS[name])
    assert caught.value.field == BOMBS[name].place
    assert caught.value.seconds == 0.25 + START_S
    grammar, _ = processes.make(StructuredOutputs(json={"type": "integer"}))  # and the next one is made
    assert grammar.kind == "json_schema"


def test_the_process_gives_way_to_the_router(processes: GrammarProcesses) -> None:
    processes.make(StructuredOutputs(json={"type": "integer"}))
    this = psutil.Process()
    theirs = [each.nice() for each in this.children() if "grammar_process" in " ".join(each.cmdline())]
    assert theirs
    assert min(theirs) > this.nice()


def test_a_grammar_that_ends_its_process_costs_others_no_start(monkeypatch: pytest.MonkeyPatch) -> None:
    processes = GrammarProcesses(1, cpu_s=0.25, wait_s=600.0)
    small = StructuredOutputs(json={"type": "integer"})
    processes.make(small)
    processes._starter.submit(lambda: None).result()  # the spare one has been started
    starts = list[threading.Thread]()
    start = grammar_process._Process.start
    monkeypatch.setattr(
        grammar_process._Process, "start", lambda self: (starts.append(threading.current_thread()), start(self))[1]
    )
    for at in range(2):
        with pytest.raises(RefusedGrammarError, match="costs too much"):
            processes.make(BOMBS["multiples"])
        assert processes.make(small)[0].kind == "json_schema"
        processes._starter.submit(lambda: None).result()
        assert len(starts) == at + 1
    assert threading.current_thread() not in starts
    processes.close()


def test_a_refusal_is_remembered_for_its_tenant_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now, registry = [0.0], CollectorRegistry()
    cache = GrammarCache(GrammarMetrics(registry), now=lambda: now[0])
    wrong = [StructuredOutputs(regex="a(" + "b" * at, field=f"guided_{at}") for at in range(3)]
    monkeypatch.setattr(grammars, "MAX_REFUSED", 2)
    messages = []
    for asked in wrong:
        with pytest.raises(InvalidRequestError) as caught:
            cache.make(asked, "acme")
        messages.append(caught.value.message)
    cache.close()  # and none can be compiled any more
    assert cache.find(wrong[0], "acme") is None, "two are remembered"
    with pytest.raises(InvalidRequestError) as caught:
        cache.find(wrong[2], "acme")
    assert (caught.value.message, caught.value.field) == (messages[2], "guided_2")
    assert cache.find(wrong[2], "zeta") is None
    assert registry.get_sample_value("baton_router_grammars_refused_total", {"reason": "regex"}) == 4
    now[0] += grammars.REFUSED_S + 1
    assert cache.find(wrong[2], "acme") is None


def test_a_process_that_cannot_be_started_leaves_no_socket_open(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[socket.socket] = []

    def noted() -> tuple[socket.socket, socket.socket]:
        made.extend(pair := socket.socketpair())
        return pair

    def refused(*_: object, **__: object) -> None:
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(grammar_process, "socket", SimpleNamespace(socketpair=noted))
    monkeypatch.setattr(subprocess, "Popen", refused)
    processes = GrammarProcesses(1, cpu_s=0.25, wait_s=600.0)
    with pytest.raises(BlockingIOError):
        processes.make(StructuredOutputs(json={"type": "integer"}))
    processes.close()
    processes._starter.shutdown()
    assert made
    assert {end.fileno() for end in made} == {-1}


def test_what_is_asked_for_comes_over_whole(processes: GrammarProcesses) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}}
    content = regex_grammar("a+")
    answer = AnswerGrammar(
        Dialects(TOOL_DIALECTS["hermes"], None), read_tools([tool], "auto", None), False, content, {"<x>": 7}
    )
    asked = StructuredOutputs(json={"type": "object"}, whitespace_pattern=r"\n?", field="guided_json")
    started = Grammar("regex", content.text, (1, 2))
    for item, here in ((answer, answer.to_grammar()), (asked, asked.to_grammar())):
        assert processes.make(item)[0] == here
    assert processes.make(started)[0] == check_grammar(started, "grammar") == started


def test_an_error_names_field_and_place_as_here(processes: GrammarProcesses) -> None:
    asked = StructuredOutputs(json={"type": "object", "uniqueItems": True}, field="guided_json")
    with pytest.raises(InvalidRequestError) as here:
        asked.to_grammar()
    with pytest.raises(InvalidRequestError) as there:
        processes.make(asked)
    assert (there.value.message, there.value.field) == (here.value.message, here.value.field)


@pytest.mark.parametrize("text", ["[^" * 50_000, "[^" * 50_000 + "\\", "[" * 100_000, "{1" * 50_000, "\\/" * 50_000])
def test_looking_at_an_expression_takes_time_in_proportion_to_its_length(text: str) -> None:
    """Each of these took minutes while the interpreter's lock was held."""
    count_parts(text)
    with pytest.raises(InvalidRequestError):
        lark_grammar("start: /" + text)


def test_what_a_tenant_asked_for_is_unknown_to_others() -> None:
    cache = GrammarCache(GrammarMetrics(CollectorRegistry()))
    asked = StructuredOutputs(json={"type": "integer"})
    made, _ = cache.make(asked, "acme")
    assert cache.find(asked, "acme") is made
    assert cache.find(asked, "zeta") is None
    cache.close()


def test_a_schema_that_is_far_too_long_is_refused_before_a_process_looks_at_it() -> None:
    registry = CollectorRegistry()
    cache = GrammarCache(GrammarMetrics(registry))
    long = StructuredOutputs(json={"enum": [f"name {at}" for at in range(100_000)]}, field="guided_json")
    with pytest.raises(InvalidRequestError, match="at most 262144 bytes") as caught:
        cache.find(long, "")
    assert caught.value.field == "guided_json"
    with pytest.raises(InvalidRequestError, match="at most 262144 bytes"):  # as they would
        long.to_grammar()
    cache.close()
    assert b'baton_router_grammars_refused_total{reason="json"} 1.0' in generate_latest(registry)


def test_kinds_that_clients_made_up_are_no_series() -> None:
    registry = CollectorRegistry()
    cache = GrammarCache(GrammarMetrics(registry))
    for at in range(3):
        cache.make(Grammar("x" * (at + 1), 'start: "a"'), "")
    cache.close()
    assert b'baton_router_grammars_total{kind="other"} 3.0' in generate_latest(registry)
    with pytest.raises(InvalidRequestError, match=r"grammar\.kind"):
        Grammar("a\nforged line", 'start: "a"').validate()
