"""Decode steps that are captured once per batch size and replayed: one launch in place of some hundreds.

A step of sequences with one new token each is run with the next larger size that was captured. Rows beyond the batch
are sequences of length 0, which have no KV. What differs from step to step lies in tensors at fixed places, which one
copy from the host fills: tokens, positions, lengths, block tables; the launches are the same for any of them, as
lengths are read on the device. Where the number of drafts was named, steps that verify so many of each sequence are
captured too. Prompts, other drafts and steps whose hidden states are wanted run eagerly, and so does a batch larger
than the largest size.

A recorder keeps what a call launches: CUDA graphs on a GPU. In Triton's interpreter the call itself is made again,
over the same places, so that all but the capture is the same.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from baton.config import EngineConfig
from baton.engine.communicator import Communicator
from baton.engine.device import ComputeDevice, HostStaging, device_failure
from baton.engine.models.fused import FusedDecoder
from baton.engine.models.generic import GenericDecoder
from baton.engine.models.loader import LoadedModel
from baton.engine.runner.input_batch import ForwardBatch, with_chosen
from baton.errors import ConfigError
from baton_kernels.paged_attention import CapturedAttention, LayerPool, PagedAttention

log = logging.getLogger(__name__)

WARM_UP_CALLS = 2
"""Before a capture, which must not compile kernels or make handles of libraries."""
AGREEMENT = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest |difference| / |logits| of a replay from the same step run eagerly."""

READ_NOTHING = ("ngram", "suffix", "draft")
"""Methods of drafting that want no hidden states of the step."""

Replay = Callable[[], torch.Tensor]
"""Makes a step again; returns its logits, at the same place each time."""
Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Any], torch.Tensor]
"""Takes tokens, positions and rows int64 [T], and attention's plan; returns logits [T, vocab]."""


class Recorder(Protocol):
    """Keeps what a call launches on a device."""

    def capture(self, call: Replay) -> Replay:
        """Record a call, which is made some times for that.

        Raises:
            RuntimeError: It does what cannot be recorded.
        """


class CudaGraphRecorder:
    """CUDA graphs, all in one pool of memory: only one of them runs at a time.

    Args:
        device: The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, call: Replay) -> Replay:
        """Capture a graph; see :class:`Recorder`."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UP_CALLS):
                call()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Copies of blocks go on in other threads: their calls are not part of this.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            logits = call()

        def replay() -> torch.Tensor:
            graph.replay()
            return logits

        return replay


class CallRecorder:
    """Stands in for CUDA graphs where there is no GPU: a replay makes the call again."""

    def capture(self, call: Replay) -> Replay:
        """Keep a call; see :class:`Recorder`."""
        logits = call().clone()

        def replay() -> torch.Tensor:
            logits.copy_(call())
            return logits

        return replay


@dataclass(frozen=True, slots=True)
class TableShape:
    """Of block tables.

    Attributes:
        block_size: Tokens per block.
        groups: Layer groups, each with a table of its own.
        width: Blocks of the longest sequence.
    """

    block_size: int
    groups: int
    width: int


class _Step:
    """A captured step of S sequences of as many tokens each, and the places it reads from."""

    def __init__(
        self, size: int, each: int, shape: TableShape, attention: CapturedAttention, device: ComputeDevice
    ) -> None:
        self.size = size
        self._each = each
        tokens = size * each
        table = size * shape.groups * shape.width
        # Tokens, positions, lengths, tables without what is beyond the longest sequence of a step; and the end.
        self._places = np.cumsum([0, 8 * tokens, 8 * tokens, 4 * size, 4 * table]).tolist()
        self._inputs = torch.zeros(self._places[-1], dtype=torch.uint8, device=device.memory)
        self.tokens, self.positions = (self._inputs[at : at + 8 * tokens].view(torch.int64) for at in self._places[:2])
        self.rows = torch.arange(tokens, device=device.memory)
        lens = self._inputs[self._places[2] : self._places[3]].view(torch.int32)
        self._tables = torch.zeros(size, shape.groups * shape.width, dtype=torch.int32, device=device.memory)
        self.plan = attention.prepare_decodes(lens, self._tables, shape.block_size, shape.groups, each)
        self._shape = shape

    @property
    def num_bytes(self) -> int:
        """Bytes of the step's inputs on the device."""
        return self._inputs.nbytes + self._tables.nbytes

    def fill(self, batch: ForwardBatch, tables: npt.NDArray[np.int32], staging: HostStaging) -> None:
        """Put a batch's numbers where the step reads them; ``tables`` int32 [n, G * w]."""
        shape = self._shape
        count = len(batch.context_lens)
        size = self.size
        used = tables.shape[1] // shape.groups
        tokens = np.zeros(size * self._each, np.int64)
        positions = np.zeros(size * self._each, np.int64)
        lens = np.zeros(size, np.int32)
        padded = np.zeros((size, shape.groups, used), np.int32)
        tokens[: len(batch.token_ids)] = batch.token_ids
        positions[: len(batch.token_ids)] = batch.positions
        lens[:count] = batch.context_lens
        padded[:count] = tables.reshape(count, shape.groups, used)
        places = [*self._places[:4], self._places[3] + padded.nbytes]
        staging.copy((tokens, positions, lens, padded), places, self._inputs)
        if batch.chosen is not None:
            self.tokens.copy_(with_chosen(self.tokens, batch.chosen))
        compact = self._inputs[places[3] : places[4]].view(torch.int32).view(padded.shape)
        self._tables.view(size, shape.groups, shape.width)[..., :used].copy_(compact)


class DecodeGraphs:
    """The captured steps of a runner.

    Args:
        device: Device of the runner.
        forward: Forward pass to capture.
        attention: Attention operator of the forward pass.
        shape: Shape of block tables.
        staging: Copies a step's arrays to the device.
        recorder: Records calls; default: CUDA graphs on a GPU, else the call itself.

    Attributes:
        sizes: Captured batch sizes, ascending.
    """

    def __init__(
        self,
        device: ComputeDevice,
        forward: Forward,
        attention: CapturedAttention,
        shape: TableShape,
        staging: HostStaging,
        recorder: Recorder | None = None,
    ) -> None:
        self._device = device
        self._forward = forward
        self._attention = attention
        self._shape = shape
        self._staging = staging
        self._recorder = recorder or (CudaGraphRecorder(device.memory) if device.is_cuda else CallRecorder())
        self._steps: dict[tuple[int, int], tuple[_Step, Replay]] = {}
        self.sizes: list[int] = []

    def capture(self, size: int, each: int = 1) -> None:
        """Capture steps of ``size`` sequences, and compare one with the same step run eagerly.

        It writes to the pool's first blocks, which no sequence holds yet.

        Args:
            size: Number of sequences.
            each: Number of new tokens of each, at most a block of them.

        Raises:
            RuntimeError: The model does what cannot be captured, or a replay gives other logits.
        """
        with torch.inference_mode():
            step = _Step(size, each, self._shape, self._attention, self._device)
            alike = np.ones(size * each, np.int64)  # all sequences write to one place: the same
            first = np.zeros((size, self._shape.groups), np.int32)
            starts = np.arange(size + 1, dtype=np.int32) * each
            places = np.tile(np.arange(each), size)
            batch = ForwardBatch(alike, places, starts, np.full(size, each, np.int32), first, alike)
            step.fill(batch, first, self._staging)

            def call() -> torch.Tensor:
                return self._forward(step.tokens, step.positions, step.rows, step.plan)

            eager = call().clone()
            replay = self._recorder.capture(call)
            again = replay()
            error = float((again - eager).float().norm() / eager.float().norm().clamp_min(1e-20))
            if not error <= AGREEMENT[eager.dtype]:
                raise RuntimeError(
                    f"a replayed step of {size} sequences differs from the same step run eagerly: {error:.2g}"
                )
        self._steps[each, size] = step, replay
        if size not in self.sizes:
            bisect.insort(self.sizes, size)

    def can_run(self, batch: ForwardBatch) -> bool:
        """Whether a step is one that was captured: as many new tokens of each sequence, and their logits alone."""
        count = len(batch.context_lens)
        each, rest = divmod(len(batch.token_ids), count)
        return (
            self._size_for(each, count) > 0
            and not rest
            and len(batch.logit_rows) == count * each
            and (each == 1 or bool((np.diff(batch.query_starts) == each).all()))
            and batch.trees is None
            and not batch.hidden_of
            and int(batch.context_lens.max()) <= self._shape.width * self._shape.block_size
        )

    def _size_for(self, each: int, count: int) -> int:
        """Return the smallest captured size for so many sequences; 0: there is none."""
        at = bisect.bisect_left(self.sizes, count)
        return next((size for size in self.sizes[at:] if (each, size) in self._steps), 0)

    def run(self, batch: ForwardBatch, tables: npt.NDArray[np.int32]) -> torch.Tensor:
        """Replay a step that :meth:`can_run` accepts.

        Args:
            batch: Its arrays may be changed as soon as this returns.
            tables: Its block tables, one for each layer group, int32 [n, G * w].

        Returns:
            Logits [T, vocab], valid until the next step.
        """
        count = len(batch.context_lens)
        tokens = len(batch.token_ids)
        each = tokens // count
        step, replay = self._steps[each, self._size_for(each, count)]
        width = min(tables.shape[1] // self._shape.groups, self._shape.width)
        used = tables.reshape(count, self._shape.groups, -1)[..., :width].reshape(count, -1)
        with torch.inference_mode():
            step.fill(batch, used, self._staging)
            return replay()[:tokens]


def graph_bytes(graphs: DecodeGraphs, sizes: list[int], free: Callable[[], int], widths: tuple[int, ...] = (1,)) -> int:
    """Measure what the steps of all sizes will take beside weights and pool; those captured here are to be dropped.

    Graphs share memory for what is within a step: the largest takes most of it, every other one little.

    Args:
        graphs: Graphs over scratch memory.
        sizes: Batch sizes to capture, ascending.
        free: Returns the free bytes of the device.
        widths: Numbers of new tokens of each sequence, ascending.
    """
    before = free()
    largest, *others = [(size, each) for each in reversed(widths) for size in reversed(sizes)]
    graphs.capture(*largest)
    with_one = free()
    if not others:
        return before - with_one
    graphs.capture(*others[0])
    return max(0, before - with_one) + max(0, with_one - free()) * len(others)


class StepCapture:
    """Makes the captured steps of one runner.

    Args:
        config: Says which sizes.
        model: Model that is run.
        attention: Attention operator of the model.
        staging: Copies a step's arrays to the device.
        communicator: To other ranks, which capture at the same time: sums over them are part of a step.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: LoadedModel,
        attention: PagedAttention,
        staging: HostStaging,
        communicator: Communicator,
    ) -> None:
        self._communicator = communicator
        self.sizes = config.graph_sizes
        self.widths = _widths(config)
        self._named = config.cuda_graphs != ("on",)
        self._model = model
        self._attention = attention
        self._staging = staging

    def capture(
        self, decoder: GenericDecoder | FusedDecoder, pools: list[LayerPool], shape: TableShape
    ) -> tuple[DecodeGraphs | None, str]:
        """Capture all sizes over a pool; return the graphs, or ``None``, and a description for the log.

        Args:
            decoder: Forward pass to capture.
            pools: KV pools of all layers.
            shape: Shape of block tables.

        Raises:
            ConfigError: Sizes that were named cannot be captured, or the device has failed.
        """
        graphs = self._new_graphs(decoder, pools, shape)
        if graphs is None:
            return None, self._without(f"{self._attention.name} attention cannot be captured")
        why = ""
        for each, size in ((each, size) for each in reversed(self.widths) for size in reversed(self.sizes)):
            try:
                graphs.capture(size, each)
            except torch.cuda.OutOfMemoryError:
                if self._communicator.is_alone:
                    log.warning("%s: no memory for captured steps of %d sequences", self._model.architecture, size)
                else:
                    why = f"there is no memory for steps of {size} sequences"
            except RuntimeError as error:
                _refuse_lost(error)
                why = str(error).strip().partition("\n")[0]
            if not self._communicator.all_agree(fine=not why):
                why = why or "another rank could not"
                break
        if why or not graphs.sizes:
            return None, self._without(why or "there is no memory for them")
        sizes = f"graphs of {graphs.sizes[0]} to {graphs.sizes[-1]} sequences ({len(graphs.sizes)} sizes)"
        return graphs, sizes + "".join(f", also with {each - 1} drafts each" for each in self.widths[1:])

    def measure(self, decoder: GenericDecoder | FusedDecoder, pools: list[LayerPool], shape: TableShape) -> int:
        """Return how many bytes of the device all sizes will take, from some that are captured over scratch memory."""
        device = self._model.compute
        graphs = self._new_graphs(decoder, pools, shape)
        if graphs is None or not device.is_cuda:
            return 0

        def free() -> int:
            torch.cuda.synchronize(device.memory)
            torch.cuda.empty_cache()
            return int(torch.cuda.mem_get_info(device.memory)[0])

        try:
            return graph_bytes(graphs, self.sizes, free, self.widths)
        except RuntimeError as error:
            _refuse_lost(error)
            log.warning("captured steps could not be measured: %s", error)  # to capture them will fail alike
            return 0

    def _new_graphs(
        self, decoder: GenericDecoder | FusedDecoder, pools: list[LayerPool], shape: TableShape
    ) -> DecodeGraphs | None:
        attention = self._attention
        if not isinstance(attention, CapturedAttention):
            return None  # its launches depend on what the host knows

        def forward(tokens: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, plan: Any) -> torch.Tensor:
            told = decoder.on_layer
            decoder.on_layer = None
            try:
                return decoder.forward(tokens, positions, rows, plan, pools)[0]
            finally:
                decoder.on_layer = told

        return DecodeGraphs(self._model.compute, forward, attention, shape, self._staging)

    def _without(self, why: str) -> str:
        """Go on without captured steps; returns what is to be said of it."""
        if self._named:
            raise ConfigError(f"cuda_graphs: decode steps cannot be captured: {why}", field="cuda_graphs")
        log.warning("%s: decode steps are not captured: %s", self._model.architecture, why)
        return f"no graphs ({why})"


def _widths(config: EngineConfig) -> tuple[int, ...]:
    """Return the numbers of new tokens of each sequence whose steps are captured, ascending."""
    drafts = config.speculative_tokens
    if drafts is None or config.speculative not in READ_NOTHING or config.speculative_width > 1:
        return (1,)
    each = 1 + drafts
    fits = each <= config.block_size and each * config.max_num_seqs <= config.max_num_batched_tokens
    return (1, each) if fits else (1,)


def _refuse_lost(error: Exception) -> None:
    """Give up if the device has failed: nothing else would go well.

    Raises:
        ConfigError: It has; names ``device``.
    """
    if failure := device_failure(error):
        raise ConfigError(f"the device has failed: {failure}", field="device") from error
