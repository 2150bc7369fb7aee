"""How often a model that was trained for such answers wants what its grammar forbids: calls of tools, through 1P1D."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import httpx
from scripts.demo_model.tool_conversations import ConversationMaker, Exchange
from tests.support.servers.up import running_up

MODEL = Path(__file__).parents[2] / "models" / "baton-tiny-tools"
RESERVE = {
    "type": "function",
    "function": {
        "name": "reserve_seats",
        "parameters": {
            "type": "object",
            "properties": {
                "guest": {"type": "string"},
                "seats": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 4},
                "class": {"enum": ["first", "second", "sleeper"]},
                "window": {"type": "boolean"},
                "date": {"type": "string", "format": "date"},
            },
            "required": ["guest", "seats", "class", "window", "date"],
            "additionalProperties": False,
        },
    },
}
TEMPERATURES = (0.0, 0.7, 1.0)
SEED = 20
COUNTERS = ("tried", "refused")
_METRICS = re.compile(r"(?:prefill|decode)-\d+ .* metrics (127\.0\.0\.1:\d+)/metrics")


def measure_refusals(calls: int) -> dict[str, Any]:
    """Have the model that Baton ships call tools, about words that were kept from its training.

    As it was taught, and one that it was not taught, with arguments of kinds that it never met. Instances have as many
    threads as there are processors: else no token is chosen before its mask.

    Args:
        calls: Number of calls per kind and temperature.

    Returns:
        By kind and temperature, the tokens that were chosen without a mask, how many of them were refused, and their
        share.
    """
    maker = ConversationMaker(SEED, held_out=True)
    asked = list[Exchange]()
    while len(asked) < calls:
        one = maker.exchange()
        if one.call is not None and len(one.messages) == 1:
            asked.append(one)
    threads = len(os.sched_getaffinity(0))
    flags = ("--ratio", "1P1D", "--model", str(MODEL), "--threads", str(threads))
    result: dict[str, Any] = {"model": MODEL.name, "calls": calls, "threads": threads}
    with running_up(*flags) as up, httpx.Client(base_url=up.url, timeout=240) as client:
        metrics = _METRICS.findall("".join(up.lines))
        before = [_counter(metrics, name) for name in COUNTERS]
        for kind in ("taught", "not_taught"):
            result[kind] = {}
            for temperature in TEMPERATURES:
                for at, one in enumerate(asked):
                    tools = one.tools if kind == "taught" else [RESERVE]
                    fields = {"messages": one.messages, "tools": tools, "tool_choice": "required", "max_tokens": 200}
                    body = {"model": MODEL.name, "temperature": temperature, "seed": at, **fields}
                    client.post("/v1/chat/completions", json=body).raise_for_status()
                now = [_counter(metrics, name) for name in COUNTERS]
                tried, refused = (after - earlier for after, earlier in zip(now, before, strict=True))
                before = now
                share = round(refused / tried, 4)
                result[kind][f"temperature {temperature:g}"] = {"tried": tried, "refused": refused, "share": share}
    return result


def _counter(addresses: list[str], name: str) -> int:
    pattern = re.compile(rf"^baton_grammar_{name}_tokens_total (\S+)$", re.MULTILINE)
    return sum(int(float(pattern.findall(httpx.get(f"http://{one}/metrics").text)[0])) for one in addresses)
