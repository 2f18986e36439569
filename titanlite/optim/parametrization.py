"""Width and depth transfer: factors of initial values and of the optimizer's options, by the role of a parameter.

With m = width / base width, l = layers / base layers (1 for "mup"), and the standard parametrization at the base size:

    AdamW              initial std  learning rate  eps       weight decay
    input              1            1              1/m       1
    vector in layers   1            1              1/(m l)   (none)
    other vectors      1            1              1/m       (none)
    hidden             1/sqrt(m)    1/m            1/(m l)   m
    residual           1/sqrt(m)/l  1/m/l          1/m       m l
    output             1/m          1/m            1         m

These are the initial values, rates and multipliers of CompleteP (arXiv:2505.01618, alpha = 1), and with l = 1 those of
muP for the width (arXiv:2203.03466), after the multipliers in the forward pass (1/m of the logits, 1/l of each residual
branch) are folded into the weights: a multiplier a of a weight W is the same as the weight a W, with a times the
initial std and the learning rate, 1/a times AdamW's eps, and 1/a times its decoupled weight decay, so that learning
rate x weight decay stays. eps is in proportion to the gradient that it is added to, which docs/optimizers.md derives;
the authors' code divides it by m l for every parameter.

Muon's update is an orthogonal matrix times the learning rate and `update_scale`. Its rule is that of the spectral norm
(arXiv:2310.17813): an update is as large as sqrt(outputs / inputs), and 1/l of that in residual matrices.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from titanlite.models.base import Scaling
from titanlite.optim.muon import update_scale
from titanlite.runtime.errors import UserError


class Factors(NamedTuple):
    """Multipliers of lr, eps and initial std for one parameter; weight decay is divided by that of lr."""

    std: float
    lr: float
    eps: float


def adamw_factors(scaling: Scaling) -> Factors:
    """Return the row of the table for a parameter."""
    width, depth = scaling.width, scaling.depth
    eps = 1 / (width * (depth if scaling.in_layers else 1.0))  # as the gradient is, which no multiplier scales
    match scaling.role:
        case "residual":
            std, lr, eps = adamw_factors(replace(scaling, role="hidden" if scaling.is_matrix else "vector"))
            return Factors(std / depth, lr / depth, eps * depth)
        case "hidden":
            return Factors(width**-0.5, 1 / width, eps)
        case "output":
            return Factors(1 / width, 1 / width, eps * width)
        case "input" | "vector":
            return Factors(1.0, 1.0, eps)


def muon_lr(scaling: Scaling, parameter: Tensor, adjust_lr_fn: str) -> float:
    """Return the factor of Muon's learning rate for a hidden, residual or output parameter."""
    wanted, scale = 1.0, partial(update_scale, adjust_lr_fn=adjust_lr_fn)
    if scaling.role == "output":  # the shape is [V, D], and D grows
        rows, columns = parameter.shape[-2:]
        wanted, grown = scaling.width**-0.5, scale(rows, columns) / scale(rows, columns / scaling.width)
    else:
        grown = scale(scaling.width, scaling.width) / scale(1.0, 1.0)
    return wanted / grown / (scaling.depth if scaling.role == "residual" else 1.0)


def update_factors(optimizer: str, args: Mapping[str, Any], scaling: Scaling, parameter: Tensor) -> Factors:
    """Return the factors of the options with which an optimizer updates a parameter.

    Args:
        optimizer: name of its class.
        args: of `optimizer.args`.

    Raises:
        UserError: there is no rule.
    """
    if optimizer == "AdamW":
        return adamw_factors(scaling)
    if optimizer == "Muon" and scaling.role not in ("input", "vector"):
        return Factors(1.0, muon_lr(scaling, parameter, args.get("adjust_lr_fn", "match_rms_adamw")), 1.0)
    advice = "use AdamW" if optimizer == "Muon" else "use AdamW or Muon"
    raise UserError(f"has no rule for {optimizer} of {scaling.role} parameters: {advice}")
