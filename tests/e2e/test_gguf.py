"""``baton up --model model.gguf``: router, prefill and decode from one file."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from tests.support.equality import hf_greedy
from tests.support.models.gguf_files import dequantized_checkpoint, write_gguf
from tests.support.servers.up import Running, running_up

from baton.config.demo_model import default_model
from baton.tokenizer import TextModel

pytestmark = pytest.mark.slow
PROMPT = "import os\n\n\ndef main():\n    print(os.environ)\n" * 8
CHAT = [{"role": "user", "content": "Write a function `main` that prints its arguments."}]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The demo model as a GGUF file, and its numbers as a checkpoint."""
    root, folder = tmp_path_factory.mktemp("gguf"), Path(default_model())
    parameters = write_gguf(folder, root / "tiny-q8_0.gguf", "Q8_0", pre="llama-bpe")
    return root / "tiny-q8_0.gguf", dequantized_checkpoint(folder, parameters, root / "plain")


@pytest.fixture(scope="module")
def up(models: tuple[Path, Path]) -> Iterator[Running]:
    with running_up(
        "--ratio", "1P1D", "--dtype", "float32", "--model", str(models[0]),
        "--router-args", "--remote-prefill-threshold 64",
    ) as running:  # fmt: skip
        yield running


def test_answers_over_http_are_the_dequantized_models(up: Running, models: tuple[Path, Path]) -> None:
    plain = TextModel.load(models[1])
    with openai.OpenAI(base_url=f"{up.url}/v1", api_key="unused", max_retries=0, timeout=240) as client:
        assert [item.id for item in client.models.list()] == ["tiny-q8_0", str(models[0])]
        answer = client.completions.with_raw_response.create(
            model="tiny-q8_0", prompt=PROMPT, temperature=0, max_tokens=32, extra_body={"return_token_ids": True}
        )
        assert answer.headers["x-baton-path"] == "remote"
        ids = plain.tokenizer.encode(PROMPT)
        assert answer.parse().choices[0].token_ids == hf_greedy(models[1], [ids], 32)[0]
        chat = client.chat.completions.create(
            model="tiny-q8_0", messages=CHAT, temperature=0, max_tokens=32, extra_body={"return_token_ids": True}
        )
    prompt = list(plain.encode(plain.chat_text(CHAT), add_special_tokens=False))
    expected = hf_greedy(models[1], [prompt], 32)[0]
    assert chat.usage is not None
    assert chat.usage.prompt_tokens == len(prompt)
    assert chat.choices[0].message.content == plain.tokenizer.decode(expected)


def test_the_log_says_what_runs_and_how_exact_it_is(up: Running) -> None:
    ends = time.monotonic() + 240
    while len(lines := [line for line in up.lines if "against exact arithmetic" in line]) < 2:
        assert time.monotonic() < ends  # what is written comes through a pipe of its own
        time.sleep(0.05)
    assert len(lines) == 2
    assert all("attention" in line and "top-1" in line for line in lines)
