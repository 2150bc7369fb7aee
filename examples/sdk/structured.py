"""An answer that is a JSON object of a known shape: python examples/sdk/structured.py [ADDRESS]."""

import sys

from pydantic import BaseModel, ConfigDict, Field

import baton


class Function(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=12)
    arguments: int = Field(ge=0, le=9)


def main(address: str = "127.0.0.1:8001") -> None:
    with baton.Client(address) as client:
        answer = client.generate("def add(a, b):\n", response_format=Function, max_tokens=80, temperature=0)
        print(answer.text)
        print(answer.finish_reason, answer.parsed)


if __name__ == "__main__":
    main(*sys.argv[1:])
