"""Tools and structured output with the unmodified ``langchain-openai`` package, against ``baton up``.

    pip install langchain-openai
    baton up &
    python examples/langchain_agent.py --url http://127.0.0.1:8000/v1

Prints a line of JSON per step. The demo model knows no tools: what it calls, the grammar of the tools has it call.
"""

from __future__ import annotations

import argparse
import json
from typing import Any, Literal

from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

City = Literal["Cologne", "Rome", "Oslo"]


@tool
def get_weather(city: City, days: Literal[1, 2, 3]) -> str:
    """Tell the weather of the next days."""
    return f"{city}: rain for {days} days"


class Report(BaseModel):
    """A report of the weather."""

    city: City
    days: int = Field(ge=1, le=7)
    rain: bool


def show(step: str, **values: Any) -> None:
    """Print what a step brought."""
    print(json.dumps({"step": step, **values}))


def main() -> None:
    """Run all steps."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="baton-tiny")
    args = parser.parse_args()
    chat = ChatOpenAI(base_url=args.url, api_key="none", model=args.model, max_tokens=96, max_retries=0, temperature=0)

    question = HumanMessage("Will it rain in Cologne?")
    with_tools = chat.bind_tools([get_weather], tool_choice="required", parallel_tool_calls=False)
    called = with_tools.invoke([question])
    (call,) = called.tool_calls
    result = get_weather.invoke(call)
    answer = chat.bind(max_tokens=24).invoke([question, called, result])
    show("tool", name=call["name"], arguments=call["args"], result=result.content, answer=answer.content)

    parts = list(with_tools.stream([question]))
    whole = parts[0]
    for part in parts[1:]:
        whole += part
    show("stream", parts=len(parts), arguments=whole.tool_calls[0]["args"])

    for method in ("json_schema", "function_calling"):
        made = chat.with_structured_output(Report, method=method).invoke([question])
        show(method, value=made.model_dump())


if __name__ == "__main__":
    main()
