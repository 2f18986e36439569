"""The values that transformers computes with the weights and tokens of a dump, under our names.

The names of modules follow from the tables of parameter names that export uses. Where the loss is cross entropy alone,
transformers computes its own loss and gradients. Else its backward pass starts with the dump's gradient of the final
norm. There is no update: the optimizer is PyTorch's.
"""

from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from titanlite.batch import IGNORE
from titanlite.runtime.errors import UserError
from titanlite.tools.convert.module_values import modules_in, watch
from titanlite.tools.report.value_dump import LABELS, LOSS, TOKENS, Dump

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

    def see(role: str, name: str, value: object) -> None:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return
        key = f"{role} {name}"
        values[f"forward {key}"] = value.detach().clone()
        if value.requires_grad:
            value.register_hook(lambda gradient: values.update({f"gradient {key}": gradient.clone()}))

    modules = modules_in(form["names"])
    watch(((ours, model.get_submodule(theirs)) for ours, theirs in modules.items()), see)
    decoder = model.get_submodule(modules[FINAL_NORM].rpartition(".")[0])
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
            values[f"gradient parameter {ours}"] = gradient
    values = {key: value.detach() for key, value in values.items()} | {
        f"before parameter {ours}": weights[theirs] for ours, theirs in form["names"].items()
    }
    index = dump.index
    here = {name: [key for key in getattr(index, name) if key in values] for name in ("forward", "gradients")}
    dtypes = dict.fromkeys(values, "float32") | {TOKENS: index.dtypes[TOKENS]}
    return Dump(
        replace(index, ranks=1, compute_dtype="float32", dtypes=dtypes, compiled=[], updates=[], **here), [values]
    )


def _build(config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Any:
    import transformers

    known = transformers.AutoConfig.for_model(**config)
    model = transformers.AutoModelForCausalLM.from_config(known, dtype=torch.float32, attn_implementation="sdpa")
    missing = set(model.state_dict()) - set(weights) - ({"lm_head.weight"} if known.tie_word_embeddings else set())
    found = model.load_state_dict(dict(weights), strict=False)
    if missing or found.unexpected_keys:
        raise UserError(f"--where transformers: its model has other tensors: {[*missing, *found.unexpected_keys][0]}")
    return model.train()
