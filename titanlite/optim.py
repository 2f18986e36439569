"""The optimizer: AdamW (arXiv:1711.05101)."""

import torch
from torch import nn

from titanlite.config.schema import Optimizer


def build_optimizer(model: nn.Module, config: Optimizer) -> torch.optim.Optimizer:
    """AdamW in one fused kernel; norms and biases (one dimension) have no weight decay."""
    matrices = [p for p in model.parameters() if p.requires_grad and p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.requires_grad and p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr
