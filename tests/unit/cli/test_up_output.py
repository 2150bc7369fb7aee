"""What ``baton up`` shows: a bar per process while it starts, tables, or an object per line."""

from __future__ import annotations

import json
from io import StringIO
from typing import Any

from rich.console import Console

from baton.cli.plan import Ratio, make_plan
from baton.cli.supervisor import DeploymentPlan
from baton.cli.up import JsonOutput, Output, TextOutput


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
