"""Tools and structured output with LlamaIndex' unmodified ``OpenAILike``, against ``baton up``.

    pip install llama-index-llms-openai-like
    baton up &
    python examples/llama_index_agent.py --url http://127.0.0.1:8000/v1

Prints a line of JSON per step. The demo model knows no tools: what it calls, the grammar of the tools has it call.
"""

import argparse
import json
from typing import Any, Literal

from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field

City = Literal["Cologne", "Rome", "Oslo"]


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
    llm = OpenAILike(
        api_base=args.url, api_key="none", model=args.model, max_tokens=96, temperature=0, max_retries=0,
        context_window=2048, is_chat_model=True, is_function_calling_model=True,
    )  # fmt: skip

    weather = FunctionTool.from_defaults(get_weather)
    answer = llm.chat_with_tools([weather], user_msg="Will it rain in Cologne?", tool_required=True)
    (call,) = llm.get_tool_calls_from_response(answer)
    show("tool", name=call.tool_name, arguments=call.tool_kwargs, result=get_weather(**call.tool_kwargs))

    made = llm.structured_predict(Report, PromptTemplate("It rained in {city} for two days."), city="Cologne")
    show("structured", value=made.model_dump())

    parts = list(llm.stream_complete("Write a loop.", max_tokens=24))
    show("stream", parts=len(parts), text=parts[-1].text)


if __name__ == "__main__":
    main()
