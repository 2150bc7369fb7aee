"""One sequence on its way through the engine.

::

    WAITING --admitted, all local-----------------> RUNNING --stop, length, abort, error--> FINISHED
      |  ^                                           ^  |
      |  +--preempted (KV given back)----------------|--+
      +-----admitted, KV from outside--> LOADING --> LOADED, as soon as the batch has a slot

A sequence's tokens are its prompt and its output. The KV of the first ``num_computed`` of them is in the pool; a
sequence whose KV is complete but for the last token decodes, any other prefills: there is no other difference.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from baton.engine.request import EngineRequest, RequestMetrics, SequenceOutput
from baton.engine.sampler_row import SamplerRow
from baton.errors import InternalError
from baton.hashing import block_hashes
from baton.kv_cache.block_pool import BlockPool
from baton.kv_cache.connector import TransferStats
from baton.kv_cache.layout import LayerGroup
from baton.seeds import sequence_seed
from baton.types import BlockHash, BlockId, FinishReason, SamplingParams, TokenLogprob


@dataclass(slots=True, eq=False)
class WindowTable:
    """One sequence's blocks of one layer group with a sliding window.

    Group 0 keeps its blocks in the sequence itself; they decide what is in the prefix cache. A prefix counts as cached
    only if the other groups still have the blocks that the tokens after it will see.

    Attributes:
        group: Number of the group.
        window: Number of tokens that a token attends to, itself included; 0: all before it.
        null: Id of the null block, which stands for blocks before ``first``.
        first: Index of the first block held.
        block_ids: Block ids from that index on.
        table: Block ids by index, int32, with spare capacity.
    """

    group: int
    window: int
    null: int
    first: int = 0
    block_ids: list[BlockId] = field(default_factory=list)
    table: npt.NDArray[np.int32] = field(init=False)

    def __post_init__(self) -> None:
        self.table = np.full(16, self.null, np.int32)

    def begin(self, first: int, block_ids: SequenceOf[BlockId]) -> None:
        """Replace all blocks by these, from an index on."""
        self.first = first
        self.block_ids = []
        self.table[:] = self.null
        self.append(block_ids)

    def append(self, block_ids: SequenceOf[BlockId]) -> None:
        """Add blocks at the end."""
        self.table = _put_at(self.table, self.first + len(self.block_ids), block_ids, self.null)
        self.block_ids.extend(block_ids)

    def first_needed(self, num_computed: int, block_size: int) -> int:
        """Return the index of the first block that tokens from ``num_computed`` on will see."""
        return max(0, num_computed - self.window + 1) // block_size if self.window else 0

    def pop_before(self, place: int) -> list[BlockId]:
        """Remove and return the blocks before an index."""
        count = min(max(0, place - self.first), len(self.block_ids))
        gone = self.block_ids[:count]
        self.block_ids = self.block_ids[count:]
        self.table[self.first : self.first + count] = self.null
        self.first += count
        return gone

    def pop_from(self, end: int) -> list[BlockId]:
        """Remove and return the blocks from an index on."""
        keep = max(0, end - self.first)
        gone = self.block_ids[keep:]
        self.block_ids = self.block_ids[:keep]
        return gone

    def pop_all(self) -> list[BlockId]:
        """Remove and return all blocks."""
        gone = self.block_ids
        self.begin(0, ())
        return gone


def _put_at(
    table: npt.NDArray[np.int32], place: int, block_ids: SequenceOf[BlockId], fill: int
) -> npt.NDArray[np.int32]:
    """Put block ids at a place of a table, the only ones behind it; return the table, or a larger one with ``fill``."""
    end = place + len(block_ids)
    if end > len(table):
        larger = np.full(max(end, 2 * len(table)), fill, np.int32)
        kept = table[:place]
        larger[: len(kept)] = kept
        table = larger
    table[place:end] = block_ids
    return table


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Cached blocks that a sequence can start with.

    Attributes:
        block_ids: Blocks of group 0, from the first token on.
        windows: Per other group, the last blocks, which its window reaches.
        snapshot: Blocks with the recurrent states after these tokens.
    """

    block_ids: list[BlockId]
    windows: list[list[BlockId]]
    snapshot: list[BlockId] = field(default_factory=list)

    @property
    def all_blocks(self) -> list[BlockId]:
        """The blocks of all groups, and of the snapshot."""
        return [*self.block_ids, *(block for blocks in self.windows for block in blocks), *self.snapshot]


class WindowGroups:
    """The layer groups beyond the first, as the scheduler sees them.

    Args:
        groups: All layer groups, the one with full attention first; fewer than two: there are no others.
        null: Id of a block that is never written; stands for released blocks in tables.
        block_size: Tokens per block.
    """

    def __init__(self, groups: SequenceOf[LayerGroup], null: int, block_size: int) -> None:
        self._windows = [group.window for group in groups[1:]]
        self._null = null
        self._block_size = block_size
        self.count = max(1, len(groups))

    def new_tables(self) -> list[WindowTable]:
        """Return a sequence's tables, empty."""
        return [WindowTable(group, window, self._null) for group, window in enumerate(self._windows, 1)]

    def match(self, pool: BlockPool, hashes: SequenceOf[BlockHash]) -> PrefixHit:
        """Return the longest cached prefix whose end all groups have."""
        prefix = pool.match(hashes)
        if not self._windows:
            return PrefixHit(prefix, [])
        cached = [pool.find(hashes[: len(prefix)], group) for group in range(1, self.count)]
        length = self._longest_cached(cached, len(prefix))
        tails = [
            [block for block in blocks[self._first_visible(length, window) : length] if block is not None]
            for blocks, window in zip(cached, self._windows, strict=True)
        ]
        return PrefixHit(prefix[:length], tails)

    def _longest_cached(self, cached: list[list[BlockId | None]], count: int) -> int:
        """The longest prefix, in blocks, of which every group has what its window reaches."""
        runs = [0] * len(cached)
        best = 0
        for length in range(1, count + 1):
            whole = True
            for i, blocks in enumerate(cached):
                runs[i] = runs[i] + 1 if blocks[length - 1] is not None else 0
                whole = whole and runs[i] >= length - self._first_visible(length, self._windows[i])
            best = length if whole else best
        return best

    def _first_visible(self, length: int, window: int) -> int:
        """Place of the first block that the token after ``length`` blocks sees."""
        return max(0, length * self._block_size - window + 1) // self._block_size if window else 0


SortKey = tuple[int, int, int]
"""(priority, arrival, index): less runs first."""


class SequenceState(enum.Enum):
    """Where a sequence is."""

    WAITING = "waiting"
    LOADING = "loading"
    LOADED = "loaded"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class RequestGroup:
    """A request and its ``n`` sequences.

    Attributes:
        request: The request.
        sampling: Sampling parameters, with ``seed`` and ``max_tokens`` filled in; ``n`` is 1 for ``prefill_only``.
        stop_ids: Tokens that end a sequence: EOS unless ignored, and the request's own.
        root: Parent hash of the first block.
        priority: First part of the sequences' sort key.
        arrival: Number of the request since start; second part of the sort key.
        arrived_ns: Monotonic time of arrival.
        admitted_ns: When sequence 0 was first admitted; 0: not yet.
        first_token_ns: When sequence 0 had its first token; 0: not yet.
        sequences: Sequences created so far; the rest follow when sequence 0 has its first token.
        prompt_logprobs: Filled as the prompt is computed, if asked for; entry 0 is ``None``.
    """

    request: EngineRequest
    sampling: SamplingParams
    stop_ids: frozenset[int]
    root: BlockHash
    priority: int
    arrival: int
    arrived_ns: int
    admitted_ns: int = 0
    first_token_ns: int = 0
    sequences: list[Sequence] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] | None = None
    transfer: TransferStats = field(default_factory=TransferStats)

    @property
    def finished(self) -> bool:
        """Whether all ``n`` sequences ended."""
        return len(self.sequences) == self.sampling.n and all(s.state is SequenceState.FINISHED for s in self.sequences)

    def spawn_siblings(self) -> list[Sequence]:
        """Create the sequences that do not exist yet (``n`` > 1), and return them.

        Sequence 0 goes first and computes the prompt; when it has its first token the others are queued. They find the
        prompt's full blocks in the prefix cache and compute only its tail, which gives each its own first token
        (without a prefix cache they compute the prompt again). Each has a seed of its own.
        """
        siblings = [Sequence(self, index) for index in range(len(self.sequences), self.sampling.n)]
        self.sequences.extend(siblings)
        return siblings


@dataclass(slots=True, eq=False, repr=False)
class Sequence:
    """One of the ``n`` sequences of a request.

    Attributes:
        group: The request and its sequences.
        index: 0 to n-1.
        key: Order among sequences.
        num_prompt: Prompt tokens.
        num_tokens: Prompt and output tokens.
        num_computed: Leading tokens whose KV is in the pool.
        num_in_flight: Tokens after these that launched steps compute.
        num_expected: Tokens that launched steps will choose for the sequence.
        num_committed: Leading blocks registered in the prefix cache.
        block_ids: Block ids, from the first token on.
        buffer: Prompt and output tokens, uint32, with spare capacity.
        table: ``block_ids`` as int32, with spare capacity.
        windows: Block tables of the layer groups beyond the first, while it holds blocks.
        hashes: Hashes of the full blocks, computed as needed.
        sampler: Sampling state.
        num_drafted: Draft tokens that were verified.
        num_accepted: Draft tokens that were accepted.
        state_slot: Slot of its recurrent states while it runs; -1: it has none.
        snapshot: Blocks with its states after ``num_computed`` tokens, until its slot has them; empty: none.
        state_blocks: Blocks for the states after all tokens of its prompt, which one instance writes and another reads.
        branch: Leading tokens that an earlier sequence had too, as of its last admission.
        num_passed: Later sequences that were admitted first, while there was no room for this one.
        awaits_prefix: Whether it waited, when it was last tried, for blocks that a running sequence computes.
    """

    group: RequestGroup
    index: int
    key: SortKey = field(init=False)
    state: SequenceState = SequenceState.WAITING
    finish_reason: FinishReason | None = None
    num_prompt: int = field(init=False)
    num_tokens: int = field(init=False)
    buffer: npt.NDArray[np.uint32] = field(init=False)
    max_output: int = field(init=False)
    num_computed: int = 0
    num_committed: int = 0
    num_in_flight: int = 0
    num_expected: int = 0
    block_ids: list[BlockId] = field(default_factory=list)
    table: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros(16, np.int32))
    windows: list[WindowTable] = field(default_factory=list)
    hashes: list[BlockHash] = field(default_factory=list)
    sampler: SamplerRow = field(init=False)
    admitted: bool = False
    num_cached: int = 0
    num_transferred: int = 0
    num_prompt_computed: int = 0
    high_water: int = 0
    num_preemptions: int = 0
    num_lost: int = 0
    num_reloaded: int = 0
    num_repeated: int = 0
    state_slot: int = -1
    snapshot: list[BlockId] = field(default_factory=list)
    state_blocks: list[BlockId] = field(default_factory=list)
    branch: int = 0
    num_passed: int = 0
    awaits_prefix: bool = False
    num_drafted: int = 0
    num_accepted: int = 0

    def __post_init__(self) -> None:
        group = self.group
        request = group.request
        prompt = request.prompt_token_ids
        output = request.output_token_ids
        self.key = (group.priority, group.arrival, self.index)
        self.num_prompt = len(prompt)
        self.num_tokens = len(prompt) + len(output)
        self.buffer = np.empty(self.num_tokens + 32, np.uint32)
        self.buffer[: self.num_prompt] = prompt
        self.buffer[self.num_prompt : self.num_tokens] = output
        self.max_output = 1 + len(output) if request.prefill_only else group.sampling.max_tokens or 1
        self.sampler = SamplerRow(
            group.sampling,
            sequence_seed(group.sampling.seed or 0, self.index),
            stop_ids=sorted(group.stop_ids),
            prompt=prompt,
            output=output,
            constraint=None if request.constraint is None else request.constraint.fork(),
        )

    @property
    def tokens(self) -> npt.NDArray[np.uint32]:
        """All tokens, uint32 [num_tokens], a view."""
        return self.buffer[: self.num_tokens]

    @property
    def num_output(self) -> int:
        """Output tokens, resumed ones included."""
        return self.num_tokens - self.num_prompt

    @property
    def num_launched(self) -> int:
        """Leading tokens whose KV is in the pool or on its way: the next step goes on there."""
        return self.num_computed + self.num_in_flight

    @property
    def num_missing(self) -> int:
        """Tokens whose KV no step computes yet, one that is expected included; 1: it decodes."""
        return self.num_tokens + self.num_expected - self.num_computed - self.num_in_flight

    @property
    def started(self) -> bool:
        """Whether it was computed before, here or elsewhere, so that its client waits for the next token."""
        return self.num_output > 0 or self.num_preemptions > 0

    @property
    def pinned(self) -> bool:
        """Whether it keeps its blocks until it ends, because others may be reading them."""
        return self.group.request.prefill_only

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether logits of prompt tokens are still wanted."""
        logprobs = self.group.prompt_logprobs
        return logprobs is not None and self.index == 0 and len(logprobs) < self.num_prompt

    def append_token(self, token: int) -> None:
        if self.num_tokens == len(self.buffer):
            self.buffer = np.concatenate([self.buffer, np.empty_like(self.buffer)])
        self.buffer[self.num_tokens] = token
        self.num_tokens += 1
        self.sampler.append(token)

    def ends_with(self, token: int) -> bool:
        """Whether a token ends it; what is complete by its grammar ends with EOS even where that is to be ignored."""
        constraint = self.sampler.constraint
        return token in self.group.stop_ids or (constraint is not None and token in constraint.eos_token_ids)

    @property
    def complete(self) -> bool:
        """Whether its grammar allows nothing more."""
        constraint = self.sampler.constraint
        return constraint is not None and constraint.complete

    @property
    def all_blocks(self) -> list[BlockId]:
        """The blocks of all layer groups, and those of its recurrent states."""
        windows = (block for table in self.windows for block in table.block_ids)
        return [*self.block_ids, *windows, *self.snapshot, *self.state_blocks]

    def blocks_to_load(self, block_size: int) -> tuple[BlockId, ...]:
        """Return the blocks for the KV of all its tokens, group by group; -1: what no token after them will see.

        Those of its recurrent states follow at the end.
        """
        block_ids = list(self.block_ids)
        for table in self.windows:
            first = max(table.first, table.first_needed(self.num_tokens - 1, block_size))
            block_ids += [BlockId(-1)] * first + table.block_ids[first - table.first :]
        return (*block_ids, *self.state_blocks)

    def append_blocks(self, block_ids: SequenceOf[BlockId]) -> None:
        """Add blocks at the end of its table, and as many to each of the other layer groups'."""
        if self.windows:
            each = len(block_ids) // (1 + len(self.windows))
            for i, window in enumerate(self.windows, 1):
                window.append(block_ids[i * each : (i + 1) * each])
            block_ids = block_ids[:each]
        self.table = _put_at(self.table, len(self.block_ids), block_ids, 0)
        self.block_ids.extend(block_ids)

    def attach_prefix(self, prefix: PrefixHit, windows: list[WindowTable], block_size: int) -> None:
        """Start with blocks found in the prefix cache.

        Args:
            prefix: Blocks of the cached prefix.
            windows: Empty tables of the layer groups beyond the first.
            block_size: Tokens per block.
        """
        self.windows = []
        self.append_blocks(prefix.block_ids)
        for table, tail in zip(windows, prefix.windows, strict=True):
            table.begin(len(prefix.block_ids) - len(tail), tail)
        self.windows = windows
        self.snapshot = list(prefix.snapshot)
        self.num_committed = len(prefix.block_ids)
        self.skip_to(len(prefix.block_ids) * block_size)

    def pop_snapshot(self) -> list[BlockId]:
        """Remove and return the blocks of its snapshot."""
        blocks = self.snapshot
        self.snapshot = []
        return blocks

    def adopt_state_blocks(self) -> list[BlockId]:
        """Make the states that were loaded its snapshot; returns the blocks of the one before."""
        blocks = self.snapshot
        self.snapshot = self.state_blocks
        self.state_blocks = []
        return blocks

    def skip_to(self, num_tokens: int) -> None:
        """Note that the KV of the first ``num_tokens`` tokens is in the pool without having been computed here."""
        self.num_computed = num_tokens
        self.high_water = max(self.high_water, min(num_tokens, self.num_prompt))

    def pop_blocks(self) -> list[BlockId]:
        """Remove and return all blocks; the sequence's KV is lost."""
        blocks = self.all_blocks
        self.block_ids = []
        self.windows = []
        self.snapshot = []
        self.state_blocks = []
        self.num_lost = max(self.num_lost, self.num_computed)
        self.num_computed = self.num_committed = 0
        return blocks

    def roll_back(self, count: int, block_size: int) -> list[BlockId]:
        """Remove the last ``count`` output tokens, and the KV from the last remaining token on.

        A block that is registered in the prefix cache is never written again: one that holds remaining tokens beside
        removed ones is given up too, and what it held of the remaining ones is computed again.

        Returns:
            Blocks that the sequence holds no more.

        Raises:
            InternalError: There are not so many output tokens.
        """
        if not 0 <= count <= self.num_output:
            raise InternalError(f"{count} tokens cannot be rolled back: there are {self.num_output} of output")
        self.num_tokens -= count
        computed = min(self.num_computed, self.num_tokens - 1)
        if computed // block_size < self.num_committed:
            self.num_committed = keep = computed // block_size
            computed = keep * block_size
        else:
            keep = min(len(self.block_ids), -(-self.num_tokens // block_size))
        self.num_computed = computed
        del self.hashes[self.num_tokens // block_size :]
        self.sampler.restart(self.buffer[: self.num_prompt].tolist(), self.tokens[self.num_prompt :].tolist())
        if any(table.first > table.first_needed(computed, block_size) for table in self.windows):
            # What the remaining tokens see was given back: all is computed again.
            self.num_computed = self.num_committed = keep = 0
        dropped = self.block_ids[keep:]
        self.block_ids = self.block_ids[:keep]
        for table in self.windows:
            dropped += table.pop_from(keep) if keep else table.pop_all()
        return dropped

    def hash_blocks(self, num_tokens: int, block_size: int) -> list[BlockHash]:
        """Return the hashes of the full blocks of the first ``num_tokens`` tokens, computing those not known yet."""
        count = num_tokens // block_size
        known = len(self.hashes)
        if known < count:
            parent = self.hashes[-1] if known else self.group.root
            self.hashes += block_hashes(self.buffer[: count * block_size], block_size, parent, start=known * block_size)
        return self.hashes[:count]

    def pop_surplus_blocks(self, block_size: int) -> list[BlockId]:
        """Remove and return the blocks behind the last token, which held rejected draft tokens."""
        keep = -(-self.num_tokens // block_size)
        if len(self.block_ids) <= keep:
            return []
        dropped = self.block_ids[keep:]
        self.block_ids = self.block_ids[:keep]
        for table in self.windows:
            dropped += table.pop_from(keep)
        return dropped

    def advance(self, count: int) -> None:
        """Note that the KV of ``count`` more tokens is in the pool."""
        start = self.num_computed
        end = self.num_computed + count
        self.num_computed = end
        self.num_repeated += max(0, min(end, self.num_lost) - start)
        if start < self.num_prompt:
            # What was computed before a preemption counts once.
            self.num_prompt_computed += max(0, min(end, self.num_prompt) - max(start, self.high_water))
            self.high_water = max(self.high_water, min(end, self.num_prompt))

    # Reports

    def token_output(self, tokens: list[int], logprobs: list[TokenLogprob] | None, *, first: bool) -> SequenceOutput:
        """Report tokens that were just appended; ``finish_reason`` is set if the last one ended the sequence.

        Args:
            tokens: At least one.
            logprobs: Their log probabilities, if asked for.
            first: Whether the request's first token here is among them.
        """
        group = self.group
        reason = self.finish_reason
        return SequenceOutput(
            request_id=group.request.request_id,
            index=self.index,
            token_ids=tokens,
            logprobs=logprobs,
            finish_reason=reason,
            stop_token_id=tokens[-1] if reason is not None and self.ends_with(tokens[-1]) else None,
            metrics=self.metrics() if first or reason is not None else None,
            prompt_logprobs=group.prompt_logprobs if first else None,
        )

    def end_output(self, error: str | None) -> SequenceOutput:
        """Report an end without a token: abort or error."""
        return SequenceOutput(
            request_id=self.group.request.request_id,
            index=self.index,
            token_ids=[],
            finish_reason=self.finish_reason,
            error=error,
            metrics=self.metrics(),
            unfit=error is not None and any(one.sampler.error for one in self.group.sequences),
        )

    def metrics(self) -> RequestMetrics:
        """Return how the sequence fared so far; times are those of its request."""
        group = self.group
        return RequestMetrics(
            prompt_tokens=self.num_prompt,
            arrived_ns=group.arrived_ns,
            cached_tokens=min(self.num_cached, self.num_prompt),
            transferred_tokens=self.num_transferred,
            computed_tokens=self.num_prompt_computed,
            queue_us=_microseconds(group.arrived_ns, group.admitted_ns),
            ttft_us=_microseconds(group.arrived_ns, group.first_token_ns),
            num_preemptions=self.num_preemptions,
            reloaded_tokens=self.num_reloaded,
            repeated_tokens=self.num_repeated,
            drafted_tokens=sum(each.num_drafted for each in group.sequences),
            accepted_tokens=sum(each.num_accepted for each in group.sequences),
            transfer=group.transfer,
        )


def _microseconds(start_ns: int, end_ns: int) -> int:
    return max(0, end_ns - start_ns) // 1000
