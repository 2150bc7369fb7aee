"""The agents SDK of OpenAI, over Responses and over chat, as a script: the calls and texts of two turns, as JSON."""

import asyncio
import json
import sys
from typing import Any

from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

url, model = sys.argv[1:]
set_tracing_disabled(disabled=True)
client = AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)
calls: list[tuple[str, dict[str, str]]] = []


@function_tool
def get_weather(city: str) -> str:
    """Look it up."""
    calls.append(("get_weather", {"city": city}))
    return "rain"


@function_tool
def get_time(city: str) -> str:
    """Look it up."""
    calls.append(("get_time", {"city": city}))
    return "noon"


async def main() -> None:
    found = {}
    for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
        calls.clear()
        agent = Agent(name="a", model=kind(model, client), tools=[get_weather, get_time])
        first = await Runner.run(agent, "What is the weather in Cologne?")
        items: list[Any] = [*first.to_input_list(), {"role": "user", "content": "What time is it in Oslo?"}]
        second = Runner.run_streamed(agent, items)
        async for _ in second.stream_events():
            pass
        found[kind.__name__] = {"calls": list(calls), "texts": [first.final_output, second.final_output]}
    print(json.dumps(found))


asyncio.run(main())
