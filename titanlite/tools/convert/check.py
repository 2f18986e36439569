"""`export --check`: read a Hugging Face folder back, and compare what it computes with our model, block by block."""

import json
import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from titanlite.data.tokenizer import Tokenizer
from titanlite.runtime.errors import RunError
from titanlite.runtime.files import read_small
from titanlite.tools.convert.layout import ExportTensor, values_of
from titanlite.tools.convert.source import OpenedWeights, load_model
from titanlite.tools.report.compare import LOGITS, Values, difference, forward_values

LIMIT = 1e-4
"""Largest difference of hidden states and logits in float32, relative to their size (root mean square)."""
LENGTH = 64
EMBEDDED, BLOCK = "forward input layers.0", re.compile(r"forward output layers\.(\d+)")


class CheckFailed(RunError):
    """An exported folder is not the model that was exported."""


def check_folder(source: OpenedWeights, folder: Path, tensors: Sequence[ExportTensor]) -> str:
    """Check an exported folder, and return a report.

    Every tensor is compared bit by bit with the checkpoint. Then transformers, where it is installed, loads the folder,
    and its hidden states and logits in float32 are compared with ours.

    Args:
        tensors: what the folder should hold.

    Raises:
        CheckFailed: naming the first block and tensor that differ.
    """
    check_tensors(source, folder, tensors)
    same = f"{len(tensors)} tensors as in the checkpoint, bit by bit"
    if find_spec("transformers") is None:
        return f"{same}; nothing was computed, since transformers is not installed"
    tokens = check_tokens(source)
    names: dict[str, str] = {}
    for tensor in _of_model(tensors):
        names.setdefault(tensor.ours, tensor.name)  # the first expert's name stands for the stack
    theirs = _values_of_transformers(folder, tokens, names)
    largest = compare(_our_values(source, tokens, tensors), theirs, names)
    return f"{same}; transformers computes the same on {tokens.numel()} tokens, {largest}"


def check_tokens(source: OpenedWeights) -> Tensor:
    """Return tokens [2, L] of a text that every installation has; numbers without a tokenizer."""
    length, vocab_size = min(LENGTH, source.spec.args.max_seq_len), source.spec.args.vocab_size
    ids = source.tokenizer.encode(Path(__file__).read_text()) if source.tokenizer else np.arange(2 * length) * 7919
    return torch.from_numpy(np.resize(ids, (2, length)).astype(np.int64)) % vocab_size


TEXT = " It's 12345 o\u0301r 6\r\n\n\t  the  end.  日本語 👍🏽 \u00a0naïve, (self)"
"""Digits, spaces, accents and others that normalizers and pre-tokenizers treat differently."""


def check_tokenizer(ours: Tokenizer, folder: Path) -> None:
    """Compare the tokens that transformers, where it is installed, reads a folder's tokenizer to give with those of
    training: of texts, and of a text with special tokens in between.

    Raises:
        CheckFailed: naming the class that gives others.
    """
    if find_spec("transformers") is None:
        return
    from transformers import AutoTokenizer

    try:
        theirs: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        theirs.model_max_length = 2**62  # it warns of longer texts
        texts = {text: [*map(int, ours.encode(text))] for text in (TEXT, TEXT.strip(), Path(__file__).read_text())}
        if encode := getattr(ours, "encode_marked", None):
            marked = "".join(f"{token}{TEXT}" for token in theirs.all_special_tokens[:8])
            texts[marked] = encode(marked).ids
        found = {text: theirs.encode(text, add_special_tokens=False) for text in texts}
        differ = [text for text, ids in texts.items() if found[text] != ids]
        why = f"as {type(theirs).__name__}, {differ and found[differ[0]][:20]} for {differ and texts[differ[0]][:20]}"
    except Exception as error:  # each class has errors of its own
        differ, why = ["all"], str(error)
    if differ:
        model_type = json.loads(read_small(folder / "config.json")).get("model_type")
        raise CheckFailed(
            f"beside a config.json of {model_type}, transformers reads this tokenizer with other tokens than those of "
            f"training: {why}. Export with --no-tokenizer"
        )


def check_tensors(source: OpenedWeights, folder: Path, tensors: Sequence[ExportTensor]) -> None:
    """Compare every tensor of a folder with the checkpoint.

    Raises:
        CheckFailed: naming the first tensor that differs.
    """
    index = folder / "model.safetensors.index.json"
    names = json.loads(read_small(index))["weight_map"] if index.is_file() else {}
    values = values_of(source)
    for tensor in tensors:
        with safe_open(folder / names.get(tensor.name, "model.safetensors"), framework="pt") as file:
            shape = file.get_slice(tensor.name).get_shape()
            if tuple(shape) != tensor.shape:
                raise CheckFailed(f"{tensor.name} has shape {shape}, and not {[*tensor.shape]}")
            found, expected = file.get_tensor(tensor.name), values(tensor)
            if not torch.equal(found, expected):
                most = difference(tensor.name, found, expected, 0).most
                raise CheckFailed(
                    f"{tensor.name} is not {tensor.ours} of {source.where}: values differ by up to {most:.3g}"
                )


def _of_model(tensors: Sequence[ExportTensor]) -> list[ExportTensor]:
    """Return the tensors of transformers' model, for those of files."""
    return [part for tensor in tensors for part in tensor.parts or [tensor]]


def _values_of_transformers(folder: Path, tokens: Tensor, names: Mapping[str, str]) -> Values:
    """Load a folder with transformers, and return the values that its modules compute.

    Args:
        names: transformers' name of each of our tensors.

    Raises:
        CheckFailed: tensors are missing, unexpected or of another shape.
    """
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True, ignore_mismatched_sizes=True
    )
    model, info = loaded
    # transformers leaves out the module that predicts the token after the next, silently for some numbers of layers.
    others = [f"{name.rsplit('.', 2)[0]}." for ours, name in names.items() if ours.endswith(".next_norm.weight")]
    info["unexpected_keys"] = {key for key in info["unexpected_keys"] if not key.startswith(tuple(others))}
    wrong = {key: sorted(map(str, value)) for key, value in info.items() if value and key != "error_msgs"}
    if wrong:
        lines = [f"  {key.removesuffix('_keys')}: {', '.join(names[:5])}" for key, names in wrong.items()]
        raise CheckFailed("\n".join(["transformers does not find the tensors of the model:", *lines]))
    model, there = model.eval(), dict(model.named_modules())
    modules = [(ours, there[theirs]) for ours, theirs in modules_in(names).items() if theirs in there]
    return forward_values(modules, lambda: model(tokens, use_cache=False).logits)


def modules_in(names: Mapping[str, str]) -> dict[str, str]:
    """Return transformers' name of each module of ours that has one there.

    Args:
        names: transformers' name of each parameter. Modules follow from the first parts of both names within a block,
            and elsewhere from all but the last.
    """
    found: dict[str, str] = {}
    for ours, theirs in names.items():
        parts = ours.split(".")
        block, _, there = theirs.partition(f".{parts[1]}.") if parts[0] == "layers" else ("", "", "")
        if not there:
            found[ours.rpartition(".")[0]] = theirs.rpartition(".")[0]
            continue
        one, other = ".".join(parts[:2]), f"{block}.{parts[1]}"
        found[one] = other
        for a, b in zip(parts[2:-1], there.split(".")[:-1], strict=False):
            one, other = f"{one}.{a}", f"{other}.{b}"
            found[one] = other
    return found


def _our_values(source: OpenedWeights, tokens: Tensor, tensors: Sequence[ExportTensor]) -> Values:
    """Return the values that the modules of our model compute, with its weights rounded to the exported dtypes."""
    model, dtypes = load_model(source), {tensor.ours: tensor.dtype for tensor in _of_model(tensors)}
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(dtypes.get(name, parameter.dtype)).float()
    return forward_values(model.named_modules(), lambda: model(tokens))


def compare(here: Values, there: Values, tensors: Mapping[str, str]) -> str:
    """Compare what our model and transformers compute: hidden states block by block, then the logits.

    Args:
        here, there: values of our model and of transformers.
        tensors: the name there of each of our tensors.

    Raises:
        CheckFailed: naming the first block that differs, its first module that does with its tensors, and by how much.
    """
    found = {key: difference(key, there[key], here[key], LIMIT) for key in here if key in there}
    blocks = {key: f"hidden states after block {match[1]}" for key in here if (match := BLOCK.fullmatch(key))}
    hidden = {EMBEDDED: "hidden states after the embedding"} | blocks
    for key, what in (hidden | {LOGITS: "the logits"}).items():
        if not found[key].is_within:
            inside = [diff for diff in found.values() if key in blocks and diff.name.startswith(f"{found[key].name}.")]
            first = next((diff.key for diff in inside if not diff.is_within and diff.most < inf), key)
            raise CheckFailed(
                f"{what} differ from those of transformers by {found[key].relative:.2e} of their size "
                f"(at most {found[key].most:.3g}; allowed {LIMIT:g}), and everything before agrees\n"
                f"  {_module_and_tensors(first, tensors)}"
            )
    worst = max(hidden, key=lambda key: found[key].relative)
    most = f"{found[worst].relative:.1e} (most after {hidden[worst].partition(' after ')[2]})"
    return f"hidden states within {most}, logits within {found[LOGITS].relative:.1e}"


def _module_and_tensors(key: str, tensors: Mapping[str, str]) -> str:
    """Return the module of a value that differs as text, with the tensors that it computes with."""
    _, role, module = key.split(" ")
    module = {LOGITS: "head", EMBEDDED: "tok_embeddings"}.get(
        key, module if role == "output" else module.rpartition(".")[0]
    )
    of_module = [name for name in tensors if name.startswith(f"{module}.")]
    own = [name for name in of_module if name.rpartition(".")[0] == module] or of_module
    return f"{module}: {' and '.join(f'{name} ({tensors[name]})' for name in own)}, or an argument in config.json"
