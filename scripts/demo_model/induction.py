"""A model that can copy before it has learnt anything: an induction circuit in its first two layers.

To copy is to look for an earlier place whose token is the present one, and to say what followed it (Olsson et al.,
"In-context Learning and Induction Heads", 2022). A head of the first layer writes each place's previous token beside
its own, one of the second looks that up. Gradient descent finds this after some thousand steps; here weights begin
there, and training is left with what to copy, and when.
"""

from __future__ import annotations

import math
from typing import Any

import torch

EMBEDDING = 0.05
"""Standard deviation of the embeddings."""
CONSTANT = 5.0
"""The first dimension of all embeddings, in standard deviations: what attention by place alone is made of."""
PLACE, CONTENT = 2.0, 3.0
"""How sharp attention to the previous place, and to equal tokens, is."""
GAIN = 8.0
"""How much more of what is copied is written than there is of the present token."""


@torch.no_grad()
def start_with_induction(model: Any) -> None:
    """Set weights of a Llama's first two layers, in place; the others stay as they are."""
    config = model.config
    width, head, groups = config.hidden_size, config.head_dim, config.num_key_value_heads
    per_group, half = config.num_attention_heads // groups, config.head_dim // 2
    frequencies = config.rope_parameters["rope_theta"] ** (-torch.arange(half) / half)
    fast = (torch.arange(half) < half // 4).float()
    slow = torch.cat([torch.arange(half // 2, half), torch.arange(half + half // 2, config.head_dim)])
    # Directions of the residual stream: the constant, then what is looked up, then where previous tokens are written.
    basis = torch.linalg.qr(torch.randn(width - 1, width - 1))[0]
    basis = torch.cat([torch.zeros(1, width - 1), basis])
    looked_up, written = basis[:, :head], basis[:, head : 2 * head]

    embedding = model.get_input_embeddings().weight
    embedding.normal_()
    embedding -= embedding @ written @ written.T
    embedding[:, 0] = 0.0
    embedding *= EMBEDDING * math.sqrt(width) / embedding.norm(dim=1, keepdim=True)  # so that the constant is one
    embedding[:, 0] = CONSTANT * EMBEDDING

    first = model.model.layers[0].self_attn
    first.q_proj.weight[:head] = 0.0
    first.k_proj.weight[:head] = 0.0
    first.q_proj.weight[:head, 0] = PLACE * torch.cat([fast * frequencies.cos(), -fast * frequencies.sin()])
    first.k_proj.weight[:head, 0] = PLACE * torch.cat([fast, torch.zeros(half)])
    first.v_proj.weight[:head] = looked_up.T
    first.o_proj.weight[:, :head] = EMBEDDING * written

    second = model.model.layers[1].self_attn
    copied = basis.T.roll(-2 * head, 0)[: width - 1 - 2 * head]
    for group in range(min(groups, 2)):
        part = slice(group * len(slow), (group + 1) * len(slow))
        query, key = group * per_group * head + slow, group * head + slow
        second.q_proj.weight[group * per_group * head :][:head] = 0.0
        second.k_proj.weight[group * head :][:head] = 0.0
        second.q_proj.weight[query] = CONTENT * looked_up.T[part]
        second.k_proj.weight[key] = CONTENT * written.T[part]
        values = copied[group * head :][:head]
        second.v_proj.weight[group * head : group * head + len(values)] = values
        at = group * per_group * head
        second.o_proj.weight[:, at : at + len(values)] = GAIN * EMBEDDING * values.T
