"""Runs a transformers model over Baton's paged KV pool, one ragged batch per step, in one process or several."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable

import numpy as np
import torch

from baton.config import EngineConfig
from baton.engine.executor.multiprocess import Team
from baton.engine.models.checkpoint import model_digest, rope_digest
from baton.engine.models.loader import TORCH_DTYPES, LoadedModel
from baton.engine.runner.rank_model import FUSED, GENERIC, PACKED, RankModel, load_whole
from baton.engine.runner.selfcheck import SLACK, TOLERANCE, SelfCheck
from baton.engine.sched.step_plan import ForwardBatch, RunnerLostError
from baton.errors import ConfigError, InternalError
from baton.kv_cache.fingerprint import Fingerprint
from baton.kv_cache.layout import KVLayout
from baton.kv_cache.shards import KVShards, shard_specs

log = logging.getLogger(__name__)


class ModelRunner:
    """A model bound to a KV pool; implements :class:`baton.engine.sched.step_plan.Runner`.

    With ``tp`` or ``pp`` above 1 this process is the leader: it starts the other ranks and ends them in :meth:`close`.

    Attributes:
        layout: Geometry of this process's KV blocks, as the model's layers need it.
        geometry: KV of the whole model.
        shards: The instance's ranks; this process is the first.
        fingerprint: Identity of this model's KV.
        vocab_size: Columns of the logits.
        max_model_len: Longest sequence in tokens.
        eos_token_ids: Tokens that end a sequence.
        attention_backend: Name of the attention operator in use.
        description: Which path, attention and linears run the model, for people.

    Raises:
        ConfigError: The model cannot be loaded, not be served or not be divided; see
            :func:`baton.engine.models.loader.load_model`.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self._on_layer: Callable[[int], None] | None = None
        self.shards = shard_specs(config.tp, config.pp)
        self._team: Team | None = Team(config, self.shards) if len(self.shards) > 1 else None
        try:
            self._load()
        except BaseException:
            self.close()
            raise

    def _load(self) -> None:
        config, team = self.config, self._team
        whole = load_whole(config)
        model, self.geometry, self.max_model_len = whole.model, whole.geometry, whole.max_len
        self.device, self.dtype = model.device, TORCH_DTYPES[model.dtype]
        self.vocab_size = int(model.text_config.vocab_size)
        self.eos_token_ids = model.eos_token_ids
        self.architecture = model.architecture
        self.fingerprint = self._fingerprint(model)
        check = SelfCheck(model, config.block_size)
        self._rank = RankModel(config, whole, None if team is None else team.peers)
        self.layout = self._rank.layout
        self.attention_backend = self._rank.attention_backend
        if team is not None:
            team.wait_loaded(self.max_model_len)
        self._choose_way(model, check)

    def _fingerprint(self, model: LoadedModel) -> Fingerprint:
        """Identity of the whole instance's KV: block_bytes are those of an undivided block."""
        layout = KVLayout(self.geometry.layers, self.config.block_size, self.geometry.dtype)
        found = Fingerprint.of(
            model=self.config.model_name,
            model_digest=model_digest(model.folder, model.files),
            rope=rope_digest(model.text_config.to_dict()),
            layout=layout,
        )
        config = self.config
        return dataclasses.replace(found, tp_size=config.tp, pp_size=config.pp, kv_cast=config.kv_cast)

    def _choose_way(self, model: LoadedModel, check: SelfCheck) -> None:
        """Check transformers' own modules over the paged pool, then use the fastest way that is as exact.

        All ranks together are compared with the model as it was before it was divided.
        """
        error = self._first_error(check)
        if not error < TOLERANCE[model.dtype]:
            raise ConfigError(
                f"{model.architecture} cannot be served: over a paged KV cache its logits differ from its own "
                f"(relative error {error:.2g})",
                field=self._field,
            )
        allowed = 2 * error + SLACK[model.dtype]
        linears, path = self._rank.linears, "transformers' modules"
        if self.config.packed_linears and self._try(FUSED, check, allowed):
            path = "fused decoder"
        elif self._rank.packs and not self._try(PACKED, check, allowed):
            linears = "torch"
        self.description = f"{path}, attention {self.attention_backend}, linears {linears}"
        if self._team is not None:
            self.description += f", tp {self.config.tp}, pp {self.config.pp}"
        log.info("%s: %s", model.architecture, self.description)

    @property
    def _field(self) -> str:
        """What to name in a refusal."""
        return "model" if self._team is None else "tp" if self.config.tp > 1 else "pp"

    def _first_error(self, check: SelfCheck) -> float:
        try:
            return check.error(lambda batch: self._forward(batch, check.num_blocks))
        except RunnerLostError:
            raise
        except InternalError as failure:
            if self._team is None:
                raise
            # Its code counts on the sizes of the whole.
            raise ConfigError(
                f"{self.architecture} cannot be divided: {failure.message}", field=self._field
            ) from failure

    def _try(self, way: str, check: SelfCheck, allowed: float) -> bool:
        """Run the model in another way, on all ranks, if that is possible and the results agree."""
        why = self._use(way)
        if why:
            log.debug("%s: not %s: %s", self.architecture, way, why)
            self._use(GENERIC)
            return False
        try:
            error = check.error(lambda batch: self._forward(batch, check.num_blocks))
        except RunnerLostError:
            raise
        except (AttributeError, TypeError, RuntimeError, InternalError) as failure:
            log.warning("%s: %s is off: a module needs its weights as they are (%s)", self.architecture, way, failure)
        else:
            if error <= allowed:
                return True
            log.warning("%s: %s is off, its logits differ (relative error %.2g)", self.architecture, way, error)
        self._use(GENERIC)
        return False

    def _use(self, way: str) -> str:
        """Change the way on all ranks; returns why it is not possible on one of them."""
        answers = [] if self._team is None else self._team.ask({"do": "use", "way": way})
        return next((why for why in (self._rank.use(way), *(answer["why"] for answer in answers)) if why), "")

    def trial_run(self, num_tokens: int) -> None:
        """Run one prompt of ``num_tokens`` tokens over memory of its own, for its time and memory."""
        blocks = self.layout.num_blocks_for(num_tokens)
        batch = ForwardBatch(
            token_ids=np.arange(num_tokens) % self.vocab_size,
            positions=np.arange(num_tokens),
            query_starts=np.array([0, num_tokens], dtype=np.int32),
            context_lens=np.array([num_tokens], dtype=np.int32),
            block_tables=np.arange(blocks, dtype=np.int32)[None],
            logit_rows=np.array([num_tokens - 1]),
        )
        self._forward(batch, blocks)

    def bind(self, shards: KVShards) -> None:
        """Use arenas of the ranks' layouts as the KV pool.

        Raises:
            ConfigError: The arenas are not one per rank, or their blocks have another size.
        """
        if len(shards.arenas) != len(self.shards):
            raise ConfigError(f"{len(shards.arenas)} arenas for {len(self.shards)} ranks", field="kv_blocks")
        self._rank.bind(shards.primary)
        if self._team is not None:
            self._team.bind(shards)

    @property
    def on_layer(self) -> Callable[[int], None] | None:
        """Called with a layer's index as soon as all ranks of this process's stage have written its KV of a step.

        In the engine's thread, in the middle of a step; layers of later pipeline stages are not reported.
        """
        return self._on_layer

    @on_layer.setter
    def on_layer(self, function: Callable[[int], None] | None) -> None:
        self._on_layer = function
        self._rank.watch_layers(function)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Run one step: write the new tokens' KV into the pool and return logits [R, vocab], float32 or model dtype.

        Args:
            batch: Its arrays must not change until this returns.

        Raises:
            InternalError: No arena is bound, or a rank failed.
            RunnerLostError: A rank is gone.
        """
        return self._forward(batch)

    def _forward(self, batch: ForwardBatch, scratch_blocks: int = 0) -> torch.Tensor:
        if self._team is None:
            return self._rank.run(batch, scratch_blocks)
        return self._team.step(batch, scratch_blocks, self._rank.run)

    def watch(self, on_lost: Callable[[RunnerLostError], None]) -> None:
        """Have a function called, in a thread of its own, when a rank dies; at once if one has."""
        if self._team is not None:
            self._team.watch(on_lost)

    def close(self) -> None:
        """End the other ranks and wait for their end; harmless if repeated."""
        if self._team is not None:
            self._team.close()
