"""Float8 training of linear layers with torchao (arXiv:2209.05433), and an account of what it did."""

import importlib
import logging
from dataclasses import replace

import torch
from torch import nn

from titanlite.config.schema import Float8
from titanlite.errors import UserError
from titanlite.models.base import Model

logger = logging.getLogger(__name__)


def convert_to_float8(model: Model, *, float8: Float8, shard_degree: int) -> None:
    """Swap linear layers for float8 ones, in place; log how many, and why the others stay.

    Raises:
        UserError: torchao is missing, or there is nothing to convert.
    """
    try:
        torchao = importlib.import_module("torchao.float8")
    except ImportError as error:
        raise UserError(f"float8 needs torchao, and it cannot be imported: {error}") from error
    gather = float8.enable_fsdp_float8_all_gather and float8.recipe_name == "tensorwise" and shard_degree > 1
    if float8.recipe_name == "tensorwise":
        config = torchao.Float8LinearConfig(enable_fsdp_float8_all_gather=gather, emulate=float8.emulate)
    else:
        config = replace(torchao.Float8LinearConfig.from_recipe_name(float8.recipe_name), emulate=float8.emulate)
    skipped: dict[str, list[str]] = {}
    converted: list[str] = []

    def wanted(module: nn.Module, name: str) -> bool:
        if not isinstance(module, nn.Linear):
            return False
        if reason := _reason_to_skip(module, name, float8.filter_fqns):
            skipped.setdefault(reason, []).append(name)
        else:
            converted.append(name)
        return not reason

    torchao.convert_to_float8_training(model, config=config, module_filter_fn=wanted)
    logger.info("float8 (%s): converted %d linear layers: %s", float8.recipe_name, len(converted), _brief(converted))
    for reason, names in skipped.items():
        logger.info("float8: kept %d linear layers (%s): %s", len(names), reason, _brief(names))
    if not converted:
        raise UserError("quantize.linear.float8.enable: no layer can be converted; see the reasons above")


def _reason_to_skip(linear: nn.Linear, name: str, filter_fqns: list[str]) -> str | None:
    if pattern := next((pattern for pattern in filter_fqns if pattern in name), None):
        return f"named by filter_fqns: {pattern}"
    if name.startswith("head."):
        return "the loss multiplies with its weight itself"
    if linear.in_features % 16 or linear.out_features % 16:
        return "sizes that float8 products need are multiples of 16"
    return None


def check_float8(float8: Float8) -> None:
    """Raises:
    UserError: the config asks for float8, and this machine cannot do it.
    """
    able = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
    if float8.enable and not float8.emulate and not able:
        raise UserError(
            "quantize.linear.float8.enable: this machine has no float8 units (NVIDIA: compute capability 8.9, Ada or "
            "Hopper, or newer); emulate = true runs it slowly, for tests"
        )


def _brief(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
