"""What drafts for the demo model, as modules whose parameters have the names of the published files.

Each says, for every token of a row, what the demo model would say some places further on; they begin as copies of its
parts, and learn from its probabilities ("distillation"). Sources: EAGLE (Li et al., 2024), EAGLE-3 (Li et al., 2025),
Medusa (Cai et al., 2024).
"""

from __future__ import annotations

import json
import shutil
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as functional
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, apply_rotary_pos_emb

LAYERS_READ = (1, 3, 5)
"""Layers of the demo model whose inputs an EAGLE-3 head reads."""
MEDUSA_HEADS, MEDUSA_LAYERS = 4, 3
SMALL = 0.02
"""Standard deviation of weights that begin as nothing in particular."""
ALIKE = 0.06
"""Of projections of embeddings into keys and queries: the score of an embedding of 192 with itself is about 4."""
SIZES = (
    *("hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size"),
    *("rms_norm_eps", "max_position_embeddings", "rope_parameters"),
)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


@dataclass(frozen=True)
class Read:
    """What the demo model computed of rows of tokens.

    Attributes:
        tokens: int64 [R, T].
        embedded: Their embeddings [R, T, width].
        final: Its hidden states after the final norm [R, T, width].
        between: Those that go into ``LAYERS_READ``, side by side [R, T, 3 * width].
        wanted: Its probabilities of the draft's tokens [R, T, drafted]; they do not add up to 1 where others have some.
        right: Its likeliest tokens, as places among the draft's; -1: not among them. int64 [R, T].
    """

    tokens: torch.Tensor
    embedded: torch.Tensor
    final: torch.Tensor
    between: torch.Tensor
    wanted: torch.Tensor
    right: torch.Tensor


@torch.no_grad()
def read(target: Any, tokens: torch.Tensor, drafted: torch.Tensor) -> Read:
    """Run the demo model over rows of tokens [R, T]; ``drafted``: the draft's tokens, rising."""
    output = target.model(tokens, output_hidden_states=True, use_cache=False)
    probabilities = target.lm_head(output.last_hidden_state).softmax(-1)
    place = torch.full((probabilities.shape[-1],), -1)
    place[drafted] = torch.arange(len(drafted))
    whole = len(drafted) == len(place)
    return Read(
        tokens,
        target.model.embed_tokens(tokens),
        output.last_hidden_state,
        torch.cat([output.hidden_states[layer] for layer in LAYERS_READ], -1),
        probabilities if whole else probabilities[..., drafted],
        place[probabilities.argmax(-1)],
    )


class Draft(nn.Module, ABC):
    """What is trained.

    Attributes:
        places: How far on it drafts in training.
    """

    places: int

    @abstractmethod
    def forward(self, known: Read, places: int) -> list[torch.Tensor]:
        """Return the logits of the first ``places`` places, each [R, n, drafted]: of the last n tokens of the rows.

        Those of place i at token t are to be what the demo model's are there. They know its hidden states up to token
        t - 1 - i and, but for Medusa's, the tokens up to t; a model of its own reads tokens alone.
        """

    @abstractmethod
    def write(self, folder: Path, target: Path, drafted: torch.Tensor) -> None:
        """Write configuration and weights (bfloat16) in the published form."""

    def rounded(self) -> dict[str, torch.Tensor]:
        """Return the weights in bfloat16."""
        return {name: tensor.detach().bfloat16().contiguous() for name, tensor in self.state_dict().items()}


class EagleLayer(nn.Module):
    """The decoder layer of an EAGLE or EAGLE-3 head; begins as the demo model's last layer.

    Args:
        target: The demo model.
        third: Whether it is of an EAGLE-3 head, which takes embedding and hidden state side by side.
    """

    def __init__(self, target: Any, *, third: bool) -> None:
        super().__init__()
        config, last = target.config, target.model.layers[-1]
        self.dim, width = config.head_dim, config.hidden_size
        self.rotary = (target.model.rotary_emb,)  # in a tuple: no part of this module
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        inputs = 2 * width if third else width
        self.self_attn = nn.ModuleDict(
            {
                "q_proj": nn.Linear(inputs, heads * self.dim, bias=False),
                "k_proj": nn.Linear(inputs, kv_heads * self.dim, bias=False),
                "v_proj": nn.Linear(inputs, kv_heads * self.dim, bias=False),
                "o_proj": nn.Linear(heads * self.dim, width, bias=False),
            }
        )
        self.mlp = LlamaMLP(config)
        self.post_attention_layernorm = LlamaRMSNorm(width, config.rms_norm_eps)
        for name, linear in self.self_attn.items():
            nn.init.normal_(linear.weight, std=SMALL)
            given = getattr(last.self_attn, name).weight
            linear.weight.data[:, -given.shape[1] :] = given
        self.mlp.load_state_dict(last.mlp.state_dict())
        self.post_attention_layernorm.load_state_dict(last.post_attention_layernorm.state_dict())
        if third:
            self.input_layernorm = LlamaRMSNorm(width, config.rms_norm_eps)
            self.hidden_norm = LlamaRMSNorm(width, config.rms_norm_eps)
            # Queries and keys of embeddings begin alike: a slot looks at itself, and at where its token was before.
            for name in ("k_proj", "v_proj"):
                nn.init.normal_(self.self_attn[name].weight[:, :width], std=ALIKE)
            keys = self.self_attn["k_proj"].weight.data[:, :width].unflatten(0, (kv_heads, self.dim))
            self.self_attn["q_proj"].weight.data[:, :width] = keys.repeat_interleave(heads // kv_heads, 0).flatten(0, 1)
            self.hidden_norm.load_state_dict(last.input_layernorm.state_dict())

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor]
    ) -> torch.Tensor:
        """Compute slots as they are at one place of a draft: x [R, n, inputs], residual [R, n, width].

        ``keys`` and ``values`` are those of the places before, each [R, heads, slots, dim]; this place's are added.
        """
        place = len(keys)
        q, k, v = (self._split(self.self_attn[name](x)) for name in ("q_proj", "k_proj", "v_proj"))
        cos, sin = self.rotary[0](x, torch.arange(place, place + x.shape[1])[None])
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        group = q.shape[1] // k.shape[1]
        keys.append(k.repeat_interleave(group, 1))
        values.append(v.repeat_interleave(group, 1))
        out = attend(q, keys, values).transpose(1, 2).flatten(2)
        hidden = residual + self.self_attn["o_proj"](out)
        states: torch.Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return states

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self.dim)).transpose(1, 2)


def attend(q: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor]) -> torch.Tensor:
    """Compute the attention of slots at place ``len(keys) - 1`` of drafts that begin everywhere in a row.

    A slot sees what a draft's slot sees while the engine runs: entries of place 0, made of the demo model's states, up
    to where its own draft begins, then one of each place (EAGLE-3's training-time test). Slot i at place p, which is
    entry i - p of ``q``, thus sees the entries 0 to i - p of place 0 and entry i - p of each other place.

    Args:
        q: [R, heads, n, dim].
        keys: Of places 0 to p, each [R, heads, n + p - place, dim].
        values: The same.
    """
    count = q.shape[2]
    later = torch.ones(count, count, dtype=torch.bool).triu(1)
    scores = [(q @ keys[0][:, :, :count].mT).masked_fill(later, -torch.inf)]
    scores += [(q * key[:, :, :count]).sum(-1, keepdim=True) for key in keys[1:]]
    weights = (torch.cat(scores, -1) * q.shape[-1] ** -0.5).softmax(-1)
    out = weights[..., :count] @ values[0][:, :, :count]
    for place, value in enumerate(values[1:]):
        out = out + weights[..., count + place, None] * value[:, :, :count]
    return out


class Eagle3Head(Draft):
    """An EAGLE-3 head with a vocabulary of its own."""

    places = 5

    def __init__(self, target: Any, drafted: torch.Tensor) -> None:
        super().__init__()
        width = target.config.hidden_size
        self.fc = nn.Linear(3 * width, width, bias=False)
        self.fc.weight.data.zero_()
        self.fc.weight.data[:, -width:] = torch.eye(width)
        self.midlayer = EagleLayer(target, third=True)
        self.norm = LlamaRMSNorm(width, target.config.rms_norm_eps)
        self.norm.load_state_dict(target.model.norm.state_dict())
        self.lm_head = nn.Linear(width, len(drafted), bias=False)
        self.lm_head.weight.data.copy_(target.lm_head.weight[drafted])

    def forward(self, known: Read, places: int) -> list[torch.Tensor]:
        """Return the logits of each place; see the base class."""
        hidden, keys, values, said = self.fc(known.between), list[torch.Tensor](), list[torch.Tensor](), []
        for place in range(places):
            hidden, embedded = hidden[:, :-1], known.embedded[:, 1 + place :]
            inputs = [self.midlayer.input_layernorm(embedded), self.midlayer.hidden_norm(hidden)]
            hidden = self.midlayer(torch.cat(inputs, -1), hidden, keys, values)
            said.append(self.lm_head(self.norm(hidden)))
        return said

    def write(self, folder: Path, target: Path, drafted: torch.Tensor) -> None:
        """Write the head; see the base class."""
        settings = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", **_sizes(target)}
        settings |= {"num_hidden_layers": 1, "draft_vocab_size": len(drafted), "tie_word_embeddings": False}
        settings["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": list(LAYERS_READ)}
        _write(folder, settings, {**self.rounded(), "d2t": drafted - torch.arange(len(drafted))})


class EagleHead(Draft):
    """An EAGLE head; it says its tokens with the demo model's head."""

    places = 5

    def __init__(self, target: Any, drafted: torch.Tensor) -> None:
        super().__init__()
        width = target.config.hidden_size
        self.fc = nn.Linear(2 * width, width)
        nn.init.normal_(self.fc.weight, std=SMALL)
        nn.init.zeros_(self.fc.bias)
        self.fc.weight.data[:, width:] += torch.eye(width)
        layer = EagleLayer(target, third=False)
        # It reads and gives states after the final norm, which the copied layer does not know: it begins with ``fc``.
        for last in (layer.self_attn["o_proj"], layer.mlp.down_proj):
            nn.init.zeros_(last.weight)
        self.layers = nn.ModuleList([layer])
        self.head = (target.lm_head,)  # in a tuple: no part of this module

    def forward(self, known: Read, places: int) -> list[torch.Tensor]:
        """Return the logits of each place; see the base class."""
        hidden, keys, values, said = known.final, list[torch.Tensor](), list[torch.Tensor](), []
        for place in range(places):
            x = self.fc(torch.cat([known.embedded[:, 1 + place :], hidden[:, :-1]], -1))
            hidden = self.layers[0](x, x, keys, values)
            said.append(self.head[0](hidden))
        return said

    def write(self, folder: Path, target: Path, drafted: torch.Tensor) -> None:
        """Write the head; see the base class."""
        settings = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **_sizes(target)}
        _write(folder, settings | {"num_hidden_layers": 1, "bias": True}, self.rounded())


class MedusaHeads(Draft):
    """Medusa heads of some layers each, which share one head over a vocabulary of their own."""

    places = MEDUSA_HEADS

    def __init__(self, target: Any, drafted: torch.Tensor) -> None:
        super().__init__()
        width = target.config.hidden_size
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(MEDUSA_LAYERS))})
            for _ in range(MEDUSA_HEADS)
        )
        for parameter in self.blocks.parameters():
            nn.init.normal_(parameter, std=SMALL)
        self.lm_head = nn.Linear(width, len(drafted), bias=False)
        self.lm_head.weight.data.copy_(target.lm_head.weight[drafted])

    def forward(self, known: Read, places: int) -> list[torch.Tensor]:
        """Return the logits of each place; see the base class."""
        said = []
        for place, block in enumerate(self.blocks[:places]):
            hidden = known.final[:, : -1 - place]
            for layer in block["layers"]:
                hidden = hidden + functional.silu(layer(hidden))
            said.append(self.lm_head(hidden))
        return said

    def write(self, folder: Path, target: Path, drafted: torch.Tensor) -> None:
        """Write the heads; see the base class."""
        sizes = {name: value for name, value in _sizes(target).items() if name in {"hidden_size", "vocab_size"}}
        settings = {"architectures": ["MedusaModel"], "model_type": "medusa", **sizes}
        settings |= {"num_heads": MEDUSA_HEADS, "num_hidden_layers": MEDUSA_LAYERS, "medusa_fc_bias": False}
        settings |= {"original_lm_head": True, "truncated_vocab_size": len(drafted)}
        _write(folder, settings, {**self.rounded(), "token_map": drafted})


class DraftModel(Draft):
    """A model of one layer, which begins as the demo model's first layer between its embedding and its head."""

    places = 1

    def __init__(self, target: Any, drafted: torch.Tensor) -> None:
        super().__init__()
        config = LlamaConfig(**{**target.config.to_dict(), "num_hidden_layers": 1})
        self.model = LlamaForCausalLM(config)
        found = self.model.load_state_dict(target.state_dict(), strict=False)
        if found.missing_keys:
            raise ValueError(f"the demo model has no {found.missing_keys}")

    def forward(self, known: Read, places: int) -> list[torch.Tensor]:
        """Return its logits; see the base class."""
        logits: torch.Tensor = self.model(known.tokens, use_cache=False).logits
        return [logits]

    def write(self, folder: Path, target: Path, drafted: torch.Tensor) -> None:
        """Write the model with the demo model's tokenizer; see the base class."""
        settings = json.loads((target / "config.json").read_text()) | {"num_hidden_layers": 1}
        tied = {name: tensor for name, tensor in self.rounded().items() if name != "model.lm_head.weight"}
        _write(folder, settings, {name.removeprefix("model."): tensor for name, tensor in tied.items()})
        for name in TOKENIZER_FILES:
            shutil.copyfile(target / name, folder / name)


METHODS: dict[str, type[Draft]] = {
    "draft": DraftModel,
    "eagle": EagleHead,
    "eagle3": Eagle3Head,
    "medusa": MedusaHeads,
}
OWN_VOCABULARY = {"eagle3", "medusa"}
"""Methods whose files can have a vocabulary of their own."""


def _sizes(target: Path) -> dict[str, Any]:
    settings = json.loads((target / "config.json").read_text())
    return {name: settings[name] for name in SIZES}


def _write(folder: Path, settings: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
