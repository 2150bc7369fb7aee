"""The tool runner of the anthropic SDK, as a script: the calls and texts of two turns, as JSON."""

import json
import sys
from typing import Any

from anthropic import Anthropic, beta_tool

url, model = sys.argv[1:]
client = Anthropic(base_url=url, api_key="unused", max_retries=0)
calls: list[tuple[str, dict[str, str]]] = []


@beta_tool
def get_weather(city: str) -> str:
    """Look it up."""
    calls.append(("get_weather", {"city": city}))
    return "rain"


@beta_tool
def get_time(city: str) -> str:
    """Look it up."""
    calls.append(("get_time", {"city": city}))
    return "noon"


messages: list[Any] = []
texts = []
for question, stream in (("What is the weather in Cologne?", False), ("What time is it in Oslo?", True)):
    messages.append({"role": "user", "content": question})
    runner = client.beta.messages.tool_runner(
        model=model, max_tokens=64, messages=list(messages), tools=[get_weather, get_time], stream=stream
    )
    last = runner.until_done()
    texts.append("".join(block.text for block in last.content if block.type == "text"))
    messages.append({"role": "assistant", "content": last.content})
print(json.dumps({"calls": calls, "texts": texts}))
