"""The values that transformers computes with the weights and tokens of a dump, under our names.

The names of modules follow from the tables of parameter names that export uses. Where the loss is cross entropy alone,
transformers computes its own loss, gradients and the first update of AdamW. Else its backward pass starts with the
dump's gradient of the final norm, and there is no update.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanlite.batch import IGNORE
from titanlite.report.value_dump import LABELS, LOSS, TOKENS, Dump
from titanlite.runtime.errors import UserError

FINAL_NORM = "head.norm"


def transformers_dump(dump: Dump) -> Dump:
    """Return the values of the same step as transformers computes them in float32.

    Raises:
        UserError: transformers is missing, or does not have this model.
    """
    form = dump.index.hugging_face
    if not form:
        raise UserError("--where transformers: the model has no table of Hugging Face's names, or arguments of its own")
    if form["documents"]:
        raise UserError("--where transformers: it computes without a document mask; set data.document_mask=false")
    if form["unknown"]:
        raise UserError(f"--where transformers: {form['unknown'][0]} has no tensor of its own there")
    if find_spec("transformers") is None:
        raise UserError("--where transformers: transformers is not installed; pip install transformers")
    weights = {theirs: dump[f"before parameter {ours}"] for ours, theirs in form["names"].items()}
    model = _build(form["config"], weights)
    values: dict[str, Tensor] = {TOKENS: dump[TOKENS]}
    names = _modules(form["names"])
    for theirs, module in model.named_modules():
        if theirs in names:
            module.register_forward_pre_hook(partial(_see, values, f"input {names[theirs]}"), with_kwargs=True)
            module.register_forward_hook(
                lambda module, inputs, output, name=names[theirs]: _keep(
                    values, f"output {name}", output[0] if isinstance(output, tuple) else output
                )
            )
    decoder = model.get_submodule(next(it for it, ours in names.items() if ours == FINAL_NORM).rpartition(".")[0])
    hidden = decoder(dump[TOKENS], use_cache=False).last_hidden_state
    has_loss = bool(form.get("is_cross_entropy")) and LABELS in dump
    if has_loss:
        logits, labels = model.get_output_embeddings()(hidden), dump[LABELS]
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")
        values[LOSS] = loss[None]
        (loss / (labels != IGNORE).sum().clamp(min=1)).backward()
    else:
        hidden.backward(dump[f"gradient output {FINAL_NORM}"])
    tied = form["config"].get("tie_word_embeddings", False) and not has_loss
    for ours, theirs in form["names"].items():
        gradient = model.get_parameter(theirs).grad
        if gradient is not None and not (tied and ours.startswith("tok_embeddings.")):  # the head's part is missing
            values[f"gradient parameter {ours}"] = gradient.clone()  # clipping changes it
    if has_loss and (adamw := form.get("adamw")):
        values |= _updates(model, form["names"], **adamw)
    values = {key: value.detach() for key, value in values.items()} | {
        f"before parameter {ours}": weights[theirs] for ours, theirs in form["names"].items()
    }
    index = dump.index
    here = {
        name: [key for key in getattr(index, name) if key in values] for name in ("forward", "gradients", "updates")
    }
    dtypes = dict.fromkeys(values, "float32") | {TOKENS: index.dtypes[TOKENS]}
    return Dump(replace(index, ranks=1, compute_dtype="float32", dtypes=dtypes, compiled=[], **here), [values])


def _build(config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Any:
    import transformers

    known = transformers.AutoConfig.for_model(**config)
    model = transformers.AutoModelForCausalLM.from_config(known, dtype=torch.float32, attn_implementation="sdpa")
    missing = set(model.state_dict()) - set(weights) - ({"lm_head.weight"} if known.tie_word_embeddings else set())
    found = model.load_state_dict(dict(weights), strict=False)
    if missing or found.unexpected_keys:
        raise UserError(f"--where transformers: its model has other tensors: {[*missing, *found.unexpected_keys][0]}")
    return model.train()


def _updates(
    model: nn.Module, names: Mapping[str, str], *, max_norm: float, groups: Mapping[str, dict[str, Any]]
) -> dict[str, Tensor]:
    """Return the first update of PyTorch's AdamW, after clipping.

    Args:
        groups: settings by our name of a parameter. Parameters without any are frozen.
    """
    parameters = {ours: model.get_parameter(names[ours]) for ours in groups}
    before = {ours: parameter.detach().clone() for ours, parameter in parameters.items()}
    if max_norm:
        nn.utils.clip_grad_norm_(parameters.values(), max_norm)
    torch.optim.AdamW([{"params": [parameters[ours]], **settings} for ours, settings in groups.items()]).step()
    return {f"update parameter {ours}": parameters[ours].detach() - before[ours] for ours in groups}


def _modules(names: Mapping[str, str]) -> dict[str, str]:
    """Return our name of each module of transformers that has one: those with parameters, and those around them."""
    found: dict[str, str] = {}
    for ours, theirs in names.items():
        while (ours := ours.rpartition(".")[0]) and (theirs := theirs.rpartition(".")[0]):
            if ours in ("head", "layers"):
                break
            found[theirs] = ours
    return found


def _see(
    values: dict[str, Tensor], key: str, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]
) -> None:
    _keep(values, key, inputs[0] if inputs else named.get("hidden_states"))


def _keep(values: dict[str, Tensor], key: str, tensor: object) -> None:
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        return
    values[f"forward {key}"] = tensor.detach().clone()
    if tensor.requires_grad:
        tensor.register_hook(lambda gradient: values.update({f"gradient {key}": gradient.clone()}))
