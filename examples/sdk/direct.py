"""Tokens from the decode instance itself: python examples/sdk/direct.py [ADDRESS].

The router and the decode instances want the same key: baton up --router-args "--ticket-key-file key"
--decode-args "--ticket-key-file key".
"""

import sys

import baton


def main(address: str = "127.0.0.1:8001") -> None:
    with baton.Client(address, direct=True) as client:
        try:
            answer = client.generate("import os\n\n\ndef main():\n", max_tokens=24, temperature=0)
        except baton.errors.InvalidRequestError as error:
            sys.exit(f"{error.message}\nSee the first lines of this file.")
        print(answer.text)
        print("from", answer.trace.decode_instance)


if __name__ == "__main__":
    main(*sys.argv[1:])
