"""Compilation and masks of xgrammar, in an environment of its own: ``rival_xgrammar.py JOB.json``; prints a result."""

from __future__ import annotations

import importlib.metadata
import json
import sys
import time


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as file:
        job = json.load(file)
    sys.path.insert(0, job["site"])  # torch and transformers, which it needs
    import torch
    import xgrammar

    torch.set_num_threads(1)
    vocab = job["vocabulary"]
    began = time.thread_time()
    info = xgrammar.TokenizerInfo(
        vocab, vocab_type=xgrammar.VocabType.BYTE_LEVEL, vocab_size=len(vocab), stop_token_ids=[job["eos"]]
    )
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    table = time.thread_time() - began
    bitmask = xgrammar.allocate_token_bitmask(1, len(vocab))
    compiled_s = []
    first_s = []
    masks = []
    for text, documents in zip(job["schemas"], job["documents"], strict=True):
        began = time.thread_time()
        compiled = compiler.compile_json_schema(text, any_whitespace=False)
        compiled_s.append(time.thread_time() - began)
        for at, ids in enumerate(documents):
            matcher = xgrammar.GrammarMatcher(compiled)
            for position, token in enumerate(ids):
                began = time.thread_time()
                matcher.fill_next_token_bitmask(bitmask, 0)
                masks.append(time.thread_time() - began)
                if not position and not at:
                    first_s.append(compiled_s[-1] + masks[-1])
                if not matcher.accept_token(token):
                    raise RuntimeError(f"{vocab[token]!r} is not taken at {position}")
    result = {"version": importlib.metadata.version("xgrammar"), "table_s": table, "compile_s": compiled_s}
    print("RIVAL", json.dumps({**result, "first_mask_s": first_s, "mask_s": masks}))


if __name__ == "__main__":
    main()
