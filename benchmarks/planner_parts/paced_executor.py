"""An executor whose steps take a known time: the real model runs, and what is left of the time is slept.

Steps on a machine whose cores several instances share take what the others leave; nothing that is planned can be
compared with them. These take their pace as long as the model is faster, and each layer's KV is there when its
share of the time is over. ``--executor paced`` finds it by the entry point ``baton.executors``.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from baton.engine.executor.in_process import InProcessExecutor
from baton.engine.runner.input_batch import ForwardBatch, ForwardOutput
from baton_bench.simulator.profile import DecodeCost, EngineProfile, PrefillCost

PACE = EngineProfile(
    tp=1,
    pp=1,
    prefill=PrefillCost(fixed_s=0.008, per_token_s=7e-4, per_pair_s=1e-6),
    decode=DecodeCost(fixed_s=0.03, per_context_s=6e-6, per_sequence_s=2.5e-3),
    kv_tokens=0,
    overlap=0.5,
)
"""What a step takes."""
AGENTS_PACE = EngineProfile(
    tp=1,
    pp=1,
    prefill=PrefillCost(fixed_s=0.008, per_token_s=2e-4, per_pair_s=1e-7),
    decode=DecodeCost(fixed_s=0.015, per_context_s=1e-6, per_sequence_s=1e-3),
    kv_tokens=0,
    overlap=0.5,
)
"""What a step takes where contexts are long."""


class PacedExecutor(InProcessExecutor):
    """Runs the model in one process, no faster than its pace."""

    pace = PACE
    late = 0
    """Steps that took longer than they should have."""

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        """Run one step; returns when its time is over."""
        began = time.perf_counter()
        counts = np.diff(batch.query_starts)
        contexts = batch.context_lens.astype(np.int64)
        decodes = (counts == 1) & (contexts > 1)
        tokens = counts[~decodes]
        context = contexts[~decodes]
        pairs = float((tokens * (context - tokens + 0.5 * tokens)).sum())
        self._began = began
        self._seconds = self.pace.step_s(int(decodes.sum()), int(contexts[decodes].sum()), int(tokens.sum()), pairs)
        output = super().forward(batch)
        self._wait(1.0)
        return output

    def _wait(self, share: float) -> None:
        left = self._began + share * self._seconds - time.perf_counter()
        if left > 0:
            time.sleep(left)
        elif share == 1.0:
            self.late += 1

    @property
    def on_layer(self) -> Callable[[int], None] | None:
        """Called with a layer's index when its share of the step's time is over."""
        return self._on_layer

    @on_layer.setter
    def on_layer(self, function: Callable[[int], None] | None) -> None:
        self._on_layer = function
        layers = len(self.geometry.layers)

        def paced(layer: int) -> None:
            self._wait((layer + 1) / (layers + 1))
            if function is not None:
                function(layer)

        self._runner.watch_layers(None if function is None else paced)


class PacedAgentsExecutor(PacedExecutor):
    """Runs the model in one process, no faster than :data:`AGENTS_PACE`."""

    pace = AGENTS_PACE
