"""Small models with adapters."""

from collections.abc import Sequence
from typing import Any

import torch

from titanlite.models.base import Model
from titanlite.models.registry import resolve_model
from titanlite.parallelize.materialize import materialize, set_dtype
from titanlite.schema import Config, Freeze, Lora
from titanlite.techniques import choose_trained

TOKENS = torch.arange(32).view(2, 16) * 5 % 64
SMALL = {"dim": 48, "n_layers": 2, "n_heads": 4, "n_kv_heads": 1, "hidden_dim": 80, "vocab_size": 64}
FROZEN_BASE = Freeze()


def adapted(
    family: str = "llama3", *, rank: int | None = 4, targets: Sequence[str] = (), freeze: Freeze = FROZEN_BASE,
    **args: Any,
) -> Any:  # fmt: skip
    """Return a model on the meta device."""
    model = resolve_model(family, "debug", {**SMALL, "max_seq_len": 16, **args}).build()
    lora = Lora(rank=rank, targets=[*targets])
    choose_trained(model, Config(freeze=freeze, lora=lora))
    return model


def filled(model: Model, dtype: torch.dtype | None = None) -> Model:
    """Return a model with its initial values.

    Args:
        dtype: of all its parameters. None: they are as they are, and those that are trained are float32.
    """
    if dtype is not None:
        set_dtype(model, dtype)
    materialize(model, device=torch.device("cpu"), dtype=dtype or torch.float32, seed=3)
    return model
