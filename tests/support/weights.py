"""Checkpoints of small models with random weights, saved as training saves them, without training."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.helpers import one_process
from titanlite.checkpoint.history import RunHistory
from titanlite.checkpoint.manager import CheckpointManager
from titanlite.checkpoint.manifest import Progress, folder_name
from titanlite.checkpoint.resume import RunSettings, resume_settings
from titanlite.checkpoint.save import build_saver
from titanlite.config.load import load
from titanlite.models.base import Model, added_parameters
from titanlite.models.registry import resolve_model
from titanlite.parallelize import DTYPES
from titanlite.parallelize.materialize import materialize, set_dtype
from titanlite.schema import dump
from titanlite.state import TrainingState
from titanlite.storage.storage import open_storage
from titanlite.techniques import choose_trained

SMALL: dict[str, Any] = {"dim": 48, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "hidden_dim": 40, "vocab_size": 384}
"""Shape of the small models, with a vocabulary for the tokenizer bytes."""
OWN: dict[str, dict[str, Any]] = {
    "llama3": {"rope_scaling_factor": 4.0},
    "qwen3": {"head_dim": 16},
    "qwen3_moe": {"head_dim": 16, "n_experts": 4, "n_active_experts": 2},
}
"""Further arguments of each family."""
AS_CASES = [pytest.param(family, marks=pytest.mark.nightly) if family == "qwen3" else family for family in OWN]
"""Cases of adapters: dense Qwen3 has the attention of one of the others and the feed-forward of the other."""


def small_toml(family: str, *, dtype: str = "float32", tokenizer: str = "bytes", **args: Any) -> str:
    lines = {**SMALL, **OWN.get(family, {}), **args}
    text = "\n".join(f"{name} = {str(value).lower()}" for name, value in lines.items())
    return f"""
[model]
name = "{family}"
[model.args]
{text}
[data]
tokenizer = "{tokenizer}"
[training]
dtype = "{dtype}"
seq_len = 64
[optimizer]
name = "SGD"
"""


def random_model(config_file: Path, *, scale: float = 6) -> Model:
    """Return the model of a config with random weights.

    Args:
        scale: of matrices, beyond the initial one, so that attention and routers are far from uniform.
    """
    config = load(config_file)
    spec = resolve_model(config.model.name, config.model.flavor, config.model.args, config.model.file)
    model = spec._replace(args=replace(spec.args, max_seq_len=config.training.seq_len)).build()
    dtype = DTYPES[config.training.dtype]
    set_dtype(model, dtype)
    choose_trained(model, config)
    materialize(model, device=torch.device("cpu"), dtype=dtype, seed=1)
    generator = torch.Generator().manual_seed(2)
    adapters = torch.Generator().manual_seed(3)
    for adapter in added_parameters(model).values():  # B begins as zero
        adapter.data.copy_(0.1 * torch.randn(adapter.shape, generator=adapters))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                if parameter.itemsize > 1:  # codes are as they are
                    parameter.mul_(scale)
            else:  # norms and biases, which begin alike: a swap would go unseen
                parameter.add_(0.3 * torch.rand(parameter.shape, generator=generator))
    return model


def save_random(folder: Path, family: str, *, dtype: str = "float32", **args: Any) -> tuple[Path, Model]:
    """Save a small model with random weights in a run folder; return (checkpoint, model)."""
    toml = folder / "small.toml"
    toml.write_text(small_toml(family, dtype=dtype, **args))
    model = random_model(toml)
    with one_process():
        return save_model(folder, model, toml), model


def save_model(folder: Path, model: Model, config_file: Path, *, step: int = 10) -> Path:
    """Save a model as the checkpoint of a step of a run in a folder, and return the checkpoint's folder.

    Needs a process group.
    """
    config = load(config_file)
    storage, device = open_storage(str(folder / "checkpoints"), owner="me"), torch.device("cpu")
    manager = CheckpointManager(
        config.checkpoint,
        TrainingState(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1)),
        saver=build_saver(config.checkpoint, storage, device, whole_config=dump(config)),
        history=RunHistory(storage, [], load_step=None, has_saved=False),
        settings=RunSettings(lambda samples: resume_settings(config, model_args=model.args, inputs={}), []),
    )
    manager.save(Progress(step, 8 * step), last=True)
    manager.finish()
    return folder / "checkpoints" / folder_name(step)


def state(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers; a shared parameter once."""
    shared = dict(model.named_parameters())
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {name: tensor for name, tensor in model.state_dict().items() if name in shared or name not in names}
