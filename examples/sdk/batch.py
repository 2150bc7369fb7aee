"""Many prompts, some at a time, in their order: python examples/sdk/batch.py [ADDRESS]."""

import sys

import baton
from baton.errors import BatonError


def main(address: str = "127.0.0.1:8001") -> None:
    prompts = (f"def function_{i}(x):\n" for i in range(24))  # taken as they are needed
    failed = 0
    with baton.Client(address) as client:
        for answer in client.map(prompts, concurrency=8, keep_errors=True, max_tokens=16, temperature=0):
            if isinstance(answer, BatonError):
                failed += 1
            else:
                print(repr(answer.text.split("\n")[0]))
    print(f"{failed} failed")


if __name__ == "__main__":
    main(*sys.argv[1:])
