"""A conversation that remembers: python examples/sdk/chat.py [ADDRESS]."""

import sys

import baton


def main(address: str = "127.0.0.1:8001") -> None:
    messages = [{"role": "system", "content": "Answer with code."}]
    with baton.Client(address) as client:
        for question in ("Write a function that adds two numbers.", "Now one that multiplies them."):
            messages.append({"role": "user", "content": question})
            print("user:", question)
            with client.generate(messages, stream=True, max_tokens=48, temperature=0) as stream:
                for chunk in stream:
                    print(chunk.text, end="", flush=True)
            messages.append({"role": "assistant", "content": stream.collect().text})
            print(f"\n({stream.trace.cached_tokens} of {stream.trace.prompt_tokens} prompt tokens were cached)")


if __name__ == "__main__":
    main(*sys.argv[1:])
