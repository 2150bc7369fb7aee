"""What one rank computes of a model."""

from __future__ import annotations

from dataclasses import dataclass

from baton.engine.attention.transformers_hook import Probe
from baton.engine.models.loader import LoadedModel
from baton.engine.executor.peers import Peers
from baton.engine.models.pipeline import keep_stage
from baton.engine.models.tensor_parallel import rank_attention, split_tensors
from baton.kv_cache.shards import ShardSpec, layer_range
from baton_kernels.paged_attention import AttentionSpec


@dataclass(frozen=True, slots=True)
class Share:
    """A rank's layers and heads.

    Attributes:
        specs: Attention of its layers, with its heads, by the id of the module.
        first_layer: Index of the first of them in the whole model.
        peers: The other ranks; ``None`` if there are none.
    """

    specs: dict[int, AttentionSpec]
    first_layer: int = 0
    peers: Peers | None = None


def cut(model: LoadedModel, found: Probe, peers: Peers | None) -> Share:
    """Cut a whole model down, in place, to what this process computes of it.

    Args:
        model: As it was loaded.
        found: Its attention.
        peers: The other ranks; ``None``: all of it stays.

    Raises:
        ConfigError: It cannot be divided so; names ``tp`` or ``pp``.
    """
    if peers is None:
        return Share(found.specs)
    shard: ShardSpec = peers.spec
    layers = layer_range(len(found.specs), shard.pp_size, shard.pp_rank)
    # Ids of the other layers' modules, which end here, may be given to new objects.
    whole = {module: spec for index, (module, spec) in enumerate(found.specs.items()) if index in layers}
    specs = {module: rank_attention(spec, shard) for module, spec in whole.items()}
    keep_stage(model, layers, peers)
    split_tensors(model, whole, shard, peers.reduce)
    return Share(specs, layers.start, peers)
