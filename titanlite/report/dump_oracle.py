"""Needs of transformers, to compute the values of a dump: its names, the labels, and the settings of AdamW."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from titanlite.loss import token_loss
from titanlite.models.base import Model, unique_parameters


def in_transformers(model: Model, loss: object, *, has_documents: bool) -> dict[str, Any]:
    """Return the model in transformers; nothing if its family has no table.

    Args:
        loss: loss function of a micro-batch.

    Returns:
        config.json, its name of each parameter, parameters that have none of their own, and whether the batch had a
        document mask and the loss is cross entropy alone.
    """
    form, args = model.formats.hugging_face, getattr(model, "args", None)
    if form is None or args is None:
        return {}
    found = {name: form.tensors.find(name) for name, _ in unique_parameters(model)}
    names = {ours: it[1] for ours, it in found.items() if it and "{" not in it[1] and not it[0].transposed}
    unknown = [name for name in found if name not in names]
    settings = {"config": form.to_config(args), "names": names, "unknown": unknown, "documents": has_documents}
    return {**settings, "is_cross_entropy": _is_cross_entropy(loss)}


def labels_of(loss: object) -> Tensor | None:
    """Return the labels that a loss function of a micro-batch holds."""
    return loss.keywords.get("labels_BL") if isinstance(loss, partial) else None


def adamw_settings(model: Model, optimizer: torch.optim.Optimizer, max_norm: float) -> dict[str, Any]:
    """Return the settings of each parameter in PyTorch's AdamW before its first step; nothing of other updates.

    Args:
        max_norm: largest norm of the gradients; 0 leaves them.
    """
    if type(optimizer) is not torch.optim.AdamW or any(float(it["step"]) for it in optimizer.state.values()):
        return {}
    names = {parameter: name for name, parameter in unique_parameters(model)}
    groups: dict[str, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        of_group = {"lr": float(group["lr"]), **{key: group[key] for key in ("betas", "eps", "weight_decay")}}
        groups |= {names[parameter]: of_group for parameter in group["params"]}
    return {"max_norm": max_norm, "groups": groups}


def _is_cross_entropy(loss: object) -> bool:
    if not isinstance(loss, partial) or loss.func is not token_loss:
        return False
    return not loss.keywords.get("z_loss") and "teacher" not in loss.keywords
