"""The executor of one process, which is also the leader's part of an executor of several.

At load every way to run the model is compared with the model's own attention. Some architectures take another attention
function and still compute something else (ALiBi added elsewhere, state kept between calls, positions counted by the
model itself): they are refused. A faster path is used only if it is as close as transformers' own modules are.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Callable

import numpy as np
import torch

from baton.allocator import return_free_memory
from baton.config import EngineConfig
from baton.engine.communicator import Communicator
from baton.engine.device import rank_device
from baton.engine.executor.base import ExecutorLostError, Quality
from baton.engine.executor.self_check import STORAGE_TOLERANCE, QualityCheck, SelfCheck
from baton.engine.models.checkpoint import model_digest, rope_digest
from baton.engine.models.kv_storage import scales_digest
from baton.engine.models.loader import LoadedModel
from baton.engine.runner.draft_layers import DraftLayers
from baton.engine.runner.input_batch import ForwardBatch, ForwardOutput, InputBuffers, KVMoves
from baton.engine.runner.model_runner import ExecutionPath, ModelRunner, WholeModel, load_whole
from baton.engine.runner.warm_up import warm_up_batches, warm_up_sampling
from baton.errors import ConfigError, InternalError
from baton.kv_cache.fingerprint import Fingerprint
from baton.kv_cache.layout import KVLayout
from baton.kv_cache.shards import KVShards, shard_specs

log = logging.getLogger(__name__)


class InProcessExecutor:
    """Runs rank 0 in this process; implements :class:`baton.engine.executor.base.Executor`."""

    takes_chosen = True

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.shards = shard_specs(config.tp, config.pp)
        self.input_buffers: InputBuffers | None = None
        self.compute = rank_device(config.device, 0, len(self.shards))
        self.communicator = Communicator(self.shards[0], self.compute.memory)
        self._on_layer: Callable[[int], None] | None = None
        self.quality: Quality | None = None

    def load(self) -> None:
        """Load the model and choose how to run it."""
        if len(self.shards) > 1:
            raise ConfigError("executor in_process runs one rank: tp and pp need multiprocess", field="executor")
        self._load()

    def _load(self) -> None:
        """Load rank 0, and choose how to run the model once the other ranks are there."""
        config = self.config
        whole = load_whole(config)
        model = whole.model
        self.geometry = whole.geometry
        self.max_model_len = whole.max_len
        self.device = self.compute.memory
        self.vocab_size = int(model.text_config.vocab_size)
        self.eos_token_ids = model.eos_token_ids
        self.architecture = model.architecture
        self.fingerprint = self._fingerprint(whole)
        return_free_memory()
        check = SelfCheck(whole, config.block_size)
        return_free_memory()
        quality = QualityCheck(whole, config.model, config.block_size)
        return_free_memory()
        self._runner = ModelRunner(config, whole, self.communicator)
        self.layout = self._runner.layout
        self.state_blocks = -(-self._runner.state_bytes // self.layout.block_bytes)
        self.attention_backend = self._runner.attention_backend
        self._join_ranks()
        self._choose_path(whole, check)
        if self.geometry.dtype != model.dtype:
            self._check_storage(check, model)
        self.quality = quality.measure(self._logits)
        if self.quality is not None:
            self.description += f", {self.quality}"
        return_free_memory()
        log.info("%s: %s", self.architecture, self.description)

    def _join_ranks(self) -> None:
        """Wait for the other ranks; called before anything is run."""

    def _fingerprint(self, whole: WholeModel) -> Fingerprint:
        """Identity of the whole instance's KV: block_bytes are those of an undivided block."""
        config = self.config
        model = whole.model
        groups = whole.groups
        layout = KVLayout(self.geometry.layers, config.block_size, self.geometry.dtype)
        fingerprint = Fingerprint.of(
            model=config.model_name,
            model_digest=model_digest(model.folder, model.files) + model.identity,
            rope=rope_digest(model.text_config.to_dict()),
            layout=layout,
        )
        return dataclasses.replace(
            fingerprint,
            tp_size=config.tp,
            pp_size=config.pp,
            kv_cast=config.kv_cast,
            kv_scales=scales_digest(whole.scales),
            unsplit_layers=tuple(sorted(self.geometry.unsplit)),
            layer_groups=dataclasses.replace(layout, groups=groups).group_of if groups else (),
            states=whole.recurrent.identity(layout.block_bytes) if whole.recurrent is not None else "",
        )

    def _choose_path(self, whole: WholeModel, check: SelfCheck) -> None:
        """Check transformers' own modules over the paged pool, then use the fastest path that is as exact.

        All ranks together are compared with the model as it was before it was divided.
        """
        model = whole.model
        error = self._generic_error(check)
        return_free_memory()
        if not error < check.tolerance:
            field = self._refused_field
            figures = f"attention {self.attention_backend}, relative error {error:.2g}"
            if len(self.shards) > 1:
                why = f"cannot be divided over {field}: its logits differ from those of the whole"
            else:
                why = f"cannot be served: {check.explain(whole)}"
            raise ConfigError(f"{model.architecture} {why} ({figures})", field=field)
        linears = self._runner.linears
        path = "transformers' modules"
        packs = True
        if self.config.packed_linears and self._try_path(ExecutionPath.FUSED, check):
            path = "fused decoder"
        elif not self._runner.packs or not self._try_path(ExecutionPath.PACKED, check):
            linears = "torch" if self._runner.packs else linears
            packs = False
        self.description = f"{path}, attention {self.attention_backend}, linears {linears}"
        if quantized := self._runner.describe_quantized(packs=packs):
            self.description += f", {quantized}"
        if len(self.shards) > 1:
            self.description += f", tp {self.config.tp}, pp {self.config.pp}"
        if model.compute.on_gpu:
            self.description += f", device {self.config.device}"

    def _check_storage(self, check: SelfCheck, model: LoadedModel) -> None:
        """Compare with KV in the model's dtype; what KV of fewer bits changes is said, and must not be all.

        Raises:
            ConfigError: It changes too much; names ``kv_dtype``.
        """
        kind = self.geometry.dtype
        error = check.storage_error(self._logits, functools.partial(self._logits, stored=True))
        allowed = STORAGE_TOLERANCE[kind.partition(";")[0]]
        if not error < allowed:
            raise ConfigError(
                f"{model.architecture}: with KV of {kind} its logits differ by {error:.2g} from those with KV of "
                f"{model.dtype}, more than {allowed:g}",
                field="kv_dtype",
            )
        self.description += f", KV {kind}"
        log.info("%s: KV of %s changes logits by %.2g (relative, of most tokens)", model.architecture, kind, error)

    @property
    def _refused_field(self) -> str:
        """The field to name when the self-check fails."""
        if self._runner.attention_is_foreign:
            return "attention_backend"
        return "model" if len(self.shards) == 1 else "tp" if self.config.tp > 1 else "pp"

    def _generic_error(self, check: SelfCheck) -> float:
        try:
            return check.generic_error(self._logits)
        except (ConfigError, ExecutorLostError):
            raise
        except Exception as failure:
            reason = str(failure).strip().partition("\n")[0] or type(failure).__name__
            if len(self.shards) > 1:  # its code counts on the sizes of the whole
                field = self._refused_field
                why = f"cannot be divided over {field}: its code counts on the whole ({reason})"
                raise ConfigError(f"{self.architecture} {why}", field=field) from failure
            raise ConfigError(
                f"{self.architecture} cannot be served: its code fails over a paged KV cache, for which no masks are "
                f"made ({type(failure).__name__}: {reason})",
                field=self._refused_field,
            ) from failure

    def _try_path(self, path: ExecutionPath, check: SelfCheck) -> bool:
        """Run the model on another path, on all ranks, if that is possible and the results agree."""
        if path is ExecutionPath.FUSED and self._runner.may_fuse:
            check.keep_far(self._logits)
        why = self._use_path(path)
        if why:
            log.debug("%s: not %s: %s", self.architecture, path, why)
            self._use_path(ExecutionPath.GENERIC)
            return False
        try:
            differs = check.agrees(self._logits)
        except ExecutorLostError:
            raise
        except (AttributeError, TypeError, RuntimeError, InternalError) as failure:
            log.warning("%s: %s is off: a module needs its weights as they are (%s)", self.architecture, path, failure)
        else:
            if not differs:
                return True
            log.warning("%s: %s is off, its logits differ (%s)", self.architecture, path, differs)
        self._use_path(ExecutionPath.GENERIC)
        return False

    def _use_path(self, path: ExecutionPath) -> str:
        """Change the path on all ranks; returns why it is not possible on one of them, or an empty text."""
        return self._runner.use(path)

    def trial_run(self, num_tokens: int) -> None:
        blocks = self.layout.num_blocks_for(num_tokens)
        batch = ForwardBatch(
            token_ids=np.arange(num_tokens) % self.vocab_size,
            positions=np.arange(num_tokens),
            query_starts=np.array([0, num_tokens], dtype=np.int32),
            context_lens=np.array([num_tokens], dtype=np.int32),
            block_tables=np.arange(blocks, dtype=np.int32)[None],
            logit_rows=np.array([num_tokens - 1]),
            state_slots=np.zeros(1, np.int32),
        )
        self._run(batch, blocks)

    def bind(self, shards: KVShards) -> None:
        if len(shards.arenas) != len(self.shards):
            raise ConfigError(f"{len(shards.arenas)} arenas for {len(self.shards)} ranks", field="kv_blocks")
        self.compute.enter()
        captured = self._runner.bind(shards.primary)
        if captured:
            self.description += f", {captured}"
            log.info("%s: %s", self.architecture, captured)

    def warm_up(self) -> None:
        if not self.compute.on_gpu:
            return
        from baton_kernels.gpu.tuning import token_bounds

        begin = time.perf_counter()
        for batch in warm_up_batches(self.config, self.max_model_len, token_bounds(self.device)):
            output = self._run(batch)
        warm_up_sampling(output.logits, self.config)
        log.info("%s: kernels compiled in %.1f s", self.architecture, time.perf_counter() - begin)

    def graph_bytes(self) -> int:
        self.compute.enter()
        return self._runner.graph_bytes()

    def peak_bytes(self, num_tokens: int) -> list[int]:
        if not self.compute.is_cuda:
            raise InternalError("the memory of a step is measured on GPUs alone")
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        self.trial_run(num_tokens)
        return [int(torch.cuda.max_memory_allocated(self.device)) - before]

    @property
    def on_layer(self) -> Callable[[int], None] | None:
        return self._on_layer

    @on_layer.setter
    def on_layer(self, function: Callable[[int], None] | None) -> None:
        self._on_layer = function
        self._runner.watch_layers(function)

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        return self._run(batch)

    @property
    def why_no_trees(self) -> str:
        return self._runner.why_no_trees

    def move_kv(self, moves: KVMoves) -> None:
        self.compute.enter()
        self._runner.move_kv(moves)

    def _run(
        self, batch: ForwardBatch, scratch_blocks: int = 0, offset: int = 0, *, stored: bool = False
    ) -> ForwardOutput:
        self.compute.enter()  # whatever thread this is: tokens are chosen in it, too
        return self._runner.run(batch, scratch_blocks, offset, stored=stored)

    def _logits(self, batch: ForwardBatch, scratch_blocks: int, offset: int, *, stored: bool = False) -> torch.Tensor:
        return self._run(batch, scratch_blocks, offset, stored=stored).logits

    def add_draft_layers(self, layers: DraftLayers) -> bool:
        """Have blocks hold a drafter's layers too, before there is a pool; ``False``: they hold layer groups."""
        if self.layout.num_groups > 1:
            return False
        self.fingerprint = self.fingerprint.with_draft(layers.draft, layers.shapes, layers.dtype)
        self.geometry = self.fingerprint.geometry
        self.layout = self._runner.add_draft_layers(layers, self.geometry)
        return True

    @property
    def model(self) -> LoadedModel:
        """The model as it was loaded."""
        return self._runner.model

    def watch(self, on_lost: Callable[[ExecutorLostError], None]) -> None: ...

    def close(self) -> None: ...
