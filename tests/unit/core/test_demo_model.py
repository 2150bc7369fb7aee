"""The demo model directory is complete, loadable and honest about itself."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jinja2
import pytest
import torch
from scripts.demo_model.card import draw_curve, render_card
from scripts.demo_model.conversations import build_conversations, third_person
from scripts.demo_model.corpus import is_held_out
from scripts.demo_model.tokenizer import CHAT_TEMPLATE
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

ROOT = Path(__file__).resolve().parents[3]
MODEL = ROOT / "models" / "baton-tiny"
CHAT = [
    {"role": "system", "content": "You write Python functions."},
    {"role": "user", "content": "Write a function `add` that adds two numbers."},
    {"role": "assistant", "content": "def add(a, b):\n    return a + b"},
    {"role": "user", "content": "Write a function `half`."},
]
RENDERED = (
    "<|bos|><|im_start|>system\nYou write Python functions.<|im_end|>\n"
    "<|im_start|>user\nWrite a function `add` that adds two numbers.<|im_end|>\n"
    "<|im_start|>assistant\ndef add(a, b):\n    return a + b<|im_end|>\n"
    "<|im_start|>user\nWrite a function `half`.<|im_end|>\n"
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """The tokenizer as transformers loads it."""
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def model() -> Any:
    """The model in float32."""
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).train(False)


@pytest.fixture(scope="module")
def log() -> dict[str, Any]:
    """The log of the training run."""
    loaded: dict[str, Any] = json.loads((MODEL / "training_log.json").read_text("utf-8"))
    return loaded


def test_directory_is_complete_and_small() -> None:
    files = {path.name: path.stat().st_size for path in MODEL.iterdir() if path.is_file()}
    assert {
        "README.md",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "loss_curve.svg",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "training_log.json",
    } <= set(files)
    assert sum(files.values()) < 12_000_000
    assert files["training_log.json"] < 100_000


def test_config_and_special_tokens_agree(tokenizer: Any) -> None:
    config = AutoConfig.from_pretrained(MODEL)
    generation = GenerationConfig.from_pretrained(MODEL)
    assert config.model_type == "llama"
    assert config.architectures == ["LlamaForCausalLM"]
    assert config.vocab_size == len(tokenizer) == 4096
    assert config.num_attention_heads % config.num_key_value_heads == 0
    assert config.num_key_value_heads < config.num_attention_heads
    assert config.tie_word_embeddings
    assert tokenizer.is_fast
    ids = tokenizer.convert_tokens_to_ids
    ends = [ids("<|im_end|>"), ids("<|endoftext|>")]
    assert config.eos_token_id == generation.eos_token_id == ends
    assert tokenizer.eos_token_id == ends[0]
    assert config.bos_token_id == generation.bos_token_id == tokenizer.bos_token_id
    assert config.pad_token_id == generation.pad_token_id == tokenizer.pad_token_id
    assert len({*ends, tokenizer.bos_token_id, tokenizer.pad_token_id}) == 4
    raw = json.loads((MODEL / "config.json").read_text("utf-8"))
    assert raw["rope_theta"] == raw["rope_parameters"]["rope_theta"] == 10000.0


@pytest.mark.parametrize(
    "text",
    [
        "def f(x):\n\treturn x  # tab\r\n",
        "    indented\n\n\n        more   \n",
        "naïve café “quotes” … 1234567",
        "日本語 한국어 العربية हिन्दी",
        "🙂👩‍👩‍👧‍👦🇩🇪 emoji",
        "\x00\x7f\u200b\ufeff",
    ],
)
def test_text_survives_the_tokenizer(tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    with_bos = tokenizer.encode(text)
    assert with_bos == [tokenizer.bos_token_id, *ids]
    assert tokenizer.decode(with_bos, skip_special_tokens=True) == text


def test_tokenizer_files_are_what_transformers_4_reads_too(tokenizer: Any) -> None:
    settings = json.loads((MODEL / "tokenizer_config.json").read_text("utf-8"))
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    # There it is an object of named tokens, whose keys are read; a list is what the older name is for.
    assert isinstance(settings.get("extra_special_tokens", {}), dict)
    assert settings["additional_special_tokens"] == ["<|endoftext|>", "<|im_start|>"]
    assert {"<|endoftext|>", "<|im_start|>"} <= set(tokenizer.all_special_tokens)


def test_special_tokens_in_text_are_single_tokens(tokenizer: Any) -> None:
    ids = tokenizer.encode(RENDERED, add_special_tokens=False)
    assert ids.count(tokenizer.convert_tokens_to_ids("<|im_start|>")) == 4
    assert ids.count(tokenizer.eos_token_id) == 4
    assert ids.count(tokenizer.bos_token_id) == 1


@pytest.mark.parametrize("prompt", [False, True])
def test_chat_template_renders(tokenizer: Any, prompt: bool) -> None:
    expected = RENDERED + ("<|im_start|>assistant\n" if prompt else "")
    rendered = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=prompt)
    assert rendered == expected
    source = (MODEL / "chat_template.jinja").read_text("utf-8")
    template = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(source)
    settings = {"bos_token": tokenizer.bos_token, "add_generation_prompt": prompt}
    assert template.render(messages=CHAT, **settings) == expected
    # The template does not lean on block trimming.
    assert jinja2.Template(source).render(messages=CHAT, **settings) == expected


def test_chat_template_takes_content_parts(tokenizer: Any) -> None:
    parts = [{"type": "text", "text": "Write "}, {"type": "text", "text": "code."}]
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": parts}], tokenize=False, add_generation_prompt=True
    )
    assert rendered == ("<|bos|><|im_start|>user\nWrite code.<|im_end|>\n<|im_start|>assistant\n")


def _greedy(model: Any, ids: torch.Tensor, length: int) -> list[int]:
    with torch.no_grad():
        output = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=length,
            do_sample=False,
        )
    return [int(token) for token in output[0, ids.shape[1] :]]


def test_greedy_generation_is_deterministic_text(model: Any, tokenizer: Any) -> None:
    assert next(model.parameters()).dtype == torch.float32
    ids = torch.tensor([tokenizer.encode("import os\n\n\ndef main():\n")])
    first = _greedy(model, ids, 24)
    assert first == _greedy(model, ids, 24)
    assert 0 < len(first) <= 24
    assert all(0 <= token < 4096 for token in first)
    text = tokenizer.decode(first, skip_special_tokens=True)
    assert text.strip()
    assert "\ufffd" not in text


def test_chat_answer_begins_like_python(model: Any, tokenizer: Any) -> None:
    prompt = tokenizer.apply_chat_template(CHAT[:2], tokenize=False, add_generation_prompt=True)
    ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")["input_ids"]
    text = tokenizer.decode(_greedy(model, ids, 24), skip_special_tokens=True)
    assert text.startswith(("def ", "@", "async def "))


def test_weights_are_bfloat16_and_counted(log: dict[str, Any]) -> None:
    model = AutoModelForCausalLM.from_pretrained(MODEL)
    assert model.dtype == torch.bfloat16
    assert sum(p.numel() for p in model.parameters()) == log["model"]["parameters"]
    size = (MODEL / "model.safetensors").stat().st_size
    assert size == log["model"]["weights_bytes"]


def test_card_quotes_the_log(log: dict[str, Any]) -> None:
    card = (MODEL / "README.md").read_text("utf-8")
    results, training = log["results"], log["training"]

    def row(name: str) -> str:
        match = re.search(rf"^\| {re.escape(name)} \| (.+?) \|$", card, re.MULTILINE)
        assert match is not None, name
        return match.group(1)

    assert row("Parameters") == f"{log['model']['parameters']:,}"
    assert row("Loss (nats per token)") == f"{results['held_out_loss']:.4f}"
    assert row("Perplexity per token") == f"{results['held_out_perplexity']:.2f}"
    assert row("Bits per byte") == f"{results['bits_per_byte']:.4f}"
    assert row("Loss of a smoothed bigram model") == f"{results['bigram_loss']:.4f}"
    assert row("Steps, tokens") == f"{training['steps']}, {training['tokens'] / 1e6:.2f} M"
    assert row("Training time") == f"{training['training_minutes']:.2f} minutes"
    assert training["command"] in card
    last = log["curve"][-1]
    assert last["step"] == training["steps"]
    assert f"{last['train_loss']:.3f} | {last['held_out_loss']:.3f} |" in card
    for sample in log["samples"]:
        assert sample["text"].rstrip() in card


def test_model_is_well_below_the_bigram_baseline(log: dict[str, Any]) -> None:
    results = log["results"]
    assert results["held_out_loss"] < results["bigram_loss"] - 0.75
    assert log["curve"][-1]["held_out_loss"] < log["curve"][0]["held_out_loss"]
    assert log["data"]["held_out_modules"] == len(log["data"]["held_out_paths"])


def test_the_script_writes_these_very_files_from_the_log(log: dict[str, Any]) -> None:
    assert render_card(log).encode() == (MODEL / "README.md").read_bytes()
    assert draw_curve(log["curve"], log["results"]["bigram_loss"]).encode() == (MODEL / "loss_curve.svg").read_bytes()
    assert (MODEL / "chat_template.jinja").read_text("utf-8") == CHAT_TEMPLATE
    assert all(map(is_held_out, log["data"]["held_out_paths"]))


def test_a_function_becomes_a_chat() -> None:
    source = 'class A:\n    def f(self):\n        """Copy it.\n\n        More."""\n        return self.x\n'
    (chat,) = build_conversations({"a.py": source + "\n    def empty(self):\n        pass\n"}, 200, seed=0)
    assert [message["role"] for message in chat[-2:]] == ["user", "assistant"]
    assert chat[-2]["content"].endswith("for the class `A` that copies it.")
    assert chat[-1]["content"] == 'def f(self):\n    """Copy it.\n\n    More."""\n    return self.x'
    assert build_conversations({"a.py": source}, 20, seed=0) == []


@pytest.mark.parametrize(
    ("summary", "action"),
    [("Return x.", "returns x"), ("Push", "pushes"), ("Sets it.", "sets it"), ("The name.", None), ("", None)],
)
def test_third_person(summary: str, action: str | None) -> None:
    assert third_person(summary) == action
