"""Scheduler side of the KV connector: which sequences load, and which blocks are held for readers or being saved."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace

from baton.engine.sequence import Sequence
from baton.kv_cache.block_pool import BlockPool
from baton.kv_cache.connector import GuardedConnector, KVConnector, LoadPlan, LoadRequest, LoadUpdate, PlannedSave
from baton.types import BlockId, FinishReason, RequestId

_log = logging.getLogger(__name__)


class ConnectorBridge:
    """Calls the connector and tracks the blocks that it uses; does nothing without one.

    An error of the connector costs a load or a save, and never a request or the engine.

    Attributes:
        loading: Sequences whose blocks are being written from outside, by request id; also aborted ones, until the
            connector says that their last write has ended.
        held: Blocks of ended requests that the connector still offers to others.
        saving: Blocks of other ended sequences that the connector has not saved yet, by the name it knows them by.
        deferred_blocks: Blocks that were given up while a launched step may still use them: one reference each,
            released when that step has been read.
    """

    def __init__(self, connector: KVConnector | None, pool: BlockPool, block_size: int) -> None:
        self._connector = None if connector is None else GuardedConnector(connector)
        self._pool = pool
        self._block_size = block_size
        self.loading: dict[RequestId, Sequence] = {}
        self.held: dict[RequestId, list[BlockId]] = {}
        self.saving: dict[RequestId, list[BlockId]] = {}
        self.deferred_blocks: list[BlockId] = []

    @property
    def on_layer(self) -> Callable[[int], None] | None:
        """Called with the index of each computed layer; ``None`` without a connector."""
        return None if self._connector is None else self._connector.layer_computed

    @property
    def pending(self) -> bool:
        """Whether loads, reads or saves are in progress, so that polling makes sense."""
        if self.loading or self.held or self.saving:
            return True
        return self._connector is not None and self._connector.has_pending()

    def may_load(self, sequence: Sequence) -> bool:
        """Whether :meth:`plan_load` would ask the connector for a sequence."""
        alone = sequence.index or sequence.wants_prompt_logprobs
        return self._connector is not None and not alone

    def plan_load(self, sequence: Sequence, num_local: int) -> LoadPlan | None:
        """Ask the connector how many tokens of a sequence it could load.

        Asked at each admission: after a preemption the prefill instance may still have the blocks. If the connector
        fails, the prompt is computed locally and the request's metrics say so.
        """
        if self._connector is None or not self.may_load(sequence):
            return None
        try:
            return self._connector.plan_load(self._load_request(sequence), num_local)
        except Exception as error:
            self._note_failure(sequence, error)
            return None

    def start_load(self, sequence: Sequence, num_local: int) -> bool:
        """Start a load into a sequence's blocks; return whether it started."""
        if self._connector is None:
            return False
        try:
            blocks = sequence.blocks_to_load(self._block_size)
            self._connector.start_load(self._load_request(sequence), num_local, blocks)
        except Exception as error:
            self._note_failure(sequence, error)
            return False
        self.loading[sequence.group.request.request_id] = sequence
        return True

    def defer_release(self, sequence: Sequence, blocks: list[BlockId]) -> None:
        """Keep a reference to blocks that a sequence gives up until the launched step that may use them is read."""
        if sequence.num_in_flight:
            self._pool.acquire(blocks)
            self.deferred_blocks += blocks

    def pop_deferred_blocks(self) -> list[BlockId]:
        """Return the deferred blocks, which the caller has to release."""
        blocks = self.deferred_blocks
        self.deferred_blocks = []
        return blocks

    def cancel_load(self, sequence: Sequence) -> None:
        """Stop a load; the sequence stays in :attr:`loading` until its update comes."""
        if self._connector is not None:
            self._connector.cancel_load(sequence.group.request.request_id)

    def poll_loads(self) -> list[tuple[Sequence, LoadUpdate]]:
        """Return the finished loads, and release blocks whose readers or savers are done."""
        if self._connector is None:
            return []
        ended = []
        for update in self._connector.poll_loads():
            sequence = self.loading.pop(update.request_id, None)
            if sequence is not None:
                ended.append((sequence, update))
        for request_id in self._connector.poll_releases():
            self.release(request_id)
            self.stop_saving(request_id)
        return ended

    def announce_step(self, counts: Mapping[Sequence, int]) -> None:
        """Announce to the connector what the next step computes of prompts that other instances may fetch.

        Args:
            counts: New tokens per sequence.
        """
        if self._connector is None:
            return
        saves = [self._planned_save(sequence, count) for sequence, count in counts.items() if sequence.pinned]
        if saves:
            self._connector.step_begins(saves)

    def _planned_save(self, sequence: Sequence, count: int) -> PlannedSave:
        request = sequence.group.request
        done = sequence.num_launched
        return PlannedSave(
            request.request_id,
            tuple(sequence.block_ids),
            done + count,
            num_computed=done,
            hashes=tuple(sequence.hash_blocks(done + count, self._block_size)),
            tenant=request.tenant,
        )

    def save_computed(self, sequence: Sequence) -> None:
        """Tell the connector which blocks of a sequence are computed, so that it can save them."""
        connector = self._following_connector(sequence)
        if connector is None:
            return
        done = sequence.num_computed
        hashes = tuple(sequence.hash_blocks(done, self._block_size))
        tenant = sequence.group.request.tenant
        if tenant is not None:
            connector.blocks_belong(_connector_id(sequence), tenant)
        blocks = (*sequence.block_ids, *sequence.state_blocks)
        connector.blocks_computed(_connector_id(sequence), blocks, hashes, done)

    def release_finished(self, sequence: Sequence) -> None:
        """Release a finished sequence's blocks, or hold them while the connector needs them."""
        connector = self._following_connector(sequence)
        held = False
        if connector is not None:
            if not sequence.pinned and sequence.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                self.save_computed(sequence)  # with what it generated
            held = connector.request_finished(_connector_id(sequence))
        blocks = sequence.pop_blocks()
        self.defer_release(sequence, blocks)
        if not held:
            self._pool.release(blocks)
        elif sequence.pinned:
            self.held[_connector_id(sequence)] = blocks
        else:
            self.stop_saving(_connector_id(sequence))  # of an earlier sequence of that name
            self.saving[_connector_id(sequence)] = blocks

    def release(self, request_id: RequestId) -> bool:
        """Release the blocks held for a request; return whether there were any."""
        return self._release_blocks(self.held, request_id)

    def stop_saving(self, request_id: RequestId) -> bool:
        """Release blocks that are being saved, whose copies notice by the generation; return whether there were any."""
        return self._release_blocks(self.saving, request_id)

    def _release_blocks(self, blocks_of: dict[RequestId, list[BlockId]], request_id: RequestId) -> bool:
        blocks = blocks_of.pop(request_id, None)
        if blocks is None:
            return False
        self._pool.release(blocks)
        return True

    def _following_connector(self, sequence: Sequence) -> KVConnector | None:
        connector = self._connector
        return connector if connector is not None and (sequence.pinned or connector.follows_all) else None

    def _load_request(self, sequence: Sequence) -> LoadRequest:
        group = sequence.group
        request = group.request
        prefilled = request.prefilled
        candidates = request.candidates
        if sequence.num_preemptions and prefilled is not None:  # claimed before: it is computed again there
            where = prefilled.address
            prefilled = None
            candidates = (where, *(address for address in candidates if address != where))
        return LoadRequest(
            request_id=request.request_id,
            token_ids=sequence.tokens.tolist(),
            num_output_tokens=sequence.num_output,
            sampling=group.sampling,
            hashes=tuple(sequence.hash_blocks(sequence.num_tokens, self._block_size)),
            candidates=candidates,
            threshold=request.threshold,
            cache_salt=request.cache_salt,
            priority=request.priority,
            tenant=request.tenant,
            session_key=request.session_key,
            retention_s=request.retention_s,
            prefilled=prefilled,
            adapter=request.adapter,
            traceparent=request.traceparent,
        )

    def _note_failure(self, sequence: Sequence, error: Exception) -> None:
        group = sequence.group
        _log.exception(
            "connector failed for request %s: prefilling locally",
            group.request.request_id,
            extra={"request_id": group.request.request_id},
        )
        group.transfer = replace(group.transfer, local_reason=f"connector: {error}")


def _connector_id(sequence: Sequence) -> RequestId:
    """What a connector knows a sequence by: its request's id, of which the ``n`` sequences need one each."""
    request_id = sequence.group.request.request_id
    return RequestId(f"{request_id}#{sequence.index}") if sequence.index else request_id
