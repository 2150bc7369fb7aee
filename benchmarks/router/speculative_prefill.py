"""Time to the first token of a conversation's second turn, with and without prefill of next turns, in one run.

``baton up`` with the demo model and a chat template that renders answers as history otherwise than they were generated,
as Qwen3's does without thinking. Conversations one after the other, with the hint and without in the order ABBA; each
has prompts that no cache has. Between the turns the user waits ``--pause``. Prints the medians, and the median of the
ratios of neighbours with its quartiles.

    python -m benchmarks.router.speculative_prefill
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import openai
from tests.support.models.rerendered import link_rerendered_model
from tests.support.servers.up import running_up

ORDER = (False, True, True, False)
WORDS = ("def", "return", "list", "value", "sorted", "index", "class", "self", "print", "range", "while", "import")


class Conversations:
    """Two turns each.

    Args:
        client: Client of the router.
        options: Options of the command.
    """

    def __init__(self, client: openai.OpenAI, options: argparse.Namespace) -> None:
        self._client = client
        self._options = options
        self._rng = random.Random(0)

    def run(self, *, hinted: bool) -> tuple[float, int]:
        """Return the milliseconds to the second turn's first token, and the prompt tokens that it computed."""
        options = self._options
        text = " ".join(self._rng.choice(WORDS) for _ in range(options.words))
        messages: list[Any] = [{"role": "user", "content": text}]
        hints = {"nvext": {"agent_hints": {"speculative_prefill": hinted}}}
        answer, _, _ = self._ask(messages, options.tokens, hints)
        time.sleep(options.pause)
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "Go on."}]
        _, ttft_ms, computed = self._ask(messages, 2, {})
        return ttft_ms, computed

    def _ask(self, messages: list[Any], tokens: int, extra: dict[str, Any]) -> tuple[str, float, int]:
        began = time.monotonic()
        text, ttft_ms, computed = "", 0.0, 0
        for event in self._client.chat.completions.create(
            model="baton",
            messages=messages,
            max_tokens=tokens,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True, **extra},
        ):
            ttft_ms = ttft_ms or 1000 * (time.monotonic() - began)
            text += (event.choices[0].delta.content or "") if event.choices else ""
            if event.usage is not None and event.usage.prompt_tokens_details is not None:
                computed = event.usage.prompt_tokens - (event.usage.prompt_tokens_details.cached_tokens or 0)
        return text, ttft_ms, computed


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run all conversations."""
    link_rerendered_model(folder)
    times: dict[bool, list[float]] = {False: [], True: []}
    computed: dict[bool, list[int]] = {False: [], True: []}
    with (
        running_up(
            "--ratio", options.ratio, "--model", str(folder), "--served-model-name", "baton", "--threads", "1",
            "--kv-blocks", "4096", "--router-args=--speculative-prefill",
        ) as running,
        openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", timeout=600) as client,
    ):  # fmt: skip
        conversations = Conversations(client, options)
        for hinted in ORDER:  # warms everything up
            conversations.run(hinted=hinted)
        for number in range(options.conversations):
            hinted = ORDER[number % len(ORDER)]
            ttft_ms, tokens = conversations.run(hinted=hinted)
            times[hinted].append(ttft_ms)
            computed[hinted].append(tokens)
    ratios = np.divide(times[True], times[False])
    low, middle, high = np.percentile(ratios, (25, 50, 75)).round(3).tolist()
    return {
        "second turns": {
            name: {
                "number": len(times[kind]),
                "ttft_ms p50": round(float(np.median(times[kind])), 2),
                "prompt tokens computed": round(float(np.mean(computed[kind])), 1),
            }
            for name, kind in (("without", False), ("with", True))
        },
        "ratio": {"median": middle, "quartiles": [low, high]},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ratio", default="1P1D", help="instances")
    parser.add_argument("--conversations", type=int, default=60, help="conversations, half of them with the hint")
    parser.add_argument("--words", type=int, default=200, help="words of the first prompt")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of the first answer")
    parser.add_argument("--pause", type=float, default=0.5, help="seconds between the turns")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measure(options, Path(folder)), indent=1))


if __name__ == "__main__":
    main()
