"""The engine: requests in, tokens out, one step at a time.

One thread owns an :class:`EngineCore` and calls all of its methods. A step polls the connector, schedules, runs one
forward pass over all chosen tokens, samples, and returns the new tokens of each sequence; on a GPU the forward pass of
the next step runs by then (:mod:`~baton.engine.step_pipeline`). Tokens that a load brought are returned at once, by a
step of their own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch

from baton.config import EngineConfig
from baton.engine.connector_bridge import ConnectorBridge
from baton.engine.executor.base import Executor, raise_if_lost
from baton.engine.grammar.constraint import GrammarCompiler, StepMasks
from baton.engine.request import EngineRequest, EngineStats, SequenceOutput, check_request
from baton.engine.sampler import crowded_team
from baton.engine.scheduler import Scheduler
from baton.engine.sequence import RequestGroup, Sequence, SequenceState, WindowGroups
from baton.engine.speculation.drafter import Drafter
from baton.engine.speculation.speculator import Speculator
from baton.engine.speculation.verification import Chosen, accepted_moves
from baton.engine.step_budget import step_budget
from baton.engine.step_pipeline import InFlightStep, StepPipeline
from baton.errors import ConfigError, InternalError, InvalidRequestError, QueueFullError
from baton.hashing import root_hash
from baton.kv_cache.arena import Arena
from baton.kv_cache.block_pool import BlockPool
from baton.kv_cache.connector import KVConnector, LoadUpdate
from baton.kv_cache.events import BlocksStored, KVEvent, merge_events
from baton.kv_cache.shards import KVShards
from baton.types import BACKGROUND_PRIORITY, FinishReason, RequestId, SamplingParams

_log = logging.getLogger(__name__)


class EngineCore:
    """Continuous batching over one model and one KV pool.

    Attributes:
        executor: Runs the model.
        steps: Launches steps.
        shards: The KV pool's memory, of all ranks.
        arena: This process's part of the pool; its generations fence all parts.
        max_model_len: Most tokens of prompt and output together: the least of what the model, the configuration and
            the pool allow.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        shards: KVShards,
        connector: KVConnector | None = None,
        on_events: Callable[[list[KVEvent]], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        grammars: GrammarCompiler | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        """Create an engine.

        Args:
            config: Scheduler limits, prefix caching, seed.
            executor: Runs the model, bound to ``shards``.
            shards: The KV pool's memory.
            connector: Loads KV from other instances or stores, and saves it there; ``None``: all KV is local.
            on_events: Called with each step's KV events, in order, in the engine's thread.
            clock: Returns seconds; measures steps.
            grammars: Compiles grammars of requests before they are added; ``None``: requests have no grammars.
            drafter: Proposes draft tokens; ``None``: no speculative decoding.

        Raises:
            ConfigError: ``max_model_len`` exceeds the model's, ``block_size`` differs from the pool's, or
                ``async_scheduling`` is ``on`` and not possible.
        """
        if config.max_model_len is not None and config.max_model_len > executor.max_model_len:
            raise ConfigError(
                f"max_model_len is {config.max_model_len}, but the model can do {executor.max_model_len}",
                field="max_model_len",
            )
        if config.block_size != executor.layout.block_size:
            raise ConfigError(
                f"block_size is {config.block_size}, but the model's pool has {executor.layout.block_size}",
                field="block_size",
            )
        self._config = config
        self.executor = executor
        self.shards = shards
        self.arena: Arena = shards.primary
        self._on_events = on_events
        self._events: list[KVEvent] = []
        self._block_size = executor.layout.block_size
        layout = executor.layout
        # With layer groups, the last block is never written: it replaces released blocks in block tables.
        pool_blocks = self.arena.num_blocks - (layout.num_groups > 1)
        state_blocks = getattr(executor, "state_blocks", 0)
        self._pool = BlockPool(
            pool_blocks,
            self.arena.generations[:pool_blocks],
            self._events.append if on_events else None,
            tenant_share=config.tenant_cache_share,
            groups=layout.num_groups,
            state_blocks=state_blocks,
        )
        groups = WindowGroups(layout.groups, pool_blocks, self._block_size)
        self._bridge = ConnectorBridge(connector, self._pool, self._block_size)
        if self._bridge.on_layer is not None:
            executor.on_layer = self._bridge.on_layer
        self._scheduler = Scheduler(config, self._pool, self._bridge, groups, state_blocks=state_blocks)
        self.limit_step_time(False)
        self._groups: dict[RequestId, RequestGroup] = {}
        self._early: list[SequenceOutput] = []
        self._progressed = False
        self._arrivals = 0
        self._prefill_tokens = self._decode_tokens = 0
        self.grammars = grammars
        team = crowded_team(config)
        self.masks = None if grammars is None else StepMasks(grammars.backend, executor.vocab_size, team)
        self.speculator = None if drafter is None else Speculator(config, drafter, executor.vocab_size)
        parts = self._scheduler, self._bridge, self.masks, lambda: self.speculator
        self.steps = StepPipeline(config, executor, *parts, clock)
        self._has_states = state_blocks > 0
        self._content_key = executor.fingerprint.content_key()
        limit = config.max_model_len or executor.max_model_len
        self.max_model_len = min(limit, (pool_blocks - 2 * state_blocks) // layout.num_groups * self._block_size)

    # Requests

    def validate(self, request: EngineRequest) -> SamplingParams:
        """Check a request without queuing it; return its sampling parameters with defaults filled in.

        Raises:
            InvalidRequestError: The request is wrong; names the field.
        """
        limits = {"vocab_size": self.executor.vocab_size, "max_model_len": self.max_model_len}
        return check_request(request, **limits, seed=self._config.seed)

    def add_request(self, request: EngineRequest) -> None:
        """Queue a request.

        Raises:
            InvalidRequestError: The request is wrong; names the field.
            QueueFullError: The number of waiting requests is at its limit, ``max_queue``.
        """
        request_id = request.request_id
        sampling = self.validate(request)
        if request_id in self._groups or request_id in self._bridge.held or request_id in self._bridge.loading:
            raise InvalidRequestError(f"request_id {request_id!r} is in use", field="request_id")
        if self._scheduler.num_waiting >= self._config.max_queue:
            raise QueueFullError(f"{self._config.max_queue} requests wait already", retry_after_s=1.0)
        self._bridge.stop_saving(request_id)
        is_background = request.priority >= BACKGROUND_PRIORITY
        stop_ids = frozenset(sampling.stop_token_ids)
        group = RequestGroup(
            request=request,
            sampling=sampling,
            stop_ids=stop_ids if sampling.ignore_eos else stop_ids | self.executor.eos_token_ids,
            root=root_hash(self._content_key, request.cache_salt, request.adapter or ""),
            priority=request.priority if self._config.policy == "priority" or is_background else 0,
            arrival=self._arrivals,
            arrived_ns=time.monotonic_ns(),
            prompt_logprobs=None if sampling.prompt_logprobs is None else [None],
        )
        self._arrivals += 1
        self._groups[request_id] = group
        group.sequences.append(Sequence(group, 0))
        self._scheduler.waiting.push(group.sequences[0])

    def abort(self, request_id: RequestId) -> bool:
        """Abort a request, or release the blocks held for a finished one; return whether it was found.

        The next step reports its sequences with ``FinishReason.ABORT``. Blocks that a
        connector still writes to are released when it reports the end of the load.
        """
        group = self._groups.get(request_id)
        if group is None:
            return self.release(request_id)
        self._end_group(group, FinishReason.ABORT, None, self._early)
        return True

    def release(self, request_id: RequestId) -> bool:
        """Release the blocks held for a finished request; return whether there were any."""
        return self._bridge.release(request_id)

    def roll_back(self, request_id: RequestId, count: int, index: int = 0) -> None:
        """Remove the last output tokens of a running sequence, with their KV; it continues from there.

        Outputs that were reported stay reported. Blocks that are no longer needed are released, and no hash of a
        removed token is registered in the prefix cache from then on.

        Args:
            request_id: Id of the request.
            count: Number of output tokens to remove.
            index: Index of the sequence within the request, 0 to n-1.

        Raises:
            InternalError: There is no such sequence, it has fewer output tokens, its KV is being loaded, or its blocks
                are kept for other instances.
        """
        group = self._groups.get(request_id)
        if group is None or not 0 <= index < len(group.sequences):
            raise InternalError(f"request {request_id!r} has no sequence {index} to roll back")
        self._drain_pipeline(group.sequences[index])
        self._scheduler.roll_back(group.sequences[index], count)

    def clear_cache(self) -> None:
        """Drop all cached KV; running requests keep theirs."""
        self._pool.clear()
        self._flush_events()

    def reset_prefix_cache(self) -> int:
        """Drop the cached KV that no request uses; return the number of blocks dropped."""
        num_blocks = self._pool.clear_unused()
        self._flush_events()
        return num_blocks

    def limit_step_time(self, bounded: bool) -> None:
        """Set whether steps with decodes are bounded in time, unless the configuration sets it.

        Args:
            bounded: Whether clients wait for each token, as on a decode instance.
        """
        self._scheduler.step_budget = step_budget(self._config, bounded=bounded)

    bound_steps = limit_step_time
    """Earlier name."""

    # State

    def has_work(self) -> bool:
        """Whether :meth:`step` has anything to do: a request is unfinished, or blocks are held for others."""
        scheduler = self._scheduler
        work = self._early or scheduler.running or scheduler.num_waiting or self.steps.in_flight
        return bool(work) or self._bridge.pending

    @property
    def made_progress(self) -> bool:
        """Whether the next step may do something at once.

        ``False`` after a step that did nothing, because everything waits for the connector, and when no work is left:
        the caller sleeps until a request comes or the connector wakes it.
        """
        return self._progressed and self.has_work()

    def stats(self) -> EngineStats:
        """Return current counters; may be called from any thread."""
        scheduler = self._scheduler
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=scheduler.num_waiting,
            num_loading=len(self._bridge.loading),
            num_blocks=self._pool.num_blocks // self.executor.layout.num_groups,
            blocks_active=-(-self._pool.num_active // self.executor.layout.num_groups),
            blocks_cached=self._pool.num_cached,
            waiting_prompt_tokens=sum(sequence.num_missing for sequence in scheduler.all_waiting()),
            num_preemptions=scheduler.num_preemptions,
            num_bounded_steps=scheduler.step_budget.num_bounded if scheduler.step_budget is not None else 0,
            prefill_tokens=self._prefill_tokens,
            decode_tokens=self._decode_tokens,
            prefix_hit_tokens=scheduler.prefix_hit_tokens,
            prefix_query_tokens=scheduler.prefix_query_tokens,
            early_evictions=self._pool.early_evictions,
            spared_blocks=self._pool.spared_blocks,
        )

    @property
    def num_prefilled(self) -> int:
        """Prompt tokens computed since start."""
        return self._prefill_tokens

    def prompt_queue(self) -> dict[RequestId, tuple[int, bool]]:
        """Return the number of tokens to compute until each unfinished prompt is complete, and whether it is running.

        The number includes the prompt's own missing tokens.
        """
        scheduler = self._scheduler
        queue = dict[RequestId, tuple[int, bool]]()
        ahead = 0
        loading = [each for each in self._bridge.loading.values() if each.state is SequenceState.LOADING]
        for sequence in sorted([*scheduler.running, *scheduler.all_waiting(), *loading], key=lambda each: each.key):
            if sequence.num_missing > 1 or not sequence.num_computed:
                ahead += sequence.num_missing
                queue[sequence.group.request.request_id] = ahead, sequence.state is SequenceState.RUNNING
        return queue

    def snapshot(self) -> list[BlocksStored]:
        """Return what is in the prefix cache, parents before children."""
        return self._pool.snapshot()

    def check_integrity(self) -> None:
        """Check that every block has one owner, and that no block is allocated if there are no requests.

        Raises:
            AssertionError: A block leaked or is owned twice.
        """
        bridge = self._bridge
        idle = not (self._groups or bridge.loading or bridge.held or bridge.saving or bridge.deferred_blocks)
        self._pool.check_integrity(idle=idle)
        self._scheduler.check_integrity()

    # Steps

    def step(self) -> list[SequenceOutput]:
        """Run one step and return the new tokens of sequences; an empty list if there are none.

        A step in which loads end returns the tokens that came with the KV and computes nothing, so that these tokens do
        not wait for a forward pass; the next step computes. This cannot repeat for long: loads begin in steps that
        compute.

        A failure of the model or the sampler ends the sequences of that step with ``FinishReason.ERROR``; the engine
        goes on.

        Raises:
            ExecutorLostError: A process that runs part of the model is gone, or the device; the engine cannot go on.
        """
        outputs = self._early
        self._early = []
        loads = self._bridge.poll_loads()
        for sequence, update in loads:
            self._finish_load(sequence, update, outputs)
        step = None if loads and outputs else self.steps.next_step()
        if step is not None:
            self._finish_step(step, outputs)
        self._progressed = bool(step or outputs or loads)
        self._flush_events()
        return outputs

    def _drain_pipeline(self, without: Sequence) -> None:
        """Read the launched step as if a sequence were not in it; :meth:`step` reports its outputs."""
        if (step := self.steps.last_step()) is not None:
            step.left_out = without
            self._finish_step(step, self._early)

    def _finish_step(self, step: InFlightStep, outputs: list[SequenceOutput]) -> None:
        """Read a step, and end its sequences if it failed."""
        try:
            self._process_step(step, outputs)
        except Exception as error:
            raise_if_lost(error)
            live = step.live
            _log.exception("step of %d sequences failed", len(live))
            for sequence in live:
                self._fail_request(sequence, f"{type(error).__name__}: {error}", outputs)
        else:
            self.steps.observe_step_time(step)
        self._pool.release(step.blocks)
        self._scheduler.release_states(step.plan)

    @torch.inference_mode()
    def _process_step(self, step: InFlightStep, outputs: list[SequenceOutput]) -> None:
        # Before any KV is reported: if the logits are not finite, the KV is not valid either.
        output, chosen = step.read()
        live = step.live
        sampled = [each for each in chosen if each.sequence in live]
        if self.speculator is not None:
            self.speculator.observe(step.plan, output.hidden, {each.sequence: each.path for each in sampled})
        if (moves := accepted_moves(sampled, self._block_size)) is not None:
            self.executor.move_kv(moves)
        for each in sampled:
            if each.error:
                self._fail_sampled(each, outputs)
        for sequence, count in live.items():
            prompt = sequence.num_computed < sequence.num_prompt
            if prompt:
                self._prefill_tokens += min(count, sequence.num_prompt - sequence.num_computed)
            if sequence.state is SequenceState.FINISHED:
                continue
            sequence.advance(count)
            self._scheduler.commit(sequence)
            if prompt or sequence.pinned:
                self._bridge.save_computed(sequence)
        self._scheduler.commit_states(step.plan)
        for each in sampled:
            if each.sequence.state is not SequenceState.FINISHED:
                self._append_with_forced(each, outputs)

    def _fail_sampled(self, chosen: Chosen, outputs: list[SequenceOutput]) -> None:
        """End a sequence that could not be given a token."""
        if chosen.bad_logits:
            for sequence in chosen.sequence.group.sequences:
                self._pool.forget(sequence.all_blocks)
        self._fail_request(chosen.sequence, chosen.error, outputs)

    def _finish_load(self, sequence: Sequence, update: LoadUpdate, outputs: list[SequenceOutput]) -> None:
        """Go on with a sequence whose load ended, with as much as arrived."""
        if sequence.state is SequenceState.FINISHED:
            self._bridge.release_finished(sequence)
            return
        group = sequence.group
        again = sequence.num_preemptions > 0
        group.transfer = group.transfer.then(update.stats) if again else update.stats
        if update.error is not None:
            extra = {"request_id": update.request_id}
            _log.warning("load of request %s fell short: %s", update.request_id, update.error, extra=extra)
            if self._config.kv_load_failure == "fail":
                self._scheduler.finish_load(sequence)  # it can be ended like any other
                self._fail_request(sequence, f"its KV could not be loaded: {update.error}", outputs)
                return
        first = update.first_token
        if first is not None and not 0 <= first.token_id < self.executor.vocab_size:
            _log.error(
                "request %s: first token %d is not in the vocabulary",
                *(update.request_id, first.token_id),
                extra={"request_id": update.request_id},
            )
            first = None
        constraint = sequence.sampler.constraint
        if first is not None and constraint is not None and not constraint.allows(first.token_id):
            _log.error("request %s: first token %d does not follow its grammar", update.request_id, first.token_id)
            first = None
        # Without the next token the last one is computed again, for its logits.
        most = sequence.num_tokens if first is not None else sequence.num_tokens - 1
        local = sequence.num_computed
        came = update.num_valid_tokens
        if sequence.windows and came < sequence.num_tokens - 1:
            came = local  # of windows only what is seen after all tokens was loaded
        if self._has_states:
            # States are those after all tokens, or after the local ones: nothing between them can be gone on from.
            came = sequence.num_tokens if first is not None and came >= sequence.num_tokens else local
            if came > local:
                self._pool.release(sequence.adopt_state_blocks())
        valid = max(local, min(came, most))
        moved = max(0, min(came, sequence.num_tokens) - local)
        if again:
            sequence.num_reloaded += moved
        else:
            sequence.num_transferred = moved
        sequence.skip_to(valid)
        if valid > local:
            self._scheduler.release_out_of_window(sequence)  # first, as these were not loaded: they must not be found
        self._scheduler.commit(sequence)
        if sequence.pinned:
            self._bridge.save_computed(sequence)
        self._scheduler.finish_load(sequence)
        if first is not None:
            logprobs = [first] if group.sampling.logprobs is not None else None
            self._append_with_forced(Chosen(sequence, [first.token_id], logprobs), outputs)

    # Tokens and ends

    def _append_with_forced(self, chosen: Chosen, outputs: list[SequenceOutput]) -> None:
        """Add tokens, and those that the grammar forces after them: the next step computes all of these together."""
        self._append_tokens(chosen, outputs)
        sequence = chosen.sequence
        constraint = chosen.sequence.sampler.constraint
        if self.masks is not None and constraint is not None:
            for forced in self.masks.forced(constraint):
                if sequence.finish_reason is not None:
                    break
                logprobs = None if chosen.logprobs is None else [forced]
                self._append_tokens(Chosen(sequence, [forced.token_id], logprobs), outputs)

    def _append_tokens(self, chosen: Chosen, outputs: list[SequenceOutput]) -> None:
        """Add tokens to a sequence, end the sequence if one of them does, and report both."""
        sequence = chosen.sequence
        group = chosen.sequence.group
        count = 0
        for token in chosen.token_ids:
            if count:
                sequence.advance(1)  # the token before it was a draft token, whose KV is there
            sequence.append_token(token)
            count += 1
            stopped = sequence.ends_with(token) or sequence.complete
            if stopped or sequence.num_output >= sequence.max_output:
                sequence.finish_reason = FinishReason.STOP if stopped else FinishReason.LENGTH
                break
        self._decode_tokens += count
        if chosen.num_drafted:
            if self.speculator is not None:
                self.speculator.verified(sequence, chosen.num_drafted, chosen.path[:count])
            self._scheduler.finish_draft(sequence)
        first = sequence.index == 0 and not group.first_token_ns
        if first:
            group.first_token_ns = time.monotonic_ns()
        logprobs = None if chosen.logprobs is None else chosen.logprobs[:count]
        outputs.append(sequence.token_output(chosen.token_ids[:count], logprobs, first=first))
        if first and group.sampling.n > 1:
            for sibling in group.spawn_siblings():
                self._scheduler.waiting.push(sibling)
        if sequence.finish_reason is not None:
            self._finish_sequence(sequence)
            if group.finished:
                del self._groups[group.request.request_id]

    def _finish_sequence(self, sequence: Sequence) -> None:
        """Take an ended sequence out."""
        self._scheduler.finish(sequence)
        if self.speculator is not None:
            self.speculator.sequence_finished(sequence)

    def _fail_request(self, sequence: Sequence, error: str, outputs: list[SequenceOutput]) -> None:
        """End the request of a sequence with an error."""
        group = sequence.group
        if self._groups.get(group.request.request_id) is group:
            self._end_group(group, FinishReason.ERROR, error, outputs)

    def _end_group(
        self, group: RequestGroup, reason: FinishReason, error: str | None, outputs: list[SequenceOutput]
    ) -> None:
        """End all sequences of a request that have not ended; those not begun are reported too."""
        del self._groups[group.request.request_id]
        group.spawn_siblings()
        for sequence in group.sequences:
            if sequence.state is not SequenceState.FINISHED:
                sequence.finish_reason = reason
                self._finish_sequence(sequence)
                outputs.append(sequence.end_output(error))

    def _flush_events(self) -> None:
        if self._events and self._on_events is not None:
            events = merge_events(self._events)
            self._events.clear()
            self._on_events(events)
