"""Agents of the unmodified ``pydantic-ai`` package, against ``baton up``.

    pip install "pydantic-ai-slim[openai]"
    baton up &
    python examples/pydantic_ai_agent.py --url http://127.0.0.1:8000/v1

Prints a line of JSON per step: an answer by an output tool, one by a JSON schema, and a tool that is called on the way.
The demo model knows no tools: what it calls, the grammar of the tools has it call.
"""

from __future__ import annotations

import argparse
import json
from typing import Any, Literal

from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.exceptions import UsageLimitExceeded
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings
from pydantic_ai.usage import UsageLimits


class Report(BaseModel):
    """A report of the weather."""

    city: Literal["Cologne", "Rome", "Oslo"]
    days: int = Field(ge=1, le=7)
    rain: bool


def show(step: str, **values: Any) -> None:
    """Print what a step brought."""
    print(json.dumps({"step": step, **values}))


def agent_with_a_tool(model: OpenAIChatModel, settings: ModelSettings) -> None:
    """Offer a tool beside the output; a model that only ever calls the tool is stopped after three requests."""
    called: list[str] = []
    agent = Agent(model, output_type=Report, model_settings=settings, retries=0)

    @agent.tool_plain
    def get_weather(city: Literal["Cologne", "Rome", "Oslo"]) -> str:
        """Tell the weather of a city."""
        called.append(city)
        return f"{city}: rain"

    try:
        result = agent.run_sync("Report on Cologne.", usage_limits=UsageLimits(request_limit=3))
        show("agent", called=called, value=result.output.model_dump())
    except UsageLimitExceeded:
        show("agent", called=called, value=None)


def main() -> None:
    """Run all steps."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="baton-tiny")
    args = parser.parse_args()
    model = OpenAIChatModel(args.model, provider=OpenAIProvider(base_url=args.url, api_key="none"))
    settings = ModelSettings(max_tokens=96, temperature=0.0)
    by_tool = Agent(model, output_type=Report, model_settings=settings, retries=0)
    show("tool", value=by_tool.run_sync("It rained in Cologne for two days.").output.model_dump())
    by_schema = Agent(model, output_type=NativeOutput(Report), model_settings=settings, retries=0)
    show("native", value=by_schema.run_sync("It rained in Cologne for two days.").output.model_dump())
    agent_with_a_tool(model, settings)


if __name__ == "__main__":
    main()
