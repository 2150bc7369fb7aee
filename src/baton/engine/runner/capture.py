"""Captures a model's decode steps at start: all sizes that are wanted, or none, and says which."""

from __future__ import annotations

import logging
from typing import Any

import torch

from baton.config import EngineConfig
from baton.engine.communicator import Communicator
from baton.engine.device.compute import device_failure
from baton.engine.device.staging import HostStaging
from baton.engine.models.fused import FusedDecoder
from baton.engine.models.generic import GenericDecoder
from baton.engine.models.loader import LoadedModel
from baton.engine.runner.decode_graphs import DecodeGraphs, TableShape, graph_bytes
from baton.errors import ConfigError
from baton_kernels.paged_attention import CapturedAttention, LayerPool, PagedAttention

log = logging.getLogger(__name__)


class StepCapture:
    """Makes the captured steps of one runner.

    Args:
        config: Says which sizes.
        model: What is run.
        attention: Its attention.
        staging: Takes a step's numbers to the device.
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
        self.sizes, self._named = config.graph_sizes, config.cuda_graphs != ("on",)
        self._model, self._attention, self._staging = model, attention, staging

    def capture(
        self, decoder: GenericDecoder | FusedDecoder, pools: list[LayerPool], shape: TableShape
    ) -> tuple[DecodeGraphs | None, str]:
        """Capture all sizes over a pool; returns them, or nothing, and what is to be said of it.

        Args:
            decoder: What is captured.
            pools: Of all layers.
            shape: Of block tables.

        Raises:
            ConfigError: Sizes that were named cannot be captured, or the device has failed.
        """
        graphs = self._new(decoder, pools, shape)
        if graphs is None:
            return None, self._without(f"{self._attention.name} attention cannot be captured")
        why = ""
        for size in reversed(self.sizes):
            try:
                graphs.capture(size)
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
        return graphs, f"graphs of {graphs.sizes[0]} to {graphs.sizes[-1]} sequences ({len(graphs.sizes)} sizes)"

    def measure(self, decoder: GenericDecoder | FusedDecoder, pools: list[LayerPool], shape: TableShape) -> int:
        """Return how many bytes of the device all sizes will take, from some that are captured over scratch memory."""
        device = self._model.compute
        graphs = self._new(decoder, pools, shape)
        if graphs is None or not device.is_cuda:
            return 0

        def free() -> int:
            torch.cuda.synchronize(device.memory)
            torch.cuda.empty_cache()
            return int(torch.cuda.mem_get_info(device.memory)[0])

        try:
            return graph_bytes(graphs, self.sizes, free)
        except RuntimeError as error:
            _refuse_lost(error)
            log.warning("captured steps could not be measured: %s", error)  # to capture them will fail alike
            return 0

    def _new(
        self, decoder: GenericDecoder | FusedDecoder, pools: list[LayerPool], shape: TableShape
    ) -> DecodeGraphs | None:
        attention = self._attention
        if not isinstance(attention, CapturedAttention):
            return None  # its launches depend on what the host knows

        def forward(tokens: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, plan: Any) -> torch.Tensor:
            told, decoder.on_layer = decoder.on_layer, None
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


def _refuse_lost(error: Exception) -> None:
    """Give up if the device has failed: nothing else would go well.

    Raises:
        ConfigError: It has; names ``device``.
    """
    if failure := device_failure(error):
        raise ConfigError(f"the device has failed: {failure}", field="device") from error
