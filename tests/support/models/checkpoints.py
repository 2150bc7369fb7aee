"""Tiny random checkpoints that are real: config, safetensors, generation config, tokenizer and chat template.

Big enough to behave like a model (varied greedy outputs, several layers, sliding windows that bite within a few
dozen tokens), small enough to be written and loaded in a fraction of a second.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

from baton.engine.models.loader import quiet_transformers
from baton.errors import ConfigError

SPECIAL_TOKENS = ("<|pad|>", "<|bos|>", "<|eos|>", "<|system|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TRAINING_TEXT = """
In a relay, one runner carries the baton as far and as fast as they can, and then hands it over to the next one. The
hand-over is where races are won and lost: both runners move, neither waits, and the baton must never touch the ground.
Serving a language model is much the same. One instance reads the whole prompt at once; it is busy with arithmetic, and
it leaves behind a cache of keys and values, a pair for every token and every layer. Another instance takes that cache
and writes the answer, one token after the other, and is busy with moving memory. If the same machine does both, each
gets in the way of the other; if two machines do it, the cache has to travel. What is the price of a request? How many
tokens were computed, how many were found, how many came from elsewhere? def main(argument): return [value for value in
range(10) if value % 2 == 0]. The quick brown fox jumps over the lazy dog; 0123456789. Grüße, naïve café, žluťoučký kůň.
"""

MOE: dict[str, Any] = {"num_experts_per_tok": 2}
MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
}
DEEPSEEK: dict[str, Any] = {
    **MLA,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    **MOE,
}
GEMMA: dict[str, Any] = {
    "head_dim": 16,
    "sliding_window": 24,
    "query_pre_attn_scalar": 16,
    "tie_word_embeddings": False,
}

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3_moe": ("qwen3_moe", {"head_dim": 16, "num_experts": 4, "moe_intermediate_size": 32, **MOE}),
    "mistral": ("mistral", {"sliding_window": 24}),
    "mixtral": ("mixtral", {"num_local_experts": 4, **MOE}),
    "gemma": ("gemma", {"head_dim": 16, "tie_word_embeddings": True}),
    "gemma2": ("gemma2", GEMMA),
    "gemma3": ("gemma3_text", {**GEMMA, "layer_types": ["sliding_attention", "full_attention"] * 2}),
    "gpt_oss": ("gpt_oss", {"head_dim": 16, "num_local_experts": 4, "sliding_window": 24, **MOE}),
    "deepseek_v2": ("deepseek_v2", {**DEEPSEEK, "n_shared_experts": 1, "topk_method": "greedy"}),
    "deepseek_v3": ("deepseek_v3", DEEPSEEK),
    "minicpm3": ("minicpm3", MLA),
    "longcat_flash": (
        "longcat_flash",
        {
            **MLA,
            "num_layers": 2,
            "head_dim": 8,
            "ffn_hidden_size": 96,
            "expert_ffn_hidden_size": 32,
            "n_routed_experts": 4,
            "moe_topk": 2,
            "zero_expert_num": 1,
        },
    ),
    "phi3": ("phi3", {}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {"sliding_window": 24}),
    "granite": ("granite", {}),
    "cohere2": ("cohere2", {"sliding_window": 24}),
    "starcoder2": ("starcoder2", {}),
    "stablelm": ("stablelm", {}),
    "glm4": ("glm4", {"head_dim": 16}),
    "gpt_neox": ("gpt_neox", {}),
    "gpt2": ("gpt2", {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 1024}),
    "opt": ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "falcon": ("falcon", {}),
    "bloom": ("bloom", {}),
    "mamba": ("mamba", {}),
}
"""Names that :func:`make_checkpoint` knows: transformers' model type and what differs from the base sizes.

``falcon``, ``bloom`` and ``mamba`` cannot be served: they are here for the tests of the refusal.
"""


def make_checkpoint(path: str | Path, architecture: str, *, seed: int = 0, **overrides: Any) -> Path:
    """Write a tiny random checkpoint in Hugging Face format.

    Args:
        path: Folder to write to; made if it does not exist.
        architecture: A key of :data:`ARCHITECTURES`.
        seed: Decides the weights.
        overrides: Fields of the model's config; ``dtype`` is the weights' (default ``"float32"``).

    Returns:
        The folder.

    Raises:
        ConfigError: The architecture is not in the table.
    """
    if architecture not in ARCHITECTURES:
        raise ConfigError(f"architecture must be one of {sorted(ARCHITECTURES)}, got {architecture!r}", field="model")
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    model_type, changes = ARCHITECTURES[architecture]
    dtype = getattr(torch, overrides.pop("dtype", "float32"))
    config = AutoConfig.for_model(model_type, **{**_base_sizes(), **changes, **overrides})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = cast(Any, AutoModelForCausalLM).from_config(config, dtype=torch.float32)
        _randomize_sinks(model)
    model.to(dtype)
    model.generation_config = cast(Any, GenerationConfig)(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    with quiet_transformers():
        model.save_pretrained(folder)
    make_tokenizer(config.vocab_size).save_pretrained(folder)
    return folder


def make_tokenizer(vocab_size: int = 512) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer with a chat template; any text encodes and decodes to itself.

    ``vocab_size`` must be at least 262: 256 bytes and six special tokens.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=min(vocab_size, 512),
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TRAINING_TEXT], trainer)
    fast: PreTrainedTokenizerFast = cast(Any, PreTrainedTokenizerFast)(
        tokenizer_object=tokenizer,
        pad_token=SPECIAL_TOKENS[0],
        bos_token=SPECIAL_TOKENS[1],
        eos_token=SPECIAL_TOKENS[2],
        extra_special_tokens=list(SPECIAL_TOKENS[3:]),
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )
    return fast


def _base_sizes() -> dict[str, Any]:
    return {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "initializer_range": 0.35,
        "tie_word_embeddings": False,
    }


def _randomize_sinks(model: torch.nn.Module) -> None:
    """Sinks are drawn like weights but may be left at zero, where a test could not see them."""
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter, mean=1.0, std=1.0)
