"""Cuts a loaded model down to the layers of one pipeline stage.

transformers' forward stays as it is: layers of other stages pass their input on, the first layer of a stage takes the
hidden states of the stage before, and the last one sends its own to the stage after.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import nn

from baton.engine.models.loader import LoadedModel
from baton.engine.communicator import Communicator
from baton.errors import ConfigError


def keep_stage(model: LoadedModel, layers: range, communicator: Communicator) -> None:
    """Drop, in place, what this rank's stage does not compute.

    Args:
        model: The whole model.
        layers: Those of the stage.
        communicator: Where hidden states come from and go to.

    Raises:
        ConfigError: The architecture cannot be cut into stages; names ``pp``.
    """
    if not communicator.has_head:
        # A layer without weights: logits that are not asked for cost nothing.
        model.module.set_output_embeddings(_NoHead())
    if communicator.spec.pp_size == 1:
        return
    base, norm = model.module.base_model, _check_plan(model)
    if not communicator.is_first_stage:
        model.module.set_input_embeddings(_NoEmbedding(model.text_config.hidden_size, model.module.dtype))
    if not communicator.is_last_stage:
        setattr(base, norm, nn.Identity())
    for index, layer in enumerate(base.layers):
        if index not in layers:
            _empty(layer)
    if not communicator.is_first_stage:
        base.layers[layers.start].register_forward_pre_hook(_Receive(communicator), with_kwargs=True)
    if not communicator.is_last_stage:
        base.layers[layers.stop - 1].register_forward_hook(_Send(communicator))


def _check_plan(model: LoadedModel) -> str:
    """Check that only hidden states go from layer to layer; return the name of the norm after them."""
    plan = dict(getattr(model.text_config, "base_model_pp_plan", None) or {})
    layers = plan.get("layers")
    known = {"hidden_states", "attention_mask"}
    base = model.module.base_model
    after = list(plan)[list(plan).index("layers") + 1 :] if layers else []
    if not layers or not set(layers[0]) <= known or layers[1] != ["hidden_states"] or len(after) != 1:
        raise ConfigError(
            f"{model.architecture} cannot be divided into pp stages: transformers has no plan for it", field="pp"
        )
    if not isinstance(getattr(base, "layers", None), nn.ModuleList) or not hasattr(base, after[0]):
        raise ConfigError(f"{model.architecture} cannot be divided into pp stages: no list of layers", field="pp")
    return str(after[0])


def _empty(layer: nn.Module) -> None:
    """Make a layer of another stage pass its input on. Its attributes stay: some models read them in their loop."""
    for name, _ in list(layer.named_children()):
        delattr(layer, name)
    layer.forward = types.MethodType(_pass_on, layer)


def _pass_on(_: nn.Module, hidden_states: torch.Tensor, *__: Any, **___: Any) -> torch.Tensor:
    return hidden_states


class _NoEmbedding(nn.Module):
    """Stands in for the embedding on later stages: zeros of the right shape, whatever the model does with them."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self._width, self._dtype = width, dtype

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Take tokens [1, T], return zeros [1, T, width] without memory behind them."""
        return torch.zeros((), dtype=self._dtype).expand(*tokens.shape, self._width)


class _NoHead(nn.Module):
    """Stands in for the head on ranks that give no logits."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Take hidden [1, R, width], return [1, R, 0]."""
        return hidden[..., :0]


class _Receive:
    """Gives a stage's first layer what the stage before computed."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        like = args[0] if args else kwargs["hidden_states"]
        hidden = self._communicator.receive_hidden(like.shape, like.dtype)
        return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})


class _Send:
    """Sends what a stage's last layer computed to the stage after."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator

    def __call__(self, _: nn.Module, __: tuple[Any, ...], output: torch.Tensor) -> None:
        self._communicator.send_hidden(output)
