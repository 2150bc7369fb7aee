"""What ``baton up`` shows: a bar per process while it starts, tables, or an object per line."""

from __future__ import annotations

import argparse
import json
from io import StringIO
from typing import Any

from rich.console import Console

from baton.cli.plan import Ratio, make_plan, plan_from, worker_config
from baton.cli.supervisor import DeploymentPlan
from baton.cli.up import JsonOutput, Output, TextOutput, add_parser


class Process:
    """What is shown of one."""

    def __init__(self, spec: Any, pid: int) -> None:
        self.spec, self.pid = spec, pid


def play(output: Output) -> DeploymentPlan:
    plan = make_plan(ratio=Ratio(1, 1))
    with output.starting(plan):
        output.state("router", "starts")
        output.line("router", "serving [all] of it")
        output.state("router", "ready")
        output.state("prefill-0", "starts")
    processes: Any = {spec.name: Process(spec, 70 + at) for at, spec in enumerate([plan.router, *plan.workers])}
    output.up(plan, processes, {"metrics": "127.0.0.1:1/metrics"})
    output.show_event("draining", "draining ...")
    return plan


def test_on_a_terminal_there_is_a_bar_per_process() -> None:
    console = Console(file=StringIO(), force_terminal=True, width=120, soft_wrap=True, highlight=False)
    plan = play(TextOutput(console))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    for text in (
        "waits",
        "loads the model",
        "ready",
        "serving [all] of it",
        "Baton is up",
        "autoscale",
        "draining ...",
    ):
        assert text in shown, text
    assert plan.http_address in shown


def test_in_a_file_there_are_no_bars() -> None:
    console = Console(file=StringIO(), width=120)
    play(TextOutput(console))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "loads the model" not in shown
    assert "serving [all] of it" in shown


def test_log_lines_in_json_are_joined_with_the_output(capsys) -> None:  # type: ignore[no-untyped-def]
    output = JsonOutput()
    for line in ('{"level": "info", "message": "serving", "event": "theirs"}', "{not json", "[1]"):
        output.line("router", line)
    first, second, third = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert first == {"level": "info", "message": "serving", "process": "router", "event": "theirs"}
    assert second == {"line": "{not json", "process": "router", "event": "log"}
    assert third["line"] == "[1]"


def test_logs_in_json_are_of_all_services_and_make_the_output_json(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    args = parser.parse_args(["up", "--kvstore", "--log-format", "json", "--log-level", "error"])
    plan = plan_from(args)
    for group in plan.groups:
        for spec in group:
            assert " ".join(spec.args).count("--log-format json --log-level error") == 1
    assert worker_config(args).log_format == "json"
    monkeypatch.setenv("BATON_LOG_FORMAT", "json")
    assert worker_config(parser.parse_args(["up"])).log_format == "json"


def test_json_is_an_object_per_line(capsys) -> None:  # type: ignore[no-untyped-def]
    plan = play(JsonOutput())
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [each["event"] for each in events] == [
        "starting", "process", "log", "process", "process", "up", "draining",
    ]  # fmt: skip
    assert events[0]["processes"] == ["router", "prefill-0", "decode-0"]
    assert events[2] == {"event": "log", "process": "router", "line": "serving [all] of it"}
    up = events[5]
    assert up["openai"] == f"http://{plan.http_address}/v1"
    assert up["processes"]["prefill-0"]["grpc"] == plan.workers[0].health_address
    assert up["processes"]["autoscale"]["metrics"] == "127.0.0.1:1/metrics"
