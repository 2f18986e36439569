"""Checks of a model on the meta device: what a class of the user's own must define, and what the data asks of it."""

import json

import torch

from titanlite.checkpoint.difference import selected, to_globs
from titanlite.models.base import Model, added_parameters, initial_values, unique_parameters
from titanlite.models.decoder import Decoder
from titanlite.models.registry import ModelSpec
from titanlite.models.trial import check_buffers, check_causal
from titanlite.ops import pick_kernels
from titanlite.ops.hash_random import random_bits, salt
from titanlite.optim.groups import parameter_groups
from titanlite.optim.quantized import block_size_of, is_quantized_size
from titanlite.optim.registry import constructor_options, find_optimizer_cls
from titanlite.runtime.errors import ConfigError, Problem, UserError
from titanlite.schema import Checkpoint, Config
from titanlite.state import model_state
from titanlite.techniques import used


def check_own_model(spec: ModelSpec, model: Model, *, predicts_next: bool) -> None:
    """Check that a model of the user's own defines all its methods and gives every parameter and buffer a value.

    Args:
        model: on the meta device.
        predicts_next: whether the loss is that of the next token, which the model must not see.

    Raises:
        UserError: a method is missing, `init_weight` fails or returns no distribution, `init_buffers` leaves a buffer
            without a value, or the model sees the tokens that it is to predict.
    """
    name = type(model).__name__
    for method in ("forward", "init_weight", "flops_per_token"):
        if getattr(type(model), method) is getattr(Model, method):
            raise UserError(f"{name} does not define {method}: see docs/add_a_model.md")
    for name, parameter in unique_parameters(model):
        values = initial_values(model, name, parameter.shape)
        indices = torch.arange(min(parameter.numel(), 1000))
        try:
            found = values.values(random_bits(salt(name), indices), indices)
            assert found.shape == indices.shape
            assert found.isfinite().all()
        except Exception as error:  # code of the user's own may raise anything
            reason = "" if isinstance(error, AssertionError) else f": {type(error).__name__}: {error}"
            kind = type(values).__name__
            raise UserError(f"{kind}.values must return a finite number for each index of {name}{reason}") from error
    check_buffers(spec)
    if predicts_next:
        check_causal(spec)


def check_attention(model: Model, config: Config, device: torch.device) -> None:
    """Ask PyTorch for the backend of attention. It depends on dtype, head dim, mask and GPU.

    Raises:
        UserError: the backend that the config names is not available.
    """
    if device.type == "cuda" and isinstance(model, Decoder):
        kernels = pick_kernels(device, attention_backend=config.training.attention_backend)
        model.attention_backend(kernels, config, device)


def check_exports(config: Checkpoint, model: Model | None) -> None:
    """Check that Hugging Face's format has a place for each tensor of a model that the run exports at its end.

    Args:
        model: None if it is unknown.

    Raises:
        ConfigError: the format is unknown, has no place for a tensor that `export_drop` does not name, or has one for
            a tensor that it names.
    """
    if not config.last_save_in_hf or model is None:
        return
    key = "checkpoint.last_save_in_hf"
    if (form := model.formats.hugging_face) is None:
        reason = f"{type(model).__name__} has no table of Hugging Face's names: give it `formats`"
        raise ConfigError([Problem(key, f"{reason} (docs/add_a_model.md)")])
    state = model_state(model)
    known = added_parameters(model)  # PEFT's format has a place for adapters
    if needed := to_globs(name for name in state if selected(name, config.export_drop) and form.tensors.find(name)):
        reason = (
            f"{form.architecture} needs {', '.join(needed[:3])}: only tensors without a place there can be left out"
        )
        raise ConfigError([Problem("checkpoint.export_drop", reason)])
    lost = [name for name in state if name not in known and not form.tensors.find(name)]
    if globs := to_globs(name for name in lost if not selected(name, config.export_drop)):
        fix = f"checkpoint.export_drop = {json.dumps([*config.export_drop, *globs])}"
        reason = f"{form.architecture} has no place for {', '.join(globs)}"
        raise ConfigError([Problem(key, f"{reason}: to export without, set {fix}")])


def check_quantized_moments(model: Model, config: Config, world_size: int) -> None:
    """Check that no moments in 8 or 4 bits are of parameters that further axes of the mesh shard by columns.

    Args:
        config: its optimizer has passed `check_optimizer`.

    Raises:
        UserError: a parameter has such moments.
    """
    optimizer, columns = config.optimizer, dict[str, tuple[str, int]]()
    for technique in used(config):
        columns |= technique.column_shards(config, model, world_size)
    for group in parameter_groups(optimizer, model):
        optimizer_cls = find_optimizer_cls(group.name)
        block_size = block_size_of(optimizer_cls, constructor_options(optimizer_cls, optimizer, group.args))
        for name in group.parameters if block_size else ():
            axis, shards = columns.get(name, ("", 1))
            if axis and is_quantized_size(group.parameters[name].numel() // shards, block_size or 1):
                raise UserError(
                    f"{optimizer_cls.__name__} cannot keep moments of {name}, whose columns "
                    f"parallelism.{axis}_parallel_degree shards: give it an [[optimizer.groups]] with another "
                    f"optimizer, or set that degree to {shards if axis == 'expert' else 1}"
                )
