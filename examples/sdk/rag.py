"""Questions about documents that many requests share: python examples/sdk/rag.py [ADDRESS].

The shared part comes first, so that its KV is computed once and found again, wherever it lies.
"""

import sys

import baton

DOCUMENTS = {
    "paths": "import os\n\n\ndef join(*parts):\n    return os.path.join(*parts)\n" * 6,
    "numbers": "def add(a, b):\n    return a + b\n\n\ndef mul(a, b):\n    return a * b\n" * 6,
}
QUESTIONS = ("# What is imported?\n", "# Which functions are there?\n", "# What does the first one return?\n")


def main(address: str = "127.0.0.1:8001") -> None:
    with baton.Client(address) as client:
        for name, document in DOCUMENTS.items():
            for question in QUESTIONS:
                answer = client.generate(document + question, max_tokens=12, temperature=0)
                trace = answer.trace
                share = f"{trace.cached_tokens} of {trace.prompt_tokens} prompt tokens cached"
                print(f"{name}: {share}, on {trace.decode_instance}")


if __name__ == "__main__":
    main(*sys.argv[1:])
