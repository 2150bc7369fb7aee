"""The tokenizer: byte-level BPE, special tokens, chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from .conversations import Chat

IntArray = npt.NDArray[np.int64]

PAD = "<|pad|>"
BOS = "<|bos|>"
END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
SPECIAL_TOKENS = (PAD, BOS, END_OF_TEXT, TURN_START, TURN_END)

SPLIT_PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

CHAT_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message['content'] is string %}
        {%- set text = message['content'] %}
    {%- else %}
        {%- set parts = namespace(text='') %}
        {%- for part in message['content'] or [] %}
            {%- if part['type'] == 'text' %}
                {%- set parts.text = parts.text + part['text'] %}
            {%- endif %}
        {%- endfor %}
        {%- set text = parts.text %}
    {%- endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' + text | trim + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def train_tokenizer(
    texts: Sequence[str],
    vocab_size: int,
    max_length: int,
    *,
    pattern: str = SPLIT_PATTERN,
    template: str = CHAT_TEMPLATE,
    plain_tokens: Sequence[str] = (),
) -> Any:
    """Train a fast tokenizer of ``vocab_size`` tokens, special ones included, with its chat template set.

    ``plain_tokens`` are tokens of their own beyond these, which stay in decoded text.
    """
    core = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.pre_tokenizer = pre_tokenizers.Sequence([words, bytes_])
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer=trainer)
    core.add_tokens([AddedToken(token, special=False, normalized=False) for token in plain_tokens])
    core.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, core.token_to_id(BOS))]
    )
    wrap: Any = PreTrainedTokenizerFast
    tokenizer = wrap(
        tokenizer_object=core,
        bos_token=BOS,
        eos_token=TURN_END,
        pad_token=PAD,
        additional_special_tokens=[END_OF_TEXT, TURN_START],
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )
    tokenizer.chat_template = template
    return tokenizer


def encode_all(tokenizer: Any, texts: Sequence[str]) -> list[IntArray]:
    """Encode texts without adding special tokens."""
    encodings = tokenizer.backend_tokenizer.encode_batch(list(texts), add_special_tokens=False)
    return [np.asarray(encoding.ids, dtype=np.int64) for encoding in encodings]


def render(tokenizer: Any, chat: Chat, prompt: bool = False) -> str:
    """Render a chat with the tokenizer's own template, with ``prompt`` up to where the answer begins."""
    return cast(str, tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompt))
