"""Asynchronous scheduling: the next step is launched before the tokens of the previous one are read.

In the plain order a step is launched and read before the next one is planned, and a device has nothing to do between
the two. Where it chooses tokens by itself, the next step is launched first: planned as if each sequence went on, its
tokens taken on the device from where the step before puts them. Then the step before is read, its tokens are reported,
and requests come and go, while the device computes. ::

    host     launch 1 | launch 2 | read 1, report | launch 3 | read 2, report | ...
    device            | step 1 ............. | step 2 ............. | step 3 ...

What the host knows of a sequence stays true: its tokens and ``num_computed`` are those of steps that were read, and
blocks are registered when a step has been read. What steps on their way do to it is counted beside that
(``num_in_flight``, ``num_expected``). Random numbers depend on seed and position alone, so tokens are the same.

* Ends by length are foreseen. A sequence that ends otherwise (a stop token, an abort, an error) while the next step
  computes it is left out when that step is read. Its blocks, and those outside all windows, keep a reference until
  then: no other sequence gets a block that a launched step may write to or read. For copies on the device, stream order
  would be enough; transfers over the network have no such order.
* No sequence is preempted for a step that is launched ahead. A step whose successor needs its tokens (a grammar's mask,
  penalties by counts, log probabilities of prompts, prompts that others fetch while they are computed) is not followed:
  the next step is launched after it was read.
* A step that cannot be launched, or fails, ends those sequences that it would have computed; the one before it is read
  first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from baton.config import EngineConfig
from baton.engine.connector_bridge import ConnectorBridge
from baton.engine.executor.base import Executor
from baton.engine.grammar.constraint import StepMasks
from baton.engine.runner.input_batch import ChosenTokens, ForwardOutput, StepBatch, build_batch
from baton.engine.sampler import token_logprobs
from baton.engine.scheduler import Scheduler, StepPlan
from baton.engine.sequence import Sequence, SequenceState
from baton.engine.speculation.speculator import Speculator
from baton.engine.speculation.verification import Chosen, StepSampling
from baton.errors import ConfigError, InternalError
from baton.types import BlockId

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class InFlightStep:
    """A step that was launched.

    Attributes:
        plan: Sequences and tokens of the step.
        started: Time of the launch, seconds of the pipeline's clock.
        drafting: Seconds that drafting took, included in the step's time.
        expected: Sequences that continue with a token of this step, each with the token's row of the logits.
        batch: Arrays of the forward pass, and the use of its logits.
        output: Result of the forward pass.
        sampling: Sampling of the step's tokens.
        blocks: Blocks given up while it was in flight; one reference each, released when it has been read.
        left_out: Sequence whose tokens of this step are discarded.
        error: Why it could not be launched; the other attributes are then unset.
    """

    plan: StepPlan
    started: float
    drafting: float = 0.0
    expected: dict[Sequence, int] = field(default_factory=dict)
    batch: StepBatch | None = None
    output: ForwardOutput | None = None
    sampling: StepSampling | None = None
    blocks: list[BlockId] = field(default_factory=list)
    left_out: Sequence | None = None
    error: Exception | None = None

    def read(self) -> tuple[ForwardOutput, list[Chosen]]:
        """Wait for it; returns what it computed and chose. Log probabilities of prompts go to their requests.

        Raises:
            Exception: Whatever it failed with.
        """
        if self.error is not None:
            raise self.error
        if self.batch is None or self.output is None or self.sampling is None:
            raise InternalError("a step is read that was not launched")
        for rows in self.batch.prompt_rows:
            group = rows.sequence.group
            if group.prompt_logprobs is not None:
                count = [group.sampling.prompt_logprobs or 0] * len(rows.rows)
                group.prompt_logprobs += token_logprobs(self.output.logits[rows.rows], rows.token_ids, count)
        return self.output, self.sampling.chosen()

    @property
    def live(self) -> dict[Sequence, int]:
        """The plan's sequences that have not ended meanwhile, with how many of their tokens it computes."""
        counts = self.plan.counts
        ended = SequenceState.FINISHED
        out = self.left_out
        return {each: count for each, count in counts.items() if each.state is not ended and each is not out}

    @property
    def may_be_followed(self) -> bool:
        """Whether the next step may be launched before this one is read."""
        if self.error is not None or self.batch is None or self.batch.prompt_rows:
            return False
        if any(each.sampler.constraint is not None or each.sampler.counts is not None for each in self.expected):
            return False
        return not any(each.pinned for each in self.plan.counts)


class StepPipeline:
    """Launches steps, and keeps the one that is in flight.

    Args:
        config: Says whether steps are launched ahead.
        executor: Runs the model.
        scheduler: Plans steps.
        bridge: Announces to the connector what steps compute.
        masks: Computes grammar masks; ``None``: no sequence has a grammar.
        clock: Returns seconds.

    Attributes:
        ahead: Whether a step is launched before the previous one is read. May be changed between steps.
        in_flight: Step that was launched ahead and not read yet; ``None``: none.
        speculator: Returns the speculator; ``None``: no speculative decoding.

    Raises:
        ConfigError: ``async_scheduling`` is ``on`` and not possible here.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        scheduler: Scheduler,
        bridge: ConnectorBridge,
        masks: StepMasks | None,
        speculator: Callable[[], Speculator | None],
        clock: Callable[[], float],
    ) -> None:
        self._executor = executor
        self._scheduler = scheduler
        self._bridge = bridge
        self._masks = masks
        self._clock = clock
        self._drafting = speculator
        self._block_size = config.block_size
        self._read_at = 0.0
        self.in_flight: InFlightStep | None = None
        self.ahead = _goes_ahead(config, executor, speculator())

    def next_step(self) -> InFlightStep | None:
        """Return the step to read next, after launching its successor where possible; ``None``: nothing to do."""
        step = self.in_flight
        self.in_flight = None
        if step is None:
            step = self._launch(self._scheduler.schedule())
        if step is None:
            return None
        if self.ahead and self._drafting() is None and step.may_be_followed:
            self.in_flight = self._launch(self._scheduler.schedule_ahead(), step)
        return self._mark_landed(step)

    def last_step(self) -> InFlightStep | None:
        """Return the step in flight without launching another one; ``None``: none is in flight."""
        step = self.in_flight
        self.in_flight = None
        return None if step is None else self._mark_landed(step)

    def observe_step_time(self, step: InFlightStep) -> None:
        """Record the time of a step that was read, counted from the read of the previous one."""
        now = self._clock()
        seconds = now - max(step.started, self._read_at)
        self._read_at = now
        self._scheduler.observe_step_time(step.plan, seconds)
        if (speculator := self._drafting()) is not None:
            speculator.observe_step_time(step.plan, seconds, step.drafting)

    def _launch(self, plan: StepPlan, before: InFlightStep | None = None) -> InFlightStep | None:
        """Launch a plan, if there is anything in it; ``before`` is the launched step whose tokens it uses."""
        if not plan.counts:
            return None
        step = InFlightStep(plan, self._clock())
        if (speculator := self._drafting()) is not None:
            speculator.add_drafts(plan, self._scheduler)
            step.drafting = self._clock() - step.started
        try:
            self._run(step, before)
        except Exception as error:
            step.error = error
        for sequence, count in plan.counts.items():
            sequence.num_in_flight += count
        for sequence in step.expected:
            sequence.num_expected += 1
        return step

    @torch.inference_mode()
    def _run(self, step: InFlightStep, before: InFlightStep | None) -> None:
        chosen = None
        speculator = self._drafting()
        if before is not None and before.expected and before.sampling is not None:
            chosen = ChosenTokens(before.sampling.token_ids, before.expected)
        hidden_of = () if speculator is None else speculator.hidden_of
        batch = build_batch(step.plan, self._block_size, self._executor.input_buffers, hidden_of, chosen)
        self._bridge.announce_step(step.plan.counts)
        sampling = StepSampling(batch, self._masks, None if speculator is None else speculator.drawn_from)
        try:
            output = self._executor.forward(batch.forward)
        finally:
            sampling.end_masks()
        sampling.choose(output)
        step.batch = batch
        step.output = output
        step.sampling = sampling
        for row, sequence in enumerate(batch.sampled):
            if sequence.num_output + sequence.num_expected + 1 < sequence.max_output:
                step.expected[sequence] = row

    def _mark_landed(self, step: InFlightStep) -> InFlightStep:
        for sequence, count in step.plan.counts.items():
            sequence.num_in_flight -= count
        for sequence in step.expected:
            sequence.num_expected -= 1
        step.blocks = self._bridge.pop_deferred_blocks()
        return step


def _goes_ahead(config: EngineConfig, executor: Executor, speculator: Speculator | None) -> bool:
    """Whether steps are launched before the one before is read; says why not where it was to be expected."""
    wanted = config.async_scheduling
    if wanted == "off" or (wanted == "auto" and config.device.startswith("cpu")):
        return False
    if speculator is not None:
        why = "drafts follow tokens that are known"
    elif not getattr(executor, "takes_chosen", False):
        why = f"executor {config.executor} takes tokens from the host alone"
    else:
        return True
    if wanted == "on":
        raise ConfigError(f"async_scheduling on is not possible: {why}", field="async_scheduling")
    _log.info("steps are not launched ahead: %s", why)
    return False
