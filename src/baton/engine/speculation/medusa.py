"""``medusa``: heads that predict the tokens after the next one, all from the target's last hidden state.

Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads", ICML 2024. A head is one
or more residual layers ``x + silu(linear(x))`` and a linear to the vocabulary; it knows nothing of what the others say.

==========  ========================================  =======================================================
            Medusa's files                            vLLM's (``"model_type": "medusa"``)
==========  ========================================  =======================================================
config      ``medusa_num_heads``, ``_num_layers``     ``num_heads``, ``num_hidden_layers``
layer       ``0.0.linear``, ``medusa_head.0.0...``    ``blocks.0.layers.0``; a bias if there is one
vocabulary  ``0.1``; the model's                      ``lm_heads.0``, or one for all (``original_lm_head``);
                                                      the model's, or some of it (``token_map``)
==========  ========================================  =======================================================
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import compress

import torch
import torch.nn.functional as F

from baton.config import EngineConfig
from baton.engine.device import ComputeDevice
from baton.engine.executor.base import Executor
from baton.engine.models.loader import TORCH_DTYPES, LoadedModel
from baton.engine.sampler import sample
from baton.engine.sequence import Sequence
from baton.engine.speculation.chain import ChainState, DraftJob, extend_drafts
from baton.engine.speculation.drafter import Proposal
from baton.engine.speculation.heads import FIELD, FINAL, HeadFiles, target_of
from baton.engine.speculation.tree import Branches, grow_trees
from baton.errors import ConfigError
from baton.types import MAX_SPECULATIVE_TOKENS

_Layer = tuple[torch.Tensor, torch.Tensor | None]
"""Weight and bias."""
_Head = tuple[list[_Layer], torch.Tensor]
"""Layers and output."""


class MedusaHeads:
    """The heads.

    Args:
        files: Their weights, in either form.
        model: The target.

    Raises:
        ConfigError: They do not fit the target, or are damaged; names ``speculative_model``.
    """

    def __init__(self, files: HeadFiles, model: LoadedModel) -> None:
        self._files = files
        self._dtype = TORCH_DTYPES[model.dtype]
        self._width = int(model.text_config.hidden_size)
        self._vocab_size = int(model.text_config.vocab_size)
        self._drafted: torch.Tensor | None = None
        self._scale = 1.0
        vllm = files.has("blocks.0.layers.0.weight")
        count = int(files.number("num_heads" if vllm else "medusa_num_heads"))
        layers = int(files.number("num_hidden_layers" if vllm else "medusa_num_layers", 1))
        if count > MAX_SPECULATIVE_TOKENS:
            where = files.path.parent / "config.json"
            raise ConfigError(f"{where}: {count} heads, at most {MAX_SPECULATIVE_TOKENS} are used", field=FIELD)
        self._heads = self._of_vllm(count, layers) if vllm else self._of_medusa(count, layers)

    def _of_medusa(self, count: int, layers: int) -> list[_Head]:
        prefix = "" if self._files.has("0.0.linear.weight") else "medusa_head."
        return [
            (
                [self._layer(f"{prefix}{head}.{layer}.linear") for layer in range(layers)],
                self._tensor(f"{prefix}{head}.{layers}.weight", self._vocab_size, self._width),
            )
            for head in range(count)
        ]

    def _of_vllm(self, count: int, layers: int) -> list[_Head]:
        size = int(self._files.number("truncated_vocab_size", self._vocab_size))
        self._scale = self._files.number("logit_scale", 1.0)
        if size != self._vocab_size:
            drafted = self._files.tensor("token_map", size, dtype=torch.int64)
            if bool(((drafted < 0) | (drafted >= self._vocab_size)).any()):
                where = f"{self._files.path}: token_map"
                raise ConfigError(f"{where} leads out of the vocabulary of {self._vocab_size}", field=FIELD)
            self._drafted = drafted
        shared = bool(self._files.settings.get("original_lm_head", False))
        name = "lm_head.weight" if shared and self._files.has("lm_head.weight") else "lm_heads.0.weight"
        outs = [
            self._out(name if shared else f"lm_heads.{head}.weight", size) for head in range(1 if shared else count)
        ]
        return [
            ([self._layer(f"blocks.{head}.layers.{layer}") for layer in range(layers)], outs[0 if shared else head])
            for head in range(count)
        ]

    def _layer(self, name: str) -> _Layer:
        bias = self._tensor(f"{name}.bias", self._width) if self._files.has(f"{name}.bias") else None
        return self._tensor(f"{name}.weight", self._width, self._width), bias

    def _out(self, name: str, size: int) -> torch.Tensor:
        """Load an output layer of the drafted tokens, or one of all tokens, of which the drafted ones are kept."""
        if self._drafted is not None and self._files.shape(name)[:1] == (self._vocab_size,):
            return self._tensor(name, self._vocab_size, self._width)[self._drafted]
        return self._tensor(name, size, self._width)

    def _tensor(self, name: str, *shape: int) -> torch.Tensor:
        return self._files.tensor(name, *shape, dtype=self._dtype)

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._heads)

    def logits(self, head: int, hidden: torch.Tensor) -> torch.Tensor:
        """Return a head's logits float32 [R, vocab] of hidden states [R, width]; of what it does not draft -inf."""
        blocks, out = self._heads[head]
        for weight, bias in blocks:
            hidden = hidden + F.silu(F.linear(hidden, weight, bias))
        logits = F.linear(hidden, out).float() * self._scale
        if self._drafted is None:
            return logits
        whole = torch.full((len(hidden), self._vocab_size), -torch.inf, device=hidden.device)
        whole[:, self._drafted] = logits
        return whole


@dataclass(slots=True, kw_only=True)
class _HeadState(ChainState):
    """A draft, and the target's hidden state [width] that it is made of."""

    hidden: torch.Tensor


class MedusaDrafter:
    """A :class:`~baton.engine.speculation.drafter.Drafter` that asks Medusa's heads.

    Args:
        heads: The heads.
        device: Device that computes the heads.
        width: How many tokens trees have at each place; 1: they are chains.
    """

    name = "medusa"
    sequential = True
    hidden_of = (FINAL,)

    def __init__(self, heads: MedusaHeads, device: ComputeDevice, width: int = 1) -> None:
        self._heads = heads
        self._device = device
        self._width = width
        self._last: dict[Sequence, tuple[int, torch.Tensor]] = {}
        """Position of the first hidden state that a step computed of a sequence, and what it computed."""

    def observe(self, rows: SequenceOf[tuple[Sequence, int, int]], hidden: tuple[torch.Tensor, ...]) -> None:
        at = 0
        for sequence, start, count in rows:
            # Of a prompt's chunk the last one is enough; of a draft any may turn out to be the last.
            first = max(0, count - 1 - MAX_SPECULATIVE_TOKENS)
            self._last[sequence] = start + first, hidden[0][at + first : at + count].clone()
            at += count

    @torch.inference_mode()
    def propose(self, wanted: SequenceOf[tuple[Sequence, int]]) -> list[Proposal]:
        jobs = []
        for sequence, limit in wanted:
            start, rows = self._last.get(sequence, (0, None))
            index = sequence.num_tokens - 2 - start  # of the token before the last one
            if rows is not None and 0 <= index < len(rows):
                row = sequence.sampler.unguided()
                branches = Branches(sequence, row, limit, self._width) if self._width > 1 else None
                state = _HeadState(hidden=rows[index])
                jobs.append(DraftJob(sequence, state, limit, row, branches=branches))
        done = {job.sequence: job for job in jobs}
        for head in range(len(self._heads)):
            if not jobs:
                break
            logits = self._heads.logits(head, torch.stack([job.state.hidden for job in jobs]))
            trees = [job.branches for job in jobs if job.branches is not None]
            if trees:  # whose places the heads tell each for itself
                repeats = torch.tensor([len(tree.level) for tree in trees], device=logits.device)
                going = grow_trees(trees, logits.repeat_interleave(repeats, dim=0), self._width)
                jobs = list(compress(jobs, going))
            else:
                jobs = extend_drafts(jobs, sample(logits, [job.row for job in jobs], on_gpu=self._device.on_gpu))
        return [done[sequence].proposal() if sequence in done else Proposal(()) for sequence, _ in wanted]

    def sequence_finished(self, sequence: Sequence) -> None:
        self._last.pop(sequence, None)

    def close(self) -> None:
        self._last.clear()


def load_medusa(config: EngineConfig, executor: Executor) -> MedusaDrafter:
    """Load ``speculative_model``, heads for this target.

    Raises:
        ConfigError: They are missing, damaged or for another model (names ``speculative_model``), or the target is
            divided (names ``speculative``).
    """
    model = target_of(config, executor)
    heads = MedusaHeads(HeadFiles(config, model.device), model)
    return MedusaDrafter(heads, model.compute, config.speculative_width)
