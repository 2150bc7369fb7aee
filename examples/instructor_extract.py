"""Objects out of text with the unmodified ``instructor`` package, against ``baton up``.

    pip install instructor
    baton up &
    python examples/instructor_extract.py --url http://127.0.0.1:8000/v1

Prints a line of JSON per step: by a tool that must be called, by a JSON schema, and in a stream.
"""

from __future__ import annotations

import argparse
import json
from typing import Any, Literal

import instructor
from openai import OpenAI
from pydantic import BaseModel, Field

MESSAGES: list[Any] = [{"role": "user", "content": "It rained in Cologne for two days."}]


class Report(BaseModel):
    """A report of the weather."""

    city: Literal["Cologne", "Rome", "Oslo"]
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
    fields: dict[str, Any] = {"model": args.model, "messages": MESSAGES, "max_tokens": 96, "temperature": 0}
    fields |= {"max_retries": 0, "parallel_tool_calls": False}  # one object is one call
    with OpenAI(base_url=args.url, api_key="none", max_retries=0) as client:
        by_tool = instructor.from_openai(client, mode=instructor.Mode.TOOLS)
        show("tools", value=by_tool.create(response_model=Report, **fields).model_dump())
        by_schema = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)
        show("json_schema", value=by_schema.create(response_model=Report, **fields).model_dump())
        parts = list(by_tool.create_partial(response_model=Report, **fields))
        show("partial", parts=len(parts), value=parts[-1].model_dump())


if __name__ == "__main__":
    main()
