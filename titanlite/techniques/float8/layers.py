"""Float8 training of linear layers with torchao (arXiv:2209.05433), and an account of what it did."""

import importlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from titanlite.models.base import Model, head_of
from titanlite.runtime.errors import UserError
from titanlite.runtime.private_torch.tensors import local_tensor, wrapped_tensors
from titanlite.schema import Float8
from titanlite.techniques.technique import nothing

logger = logging.getLogger(__name__)

ROWWISE = ("rowwise", "rowwise_with_gw_hp")
NEWER = dict.fromkeys(ROWWISE, ((9, 0), "Hopper")) | {"mxfp8": ((10, 0), "Blackwell")}
"""Compute capabilities of recipes that need more than 8.9."""
SMALL = "slower in float8"
NEEDED = "float8 matmuls need sizes that are multiples of"
STEPS = {"mxfp8": 32}
"""Number of which sizes are multiples, of the recipes where it is not 16."""
PACKAGE, OWN = "torchao.float8", "titanlite.techniques.float8"
"""Packages with the classes of float8 layers."""


def convert_to_float8(
    model: Model, *, float8: Float8, shard_degree: int, tensor: DeviceMesh | None = None, on_host: bool = False
) -> None:
    """Swap linear layers for float8 ones, in place; log which, and why the others stay.

    Args:
        shard_degree: ranks that FSDP shards a weight over.
        tensor: axis over whose ranks the layers will be split.
        on_host: whether parameters are in host memory, where they lose precomputed scales.

    Raises:
        UserError: torchao is missing, or there is nothing to convert.
    """
    torchao = _import(PACKAGE)
    chosen, kept = choose_layers(model, float8)
    split = _split_dims(model, chosen) if tensor else {}
    ranks, step = tensor.size() if tensor else 1, STEPS.get(float8.recipe_name, 16)
    for name in [name for name, dim in split.items() if chosen[name].weight.shape[dim] // ranks % step]:
        kept.setdefault(f"{NEEDED} {step}, also parts of {ranks} ranks", []).append(name)
        del chosen[name], split[name]
    sizes = ", ".join(f"{count} of {size}" for size, count in Counter(map(_size, chosen.values())).items())
    what = f"converted {len(chosen)} linear layers: {_brief([*chosen])} ({sizes})"
    logger.info("float8 (%s): %s", float8.recipe_name, what)
    for reason, names in kept.items():
        logger.info("float8: kept %d linear layers (%s): %s", len(names), reason, _brief(names))
    if experts := [name for name, parameter in model.named_parameters() if parameter.dim() == 3]:
        what = "grouped matmuls have no float8 kernel"
        logger.info("float8: kept %d stacks of experts' weights (%s): %s", len(experts), what, _brief(experts))
    if not chosen:
        small = any(SMALL in reason for reason in kept)
        hint = "; quantize.linear.float8.skip_small = false converts small ones too" if small else ""
        raise UserError(f"quantize.linear.float8.enable: no layer can be converted; see the reasons above{hint}")
    if float8.recipe_name == "mxfp8":
        for name, linear in chosen.items():
            model.set_submodule(name, _import(f"{OWN}.mxfp8").mxfp8_linear(linear, emulate=float8.emulate))
        return
    parts = dict.fromkeys((name for name, dim in split.items() if dim == 0), ranks)
    gather = _gathers_in_float8(float8, chosen, shard_degree, parts)
    if gather and split and (on_host or not float8.precompute_float8_dynamic_scale_for_fsdp):
        logger.info("float8: weights are not gathered in float8: each needs one scale for all parts, computed before")
        gather = False
    config = _torchao_config(torchao, float8, gather=gather)
    for name, dim in split.items():
        from titanlite.techniques.float8.split import split_float8_linear

        assert tensor is not None, "what is split has an axis"
        new = split_float8_linear(chosen[name], config, split_dim=dim, group_name=tensor.get_group().group_name)
        model.set_submodule(name, new)
    whole = chosen.keys() - split.keys()
    torchao.convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name in whole)


def choose_layers(model: Model, float8: Float8) -> tuple[dict[str, nn.Linear], dict[str, list[str]]]:
    """Return the layers to convert, and the names of the others by reason."""
    chosen: dict[str, nn.Linear] = {}
    kept: dict[str, list[str]] = {}
    head_layers = {*head_of(model).modules()}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            if reason := _reason_to_keep(module, name, float8, head_layers):
                kept.setdefault(reason, []).append(name)
            else:
                chosen[name] = module
    return chosen, kept


def _import(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"float8 needs torchao (0.18 for mxfp8), and it cannot be imported: {error}") from error


def _torchao_config(torchao: Any, float8: Float8, *, gather: bool) -> Any:
    if float8.recipe_name == "tensorwise":
        return torchao.Float8LinearConfig(enable_fsdp_float8_all_gather=gather, emulate=float8.emulate)
    return replace(torchao.Float8LinearConfig.from_recipe_name(float8.recipe_name), emulate=float8.emulate)


def _split_dims(model: Model, chosen: Iterable[str]) -> dict[str, int]:
    """Return the dimension of the weight of each layer that tensor parallelism splits."""
    from titanlite.techniques.tensor.layers import SPLIT_DIM, roles_of

    roles = roles_of(model)
    return {name: SPLIT_DIM[roles[name]] for name in chosen if roles.get(name) in SPLIT_DIM}


def _gathers_in_float8(float8: Float8, chosen: dict[str, nn.Linear], shard_degree: int, parts: dict[str, int]) -> bool:
    """Decide whether FSDP all-gathers the weights in float8. Rows must divide evenly: FSDP cannot pad float8 weights,
    and ranks would send different sizes.

    Args:
        parts: into how many the rows of some layers are split first.
    """
    if not float8.gathers_float8 or shard_degree == 1:
        return False
    uneven = [name for name, layer in chosen.items() if layer.out_features % (shard_degree * parts.get(name, 1))]
    if uneven:
        what = f"the rows of {len(uneven)} of them do not divide by the shard degree {shard_degree}"
        logger.info("float8: weights are not gathered in float8 (%s): %s", what, _brief(uneven))
    return not uneven


def _reason_to_keep(linear: nn.Linear, name: str, float8: Float8, head_layers: set[nn.Module]) -> str | None:
    if pattern := next((pattern for pattern in float8.filter_fqns if pattern in name), None):
        return f"named by filter_fqns: {pattern}"
    if linear in head_layers:
        return "the loss computes its matmul itself"
    step = STEPS.get(float8.recipe_name, 16)
    if linear.in_features % step or linear.out_features % step:
        return f"{NEEDED} {step}"
    if float8.skip_small and (limit := _too_small(linear, float8.recipe_name)):
        return f"{_size(linear)}: {SMALL} {limit}"
    return None


def _too_small(linear: nn.Linear, recipe: str) -> str | None:
    """Return the limit that a layer does not exceed, where converting its inputs takes longer than its matmul saves.

    These are the limits of torchao's `_auto_filter_for_recipe` (float8/float8_linear_utils.py, 0.18), measured on H100
    GPUs. It has none for rowwise_with_gw_hp, which saves less than rowwise: that has rowwise's; nor for mxfp8, which
    has tensorwise's.
    """
    rows, columns = linear.out_features, linear.in_features
    if recipe not in ROWWISE:
        return "up to 1024 x 4096" if rows <= 1024 and columns <= 4096 else None
    if rows <= 2048:
        return "up to 2048 rows"
    if columns <= 1024:
        return "up to 1024 columns"
    return "up to 4096 x 2048" if rows <= 4096 and columns <= 2048 else None


def weight_scaler(model: Model, float8: Float8) -> Callable[[], None]:
    """Return a function that computes the scales of all float8-gathered weights, by one all-reduce instead of one a
    layer.

    Call it whenever weights have changed, before they are gathered: an outdated scale would be used. Before the first
    call, each layer computes its own. The function does nothing where no weight is gathered in float8, and with CPU
    offload, where the copy on the GPU loses the scale.
    """
    if not float8.precompute_float8_dynamic_scale_for_fsdp or not any(map(_has_scale, model.parameters())):
        return nothing
    return partial(_import(PACKAGE).precompute_float8_dynamic_scale_for_fsdp, model)


def _has_scale(parameter: nn.Parameter) -> bool:
    if not isinstance(parameter, DTensor) or not hasattr(local_tensor(parameter), "_precomputed_scale"):
        return False
    return parameter.device.type == parameter.device_mesh.device_type


def float8_parameters(model: Model) -> dict[nn.Parameter, bool]:
    """Return the parameters of float8 layers, and whether each is gathered in float8."""
    layers = [module for module in model.modules() if type(module).__module__.startswith((PACKAGE, OWN))]
    parameters = [parameter for layer in layers for parameter in layer.parameters(recurse=False)]
    return {parameter: bool(wrapped_tensors(local_tensor(parameter))) for parameter in parameters}


def check_float8(float8: Float8) -> None:
    """Check that this machine has the hardware for the configured float8.

    Raises:
        UserError: it does not.
    """
    if not float8.enable or float8.emulate:
        return
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    if capability is None or capability < (8, 9):
        raise UserError(
            "quantize.linear.float8.enable: this machine has no hardware float8 (NVIDIA: compute capability 8.9: Ada, "
            "Hopper or newer); emulate = true runs it slowly, for tests"
        )
    # PyTorch has a kernel of rows for 8.9 since 2.7, which nobody has tried here.
    needed, name = NEWER.get(float8.recipe_name, ((8, 9), ""))
    if capability < needed:
        raise UserError(
            f"quantize.linear.float8.recipe_name: {float8.recipe_name} needs compute capability {needed[0]}.0 ({name}) "
            f"or newer, and this GPU has {capability[0]}.{capability[1]}; tensorwise runs on it"
        )


def _size(linear: nn.Linear) -> str:
    """Rows x columns of the weight."""
    return f"{linear.out_features} x {linear.in_features}"


def _brief(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
