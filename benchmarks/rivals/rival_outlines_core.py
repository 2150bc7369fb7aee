"""Compilation and masks of outlines_core, in an environment of its own: ``rival_outlines_core.py JOB.json``."""

from __future__ import annotations

import array
import importlib.metadata
import json
import sys
import time


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as file:
        job = json.load(file)
    import outlines_core
    from outlines_core import json_schema

    began = time.thread_time()
    tokens: dict[bytes, list[int]] = {}
    for token, data in enumerate(job["bytes"]):
        if token != job["eos"]:
            tokens.setdefault(bytes.fromhex(data), []).append(token)
    vocabulary = outlines_core.Vocabulary(job["eos"], tokens)
    table = time.thread_time() - began
    mask = array.array("I", bytes(4 * -(-len(job["bytes"]) // 32)))
    address, words = mask.buffer_info()
    compiled_s = []
    first_s = []
    masks = []
    for text, documents in zip(job["schemas"], job["documents"], strict=True):
        began = time.thread_time()
        index = outlines_core.Index(json_schema.build_regex_from_schema(text), vocabulary)
        compiled_s.append(time.thread_time() - began)
        for at, ids in enumerate(documents):
            guide = outlines_core.Guide(index)
            for position, token in enumerate(ids):
                began = time.thread_time()
                guide.write_mask_into(address, words, 4)
                masks.append(time.thread_time() - began)
                if not position and not at:
                    first_s.append(compiled_s[-1] + masks[-1])
                guide.advance(token)
    result = {"version": importlib.metadata.version("outlines_core"), "table_s": table, "compile_s": compiled_s}
    print("RIVAL", json.dumps({**result, "first_mask_s": first_s, "mask_s": masks}))


if __name__ == "__main__":
    main()
