"""Check of `checkpoint.last_save_in_hf` before training: whether Hugging Face's format has a place for each tensor."""

import json

from titanlite.checkpoint.state import model_state, selected, to_globs
from titanlite.models.base import Model, added_parameters
from titanlite.models.quantized import scales_of
from titanlite.runtime.errors import ConfigError, Problem
from titanlite.schema import Checkpoint


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
    known = {*added_parameters(model), *scales_of(state).values()}  # PEFT's format has a place for adapters
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
