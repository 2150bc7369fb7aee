"""``baton up`` as a user starts it, used with the unmodified openai SDK, curl-like requests and our own SDK."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import httpx
import openai
import psutil
import pytest
from tests.support.equality import hf_greedy
from tests.support.servers.up import start

import baton
from baton.tokenizer.tokenizer import Tokenizer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def client(up) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{up.url}/v1", api_key="unused", max_retries=0, timeout=240) as made:
        yield made


NAME = "baton-tiny"
CHAT = [{"role": "user", "content": "Write a function `main` that prints its arguments."}]
LONG = "import os\n\n\ndef main():\n    print(os.environ)\n" * 8


def test_models(client, model):
    assert [item.id for item in client.models.list()] == [NAME, model]
    for name in (NAME, model):
        assert client.models.retrieve(name).id == name
        assert client.completions.create(model=name, prompt="a", max_tokens=1).model == name


def test_chat_streams_what_it_answers_at_once(client):
    whole = client.chat.completions.create(model=NAME, messages=CHAT, temperature=0, max_completion_tokens=40)
    stream = client.chat.completions.create(
        model=NAME,
        messages=CHAT,
        temperature=0,
        max_completion_tokens=40,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert text.strip()
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert whole.usage.prompt_tokens_details.cached_tokens >= 0


def test_tokens_are_those_of_hugging_face(client, model):
    ids = Tokenizer.load(model).encode(LONG)
    answer = client.completions.create(
        model=NAME, prompt=ids, temperature=0, max_tokens=48, extra_body={"return_token_ids": True}
    )
    assert answer.choices[0].token_ids == hf_greedy(model, [ids], 48)[0]


def test_headers_tell_how_the_request_went(client):
    prompt = "# headers\n" + LONG
    raw = client.completions.with_raw_response.create(model=NAME, prompt=prompt, temperature=0, max_tokens=4)
    headers = raw.headers
    assert headers["x-baton-prefill-instance"] == "prefill-0"
    assert headers["x-baton-decode-instance"] == "decode-0"
    assert headers["x-baton-path"] == "remote"
    assert headers["x-baton-pipe"] == "shm"
    assert int(headers["x-baton-kv-bytes"]) > 0
    assert float(headers["x-baton-transfer-ms"]) > 0
    assert 0 <= float(headers["x-baton-match-rate"]) <= 1
    again = client.completions.with_raw_response.create(model=NAME, prompt=prompt, temperature=0, max_tokens=4)
    assert again.headers["x-baton-path"] == "local"
    assert int(again.headers["x-baton-cached-tokens"]) > 0
    assert again.parse().usage.prompt_tokens_details.cached_tokens > 0
    assert again.parse().choices[0].text == raw.parse().choices[0].text


def test_logprobs(client):
    answer = client.completions.create(model=NAME, prompt="import ", temperature=0, max_tokens=3, logprobs=2)
    assert len(answer.choices[0].logprobs.token_logprobs) == 3
    assert all(value <= 0 for value in answer.choices[0].logprobs.token_logprobs)
    chat = client.chat.completions.create(
        model=NAME, messages=CHAT, temperature=0, max_tokens=3, logprobs=True, top_logprobs=4
    )
    content = chat.choices[0].logprobs.content
    assert len(content) == 3
    assert all(len(item.top_logprobs) == 4 and item.logprob == item.top_logprobs[0].logprob for item in content)


def test_echo_with_logprobs_of_the_prompt(client):
    answer = client.completions.create(
        model=NAME, prompt="import os", temperature=0, max_tokens=2, echo=True, logprobs=1
    )
    assert answer.choices[0].text.startswith("import os")
    values = answer.choices[0].logprobs.token_logprobs
    assert values[0] is None
    assert len(values) == answer.usage.prompt_tokens + 2


def test_stop_string_is_cut_and_named(client):
    free = client.completions.create(model=NAME, prompt="def main():\n", temperature=0, max_tokens=40).choices[0]
    assert len(free.text) > 12
    word = free.text[6:10]
    cut = client.completions.create(model=NAME, prompt="def main():\n", temperature=0, max_tokens=40, stop=[word])
    assert cut.choices[0].finish_reason == "stop"
    assert cut.choices[0].text == free.text[: free.text.index(word)]


def test_n_and_seed(client):
    def sample(seed: int) -> list[str]:
        answer = client.completions.create(
            model=NAME, prompt="def ", max_tokens=12, n=3, seed=seed, temperature=1.2, extra_body={"ignore_eos": True}
        )
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        return [choice.text for choice in answer.choices]

    assert sample(5) == sample(5)
    assert sample(5) != sample(6)
    assert len(set(sample(5))) > 1


@pytest.mark.parametrize(
    ("changes", "error", "param"),
    [
        ({"model": "other"}, openai.NotFoundError, "model"),
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"max_tokens": 0}, openai.BadRequestError, "max_tokens"),
        ({"prompt": "x " * 5000}, openai.BadRequestError, "prompt"),
        ({"prompt": [99_999_999]}, openai.BadRequestError, "prompt"),
        ({"n": 0}, openai.BadRequestError, "n"),
        ({"top_p": "much"}, openai.BadRequestError, "top_p"),
    ],
)
def test_bad_input_names_the_field(client, changes, error, param):
    with pytest.raises(error) as caught:
        client.completions.create(**{"model": NAME, "prompt": "x", "max_tokens": 4, **changes})
    assert caught.value.param == param
    assert caught.value.body["message"]


def test_unknown_fields_are_named(client):
    raw = client.completions.with_raw_response.create(
        model=NAME, prompt="x", max_tokens=1, extra_body={"best_of": 1, "vendor_magic": 3}
    )
    assert raw.headers["x-baton-ignored-fields"] == "vendor_magic"


def test_metrics_of_router_and_workers(up, client):
    client.completions.create(model=NAME, prompt=LONG, max_tokens=2)
    text = httpx.get(f"{up.url}/metrics", timeout=240).text
    for name in ("baton_router_", "index_state", "match_rate"):
        assert name in text
    table = "".join(up.lines)
    addresses = re.findall(r"metrics (127\.0\.0\.1:\d+/metrics)", table)
    assert len(addresses) >= 2  # of the instances; the router shows its own on its HTTP port
    workers = "".join(httpx.get(f"http://{address}", timeout=240).text for address in addresses)
    assert "baton_engine_num_blocks" in workers
    assert 'baton_kv_transfer_bytes_total{pipe="shm"}' in workers


def test_our_sdk(up, model):
    with baton.Client(up.grpc) as client:
        answer = client.generate("def main():\n", temperature=0.0, max_tokens=16)
        assert answer.token_ids == hf_greedy(model, [Tokenizer.load(model).encode("def main():\n")], 16)[0]
        text = "".join(
            chunk.text for chunk in client.generate("def main():\n", temperature=0.0, max_tokens=16, stream=True)
        )
        assert text == answer.text
        with pytest.raises(baton.errors.InvalidRequestError) as caught:
            client.generate("x", top_p=7.0)
        assert caught.value.field.endswith("top_p")


def test_health_and_tokenize(up):
    assert httpx.get(f"{up.url}/health", timeout=240).status_code == 200
    assert httpx.get(f"{up.url}/readyz", timeout=240).status_code == 200
    tokens = httpx.post(
        f"{up.url}/tokenize", json={"prompt": "naïve 🙂", "add_special_tokens": False}, timeout=240
    ).json()["tokens"]
    assert httpx.post(f"{up.url}/detokenize", json={"tokens": tokens}, timeout=240).json()["prompt"] == "naïve 🙂"


def test_a_process_that_cannot_start_ends_the_whole_with_its_error(tmp_path):
    (tmp_path / "config.json").write_text("{")
    running = start("--ratio", "0P1D", "--model", str(tmp_path))
    text = running.end()
    assert running.process.returncode == 2
    assert "config.json" in text
    assert "router |" not in text
    assert "Traceback" not in text


def test_a_model_whose_tokenizer_cannot_be_read_is_found_out_before_it_is_up(tmp_path, model):
    shutil.copytree(model, tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{")
    running = start("--ratio", "0P1D", "--model", str(tmp_path / "model"))
    text = running.end()
    assert running.process.returncode == 2
    assert "tokenizer.json cannot be read" in text
    assert "Traceback" not in text
    assert "Baton is up" not in text


def test_a_port_in_use_is_one_clear_line():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        running = start("--port", port)
        text = running.end()
    assert running.process.returncode not in (0, None)
    assert f"127.0.0.1:{port}" in text
    assert "Traceback" not in text


def test_another_deployment_on_the_same_ports_is_left_alone(up):
    """Its router would answer for ours, and our instances would register with it under its instances' names."""
    second = start("--port", up.url.rsplit(":", 1)[1], "--grpc-port", up.grpc.rsplit(":", 1)[1])
    text = second.end()
    assert second.process.returncode == 2
    (line,) = text.splitlines()
    assert line.startswith(f"baton up: error: router cannot listen on {up.url[7:]}: Address already in use; is another")
    with baton.Client(up.grpc) as client:
        assert len([x for x in client.list_instances() if x.healthy]) == 2


def test_a_second_ctrl_c_kills(model):
    running = start("--ratio", "0P1D", "--model", model, "--router-args=--drain-timeout-s 60")
    children = psutil.Process(running.process.pid).children(recursive=True)
    body = {"prompt": "x", "max_tokens": 2000, "stream": True, "ignore_eos": True}
    try:
        with httpx.stream("POST", f"{running.url}/v1/completions", json=body, timeout=240) as stream:
            next(stream.iter_lines())
            for child in children:  # whatever happens now, it does not drain
                child.suspend()
            running.process.send_signal(signal.SIGINT)
            ends = time.monotonic() + 240
            while not any("Ctrl-C again kills" in line for line in running.lines):
                assert time.monotonic() < ends
                time.sleep(0.02)
            with pytest.raises(subprocess.TimeoutExpired):
                running.process.wait(1.0)
            running.process.send_signal(signal.SIGINT)
            running.process.wait(240)
        assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    finally:
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        running.process.kill()
        running.end()


def test_json_tells_programs_when_it_is_up_and_where(model):
    command = [sys.executable, "-m", "baton.cli.main", "up", "--json", "--ratio", "0P1D", "--model", model]
    with subprocess.Popen([*command, "--port", "0", "--grpc-port", "0"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        events = []
        with contextlib.ExitStack() as stack:
            stack.callback(process.kill)  # or leaving would wait for it, whatever fails here
            for line in process.stdout:
                events.append(json.loads(line))
                if events[-1]["event"] != "up":
                    continue
                with baton.Client(events[-1]["grpc"]) as client:
                    assert client.generate("def main():\n", max_tokens=3, temperature=0).token_ids
                    assert client.health() == {events[-1]["grpc"]: True}
                process.send_signal(signal.SIGINT)
            process.wait(240)
    assert process.returncode == 0
    states = [(each["process"], each["state"]) for each in events if each["event"] == "process"]
    assert states == [(name, state) for name in ("router", "decode-0") for state in ("starts", "ready")]
    assert events[-1]["event"] in ("draining", "log")
    (up,) = [each for each in events if each["event"] == "up"]
    assert up["processes"]["decode-0"]["role"] == "decode"


@pytest.mark.parametrize("args", [["--ratio", "2D"], ["--ratio", "1P0D"], ["--pipe", "pigeon"]])
def test_flags_that_cannot_work(args):
    running = start(*args)
    text = running.end()
    assert running.process.returncode == 2
    assert args[1] in text
    assert "Traceback" not in text


def test_a_role_that_the_router_refuses_ends_the_start_with_the_reason(model):
    flags = ("--ratio", "1P1D", "--model", model)
    running = start(*flags, "--prefill-args", "--dtype float32", "--decode-args", "--dtype bfloat16")
    text = running.end()
    assert running.process.returncode == 1
    assert re.search(r"^baton up: the router refuses (prefill|decode)-0: .*kv_dtype", text, re.MULTILINE)
