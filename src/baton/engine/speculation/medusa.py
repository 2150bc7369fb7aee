"""``medusa``: heads that predict the tokens after the next one, all from the target's last hidden state.

Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads", ICML 2024. A head is one
or more residual layers ``x + silu(linear(x))`` and a linear to the vocabulary; it knows nothing of what the others say.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from baton.config import EngineConfig
from baton.engine.executor.base import Executor
from baton.engine.models.loader import TORCH_DTYPES, LoadedModel
from baton.engine.sample.sampler import SamplerRow, sample
from baton.engine.sequence import Sequence
from baton.engine.speculation.branches import Branches, likeliest
from baton.engine.speculation.drafter import Proposal
from baton.engine.speculation.eagle_head import FINAL
from baton.engine.speculation.head_weights import FIELD, HeadFiles, target_of
from baton.errors import ConfigError
from baton.types import MAX_SPECULATIVE_TOKENS


class MedusaHeads:
    """The heads.

    Args:
        files: Their weights, by ``<head>.<layer>.linear`` and ``<head>.<layers>``.
        model: The target.

    Raises:
        ConfigError: They do not fit the target, or are damaged; names ``speculative_model``.
    """

    def __init__(self, files: HeadFiles, model: LoadedModel) -> None:
        width, vocab_size = int(model.text_config.hidden_size), int(model.text_config.vocab_size)
        dtype = TORCH_DTYPES[model.dtype]
        count = int(files.number("medusa_num_heads"))
        layers = int(files.number("medusa_num_layers", 1))
        if count > MAX_SPECULATIVE_TOKENS:
            where = files.path.parent / "config.json"
            raise ConfigError(f"{where}: {count} heads, at most {MAX_SPECULATIVE_TOKENS} are used", field=FIELD)
        prefix = "" if files.has("0.0.linear.weight") else "medusa_head."
        self._heads = []
        for head in range(count):
            blocks = [
                (
                    files.take(f"{prefix}{head}.{layer}.linear.weight", width, width, dtype=dtype),
                    files.take(f"{prefix}{head}.{layer}.linear.bias", width, dtype=dtype),
                )
                for layer in range(layers)
            ]
            out = files.take(f"{prefix}{head}.{layers}.weight", vocab_size, width, dtype=dtype)
            self._heads.append((blocks, out))

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._heads)

    def logits(self, head: int, hidden: torch.Tensor) -> torch.Tensor:
        """Return a head's logits float32 [R, vocab] of hidden states [R, width]."""
        blocks, out = self._heads[head]
        for weight, bias in blocks:
            hidden = hidden + F.silu(F.linear(hidden, weight, bias))
        return F.linear(hidden, out).float()


@dataclass(slots=True)
class _Job:
    at: int
    hidden: torch.Tensor
    limit: int
    row: SamplerRow


class MedusaDrafter:
    """A :class:`~baton.engine.speculation.drafter.Drafter` that asks Medusa's heads.

    Args:
        heads: The heads.
        width: How many tokens trees have at each place; 1: they are chains.
    """

    name = "medusa"
    sequential = True
    hidden_of = (FINAL,)

    def __init__(self, heads: MedusaHeads, width: int = 1) -> None:
        self._heads, self._width = heads, width
        self._last: dict[Sequence, tuple[int, torch.Tensor]] = {}
        """Position of the first hidden state that a step computed of a sequence, and what it computed."""

    def observe(self, rows: SequenceOf[tuple[Sequence, int, int]], hidden: tuple[torch.Tensor, ...]) -> None:
        """Keep the latest hidden states; see the protocol."""
        at = 0
        for sequence, start, count in rows:
            # Of a prompt's chunk the last one is enough; of a draft any may turn out to be the last.
            first = max(0, count - 1 - MAX_SPECULATIVE_TOKENS)
            self._last[sequence] = start + first, hidden[0][at + first : at + count].clone()
            at += count

    @torch.inference_mode()
    def propose(self, wanted: SequenceOf[tuple[Sequence, int]]) -> list[Proposal]:
        """Return what the heads say; see the protocol."""
        jobs = []
        for at, (sequence, limit) in enumerate(wanted):
            start, rows = self._last.get(sequence, (0, None))
            index = sequence.num_tokens - 2 - start  # of the token before the last one
            if rows is not None and 0 <= index < len(rows):
                jobs.append(_Job(at, rows[index], limit, sequence.sampler.unguided()))
        if self._width > 1:
            return self._trees(wanted, jobs)
        drafts: list[list[int]] = [[] for _ in wanted]
        for head in range(len(self._heads)):
            if not jobs:
                break
            found = sample(self._heads.logits(head, torch.stack([job.hidden for job in jobs])), [j.row for j in jobs])
            going = []
            for i, job in enumerate(jobs):
                if i in found.bad_rows:
                    continue
                token = found.token_ids[i]
                drafts[job.at].append(token)
                if len(drafts[job.at]) < job.limit and not wanted[job.at][0].ends_with(token):
                    job.row = job.row.after(token)
                    going.append(job)
            jobs = going
        return [Proposal(draft) for draft in drafts]

    def _trees(self, wanted: SequenceOf[tuple[Sequence, int]], jobs: list[_Job]) -> list[Proposal]:
        """Return trees, whose places the heads tell each for itself."""
        trees = {job.at: Branches(wanted[job.at][0], job.row, job.limit, self._width) for job in jobs}
        for head in range(len(self._heads)):
            if not jobs:
                break
            logits = self._heads.logits(head, torch.stack([job.hidden for job in jobs]))
            levels = [trees[job.at] for job in jobs]
            repeats = torch.tensor([len(tree.level) for tree in levels])
            rows = [row for tree in levels for row in tree.rows]
            found = likeliest(logits.repeat_interleave(repeats, dim=0), rows, self._width)
            going, at = [], 0
            for job, tree in zip(jobs, levels, strict=True):
                count = len(tree.level)
                if tree.grow(found[at : at + count]):
                    going.append(job)
                at += count
            jobs = going
        return [trees[at].proposal() if at in trees else Proposal(()) for at in range(len(wanted))]

    def ended(self, sequence: Sequence) -> None:
        """Forget it."""
        self._last.pop(sequence, None)

    def close(self) -> None:
        """Forget all; harmless if repeated."""
        self._last.clear()


def load_medusa(config: EngineConfig, executor: Executor) -> MedusaDrafter:
    """Load ``speculative_model``, heads for this target.

    Raises:
        ConfigError: They are missing, damaged or for another model (names ``speculative_model``), or the target is
            divided (names ``speculative``).
    """
    model = target_of(config, executor)
    return MedusaDrafter(MedusaHeads(HeadFiles(config), model), config.speculative_width)
