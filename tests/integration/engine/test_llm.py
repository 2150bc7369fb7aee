"""Offline use: texts in, texts out."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pty
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.equality import References

from baton.engine import LLM, SamplingParams
from baton.errors import ConfigError, InternalError, InvalidRequestError
from baton.tokenizer import TextModel
from baton.types import FinishReason

GREEDY = SamplingParams(temperature=0.0, max_tokens=16)
PROMPTS = ["In a relay, one runner", "What is the price", "Grüße, naïve café", "def main("]


@pytest.fixture(scope="module")
def llm(references: References) -> Iterator[LLM]:
    with LLM(str(references.checkpoint("llama")), kv_blocks=96, dtype="float32") as llm:
        yield llm


@pytest.fixture(autouse=True)
def nothing_leaks(llm: LLM) -> Iterator[None]:
    yield
    llm.core.check_integrity()
    assert llm.core.stats().blocks_active == 0
    assert not llm.core.has_work()


def test_text_is_that_of_the_tokens(llm: LLM, references: References) -> None:
    outputs = llm.generate(PROMPTS, GREEDY)
    assert llm.tokenizer is not None
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert output.prompt == prompt
        assert output.prompt_token_ids == llm.tokenizer.encode(prompt)
        assert output.text == llm.tokenizer.decode(output.token_ids)
        assert output.finish_reason is FinishReason.LENGTH
        assert output.metrics is not None
    expected = references.greedy("llama", [output.prompt_token_ids for output in outputs], 16)
    assert [output.token_ids for output in outputs] == expected
    assert llm.generate(PROMPTS[0], GREEDY)[0].text == outputs[0].text
    assert llm.generate([outputs[1].prompt_token_ids], GREEDY)[0].token_ids == outputs[1].token_ids


def test_stop_strings_end_the_text_before_them_wherever_tokens_are_cut(llm: LLM) -> None:
    whole = llm.generate(PROMPTS[0], GREEDY)[0]
    for start in range(2, 8):
        stop = whole.text[start : start + 3]
        (output,) = llm.generate(PROMPTS[0], GREEDY.replace(stop=("never", stop)))
        assert output.text == whole.text[: whole.text.index(stop)]
        assert output.finish_reason is FinishReason.STOP
        assert output.outputs[0].stop_reason == stop
        assert len(output.token_ids) < len(whole.token_ids)


def test_a_stop_token_is_no_part_of_the_text(llm: LLM) -> None:
    whole = llm.generate(PROMPTS[0], GREEDY)[0]
    token = whole.token_ids[5]
    at = whole.token_ids.index(token)
    (output,) = llm.generate(PROMPTS[0], GREEDY.replace(stop_token_ids=(token,)))
    assert output.token_ids == whole.token_ids[: at + 1]
    assert llm.tokenizer is not None
    assert output.text == llm.tokenizer.decode(whole.token_ids[:at])
    assert output.outputs[0].stop_reason == token


def test_n_and_parameters_per_prompt(llm: LLM) -> None:
    sampling = SamplingParams(max_tokens=8, n=3, seed=4, logprobs=1)
    many, single = llm.generate(PROMPTS[:2], [sampling, GREEDY])
    assert [result.index for result in many.outputs] == [0, 1, 2]
    assert len({tuple(result.token_ids) for result in many.outputs}) == 3
    assert all(result.logprobs and len(result.logprobs) == len(result.token_ids) for result in many.outputs)
    assert single.logprobs is None
    assert len(single.outputs) == 1


def test_more_prompts_than_the_queue_holds(references: References, llm: LLM) -> None:
    with LLM(llm.config, max_queue=2, max_num_seqs=2) as small:
        outputs = small.generate(PROMPTS * 3, GREEDY.replace(n=2))
    assert [output.text for output in outputs] == [output.text for output in llm.generate(PROMPTS * 3, GREEDY)]


def test_bad_input_is_refused_before_anything_runs(llm: LLM) -> None:
    for prompts, sampling, field in (
        (["fine", ""], GREEDY, "prompt"),
        ([[5], [512]], GREEDY, "prompt"),
        (["fine"], GREEDY.replace(top_p=0.0), "top_p"),
        (["fine"], GREEDY.replace(stop=("",)), "stop"),
        (["fine"], [GREEDY, GREEDY], "sampling"),
        (["fine"], GREEDY.replace(max_tokens=5000), "max_tokens"),
    ):
        before = llm.core.stats().prefill_tokens
        with pytest.raises(InvalidRequestError) as caught:
            llm.generate(prompts, sampling)  # type: ignore[arg-type]
        assert caught.value.field == field
        assert llm.core.stats().prefill_tokens == before


def test_a_failing_model_raises_and_leaves_nothing_behind(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(batch: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(llm.core.executor, "forward", fail)
        with pytest.raises(InternalError, match="out of memory"):
            llm.generate(PROMPTS, GREEDY)
    assert llm.generate(PROMPTS[0], GREEDY)[0].finish_reason is FinishReason.LENGTH


def test_a_model_that_is_not_there_is_one_clear_error() -> None:
    with pytest.raises(ConfigError) as caught:
        LLM("/nowhere/at/all")
    assert caught.value.field == "model"


def test_a_pool_that_is_larger_than_the_memory_is_refused_and_not_begun(references: References) -> None:
    with pytest.raises(ConfigError, match="MiB are free") as caught:
        LLM(str(references.checkpoint("llama")), kv_blocks=10**9, dtype="float32")
    assert caught.value.field == "kv_blocks"


@pytest.mark.parametrize("tp", [1, 2])
def test_a_script_prints_what_it_prints(references: References, tp: int) -> None:
    """What transformers imports on its way to a model tells of libraries for other devices, in every process."""
    script = f"""
from baton.engine import LLM, SamplingParams
if __name__ == "__main__":
    with LLM({str(references.checkpoint("llama"))!r}, tp={tp}, kv_blocks=64) as llm:
        print(len(llm.generate(["def main():"], SamplingParams(max_tokens=4, temperature=0))[0].token_ids))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=600)
    assert (done.stdout, done.stderr) == ("4\n", "")


def test_without_parameters_they_are_what_the_model_recommends(
    tmp_path: Path, llm: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = ["def main(", "In a relay, one runner " * 16]
    assert llm.get_default_sampling_params() == SamplingParams()
    model = tmp_path / "model"
    shutil.copytree("models/baton-tiny", model)
    recommended = {"temperature": 0.5, "top_k": 1, "max_new_tokens": 60}
    config = json.loads(model.joinpath("generation_config.json").read_text())
    model.joinpath("generation_config.json").write_text(json.dumps({**config, **recommended}))
    caplog.set_level(logging.INFO)
    with LLM(str(model), max_model_len=160) as tuned:
        sampling = tuned.get_default_sampling_params()
        assert sampling == SamplingParams(temperature=0.5, top_k=1, max_tokens=60)
        outputs = tuned.generate(prompts)
        assert [each.token_ids for each in outputs] == [
            tuned.generate([each.prompt_token_ids], GREEDY.replace(max_tokens=most))[0].token_ids
            for each, most in zip(outputs, (60, 160 - len(outputs[1].prompt_token_ids)), strict=True)
        ]
        assert len(outputs[1].prompt_token_ids) > 100
        explicit = SamplingParams(max_tokens=1, seed=7, logprobs=3)
        tuned.generate(prompts, explicit)
        assert (explicit.temperature, explicit.top_k) == (1.0, 0)
    told = [record.getMessage() for record in caplog.records]
    assert sum(line.startswith("KV pool: ") for line in told) == 1
    assert [line.split(" in ")[0] for line in told if line.startswith("load")] == [
        f"loading {model}",
        f"loaded {model}",
    ]


# --- conversations ---


def test_a_conversation_is_answered_as_its_template_renders_it() -> None:
    messages = [{"role": "user", "content": "Write <|im_end|> a function."}]
    other = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello to"}]
    with LLM("models/baton-tiny", kv_blocks=96) as llm:
        (one,) = llm.chat(messages, GREEDY)
        reference = TextModel.load("models/baton-tiny")
        text = reference.chat_text(messages)
        assert one.prompt == text.text
        assert one.prompt_token_ids == reference.encode(text, add_special_tokens=False).tolist()
        assert one.token_ids == llm.generate([one.prompt_token_ids], GREEDY)[0].token_ids
        both = llm.chat([messages, messages[:1]], GREEDY)
        assert [each.token_ids for each in both] == [one.token_ids] * 2
        (rest,) = llm.chat(other, GREEDY, add_generation_prompt=False, continue_final_message=True)
        assert rest.prompt is not None
        assert rest.prompt.endswith("Hello to")
        with pytest.raises(InvalidRequestError) as caught:
            llm.chat([[]], GREEDY)
        assert caught.value.field == "messages"
        with pytest.raises(InvalidRequestError, match="exclude each other"):
            llm.chat(other, GREEDY, continue_final_message=True)
        llm.core.check_integrity()
        assert llm.core.stats().blocks_active == 0


def test_a_model_without_a_chat_template_says_so(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree("models/baton-tiny", model)
    model.joinpath("chat_template.jinja").unlink(missing_ok=True)
    config = json.loads(model.joinpath("tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    model.joinpath("tokenizer_config.json").write_text(json.dumps(config))
    with LLM(str(model), kv_blocks=96) as llm, pytest.raises(InvalidRequestError, match="no chat template") as caught:
        llm.chat([{"role": "user", "content": "x"}], GREEDY)
    assert caught.value.field == "messages"


@pytest.mark.parametrize(("argument", "shown"), [("True", True), ("False", False)])
def test_progress_is_shown_on_a_terminal(argument: str, shown: bool) -> None:
    script = (
        "from baton.engine import LLM, SamplingParams\n"
        "with LLM('models/baton-tiny', kv_blocks=96) as llm:\n"
        f"    llm.generate(['a', 'b', 'c'], SamplingParams(max_tokens=4), show_progress={argument})\n"
    )
    terminal, end = pty.openpty()
    with open(terminal, "rb", closefd=True) as reading:
        done = subprocess.run([sys.executable, "-c", script], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=end, check=True, timeout=600)  # fmt: skip
        os.close(end)
        text = b""
        with contextlib.suppress(OSError):  # reading a terminal whose writers have closed it fails
            while part := os.read(reading.fileno(), 65536):
                text += part
    assert done.stdout == b""
    assert (b"3/3 prompts" in text) is shown
