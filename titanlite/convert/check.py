"""`export --check`: read a Hugging Face folder back, and compare what it computes with our model, block by block."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from titanlite.convert.check_tokens import check_tokens
from titanlite.convert.diagnose import BlockCall, explain
from titanlite.convert.layout import Outgoing, blocks
from titanlite.convert.rows import RowReader
from titanlite.convert.source import Source, load_model, open_source
from titanlite.models.base import Model
from titanlite.runtime.errors import RunError

LIMIT = 1e-4
"""Largest difference of hidden states and logits in float32, relative to their size (root mean square)."""
SEQUENCES, LENGTH = 2, 64


class CheckFailed(RunError):
    """An exported folder is not the model that was exported."""


@dataclass
class Trace:
    """Values that a model computes on the way to its logits."""

    hidden: list[Tensor] = field(default_factory=list)
    """Input of the first block, then the output of each block."""
    calls: list[BlockCall] = field(default_factory=list)
    """Arguments of each block."""
    logits: Tensor = field(default_factory=lambda: torch.empty(0))


def check_folder(source: Source, folder: Path, tensors: Sequence[Outgoing]) -> str:
    """Check an exported folder, and return a report.

    Every tensor is compared bit by bit with the checkpoint. Then the folder is loaded by transformers, or by our own
    reader where transformers is not installed, and its hidden states and logits in float32 are compared with ours.

    Args:
        tensors: what the folder should hold.

    Raises:
        CheckFailed: naming the first block and tensor that differ.
    """
    check_tensors(source, folder, tensors)
    same = f"{len(tensors)} tensors as in the checkpoint, bit by bit"
    tokens, origin = check_tokens(source, sequences=SEQUENCES, length=min(LENGTH, source.spec.args.max_seq_len))
    if find_spec("transformers") is not None:
        program = "transformers"
        theirs = trace_of_transformers(folder, tokens, len(source.spec.build().layers))
    else:
        program = "titanlite's own reader"
        same += "; transformers is not installed"
        theirs = trace_of_model(load_model(open_source(str(folder))), tokens)
    model = load_model(source)
    _round(model, tensors)
    worst = compare(model, trace_of_model(model, tokens), theirs, tensors, program=program)
    return f"{same}; {program} computes the same on {tokens.numel()} tokens ({origin}), {worst}"


def check_tensors(source: Source, folder: Path, tensors: Sequence[Outgoing]) -> None:
    """Compare every tensor of a folder with the checkpoint.

    Raises:
        CheckFailed: naming the first tensor that differs.
    """
    index = folder / "model.safetensors.index.json"
    names = json.loads(index.read_bytes())["weight_map"] if index.is_file() else {}
    reader = RowReader(source)
    head_size = getattr(source.spec.args, "head_size", None)
    for tensor in tensors:
        with safe_open(folder / names.get(tensor.name, "model.safetensors"), framework="pt") as file:
            found = file.get_slice(tensor.name)
            if tuple(found.get_shape()) != tensor.shape:
                raise CheckFailed(f"{tensor.name} has shape {found.get_shape()}, and not {[*tensor.shape]}")
            start = 0
            for block in blocks(tensor, reader, head_size=head_size):
                there = found[start : start + len(block)] if block.ndim else file.get_tensor(tensor.name)
                start += len(block) if block.ndim else 0
                if not torch.equal(there, block):
                    difference = (there.double() - block.double()).abs().max().item()
                    raise CheckFailed(
                        f"{tensor.name} is not {tensor.ours} of {source.where}: values differ by up to {difference:.3g}"
                    )


def trace_of_transformers(folder: Path, tokens: Tensor, n_layers: int) -> Trace:
    """Load a folder with transformers, and run it.

    Raises:
        CheckFailed: tensors are missing, unexpected or of another shape.
    """
    import transformers

    quiet = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()
    try:
        with _no_bars(transformers):
            loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, output_loading_info=True, ignore_mismatched_sizes=True
            )
    finally:
        transformers.utils.logging.set_verbosity(quiet)
    model, info = loaded
    wrong = {key: sorted(map(str, value)) for key, value in info.items() if value and key != "error_msgs"}
    if wrong:
        lines = [f"  {key.removesuffix('_keys')}: {', '.join(names[:5])}" for key, names in wrong.items()]
        raise CheckFailed("\n".join(["transformers does not find the tensors of the model:", *lines]))
    layers = next(it for it in model.modules() if isinstance(it, nn.ModuleList) and len(it) == n_layers)
    return _trace(model.eval(), layers, lambda: model(tokens, use_cache=False).logits)


def trace_of_model(model: Model, tokens: Tensor) -> Trace:
    """Run one of our models."""
    return _trace(model, model.layers, lambda: model(tokens))


def compare(
    model: Model, ours: Trace, theirs: Trace, tensors: Sequence[Outgoing], *, program: str = "transformers"
) -> str:
    """Compare two traces block by block.

    Args:
        program: computed the second trace.

    Raises:
        CheckFailed: naming the first block that differs, the tensor that explains it, and by how much.
    """
    names = {tensor.ours: tensor.name for tensor in reversed(tensors)}
    worst = (0.0, "the embedding")
    for i, (here, there) in enumerate(zip(ours.hidden, theirs.hidden, strict=True)):
        difference = relative(there, here)
        where = f"block {i - 1}" if i else "the embedding"
        if not difference <= LIMIT:
            if i:
                reason = explain(model, i - 1, ours.calls[i - 1], there, names, limit=LIMIT)
            else:
                reason = f"{_of('tok_embeddings.weight', names)} is another tensor there"
            raise CheckFailed(f"{_difference(program, where, difference, here, there)}\n  {reason}")
        worst = max(worst, (difference, where))
    difference = relative(theirs.logits, ours.logits)
    if not difference <= LIMIT:
        head = [name for name in names if name.startswith("head.")]
        reason = f"the tensors after the last block: {', '.join(_of(name, names) for name in head)}"
        raise CheckFailed(f"{_difference(program, 'the logits', difference, ours.logits, theirs.logits)}\n  {reason}")
    return f"hidden states within {worst[0]:.1e} (most after {worst[1]}), logits within {difference:.1e}"


def relative(found: Tensor, wanted: Tensor) -> float:
    """Return the root mean square of a difference, relative to that of the wanted values."""
    if found.shape != wanted.shape:
        return float("inf")
    return ((found - wanted).double().square().mean().sqrt() / wanted.double().square().mean().sqrt()).item()


def _difference(program: str, where: str, difference: float, here: Tensor, there: Tensor) -> str:
    most = (here - there).abs().max().item() if here.shape == there.shape else float("inf")
    what = where if where == "the logits" else f"hidden states after {where}"
    return (
        f"{what} differ from those of {program} by {difference:.2e} of their size (at most {most:.3g}; allowed "
        f"{LIMIT:g}), and everything before agrees"
    )


def _of(name: str, names: dict[str, str]) -> str:
    return f"{name} ({names[name]})" if name in names else name


def _round(model: Model, tensors: Sequence[Outgoing]) -> None:
    """Round our weights to the dtypes that were written."""
    dtypes = {tensor.ours: tensor.dtype for tensor in tensors}
    for name, parameter in model.named_parameters():
        if name in dtypes:
            parameter.data = parameter.data.to(dtypes[name]).float()


@torch.no_grad()
def _trace(model: nn.Module, layers: nn.ModuleList, run: Callable[[], Tensor]) -> Trace:
    trace = Trace()

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        trace.calls.append(BlockCall(args, kwargs))
        if not trace.hidden:
            trace.hidden.append(args[0] if args else kwargs["hidden_states"])

    def after(module: nn.Module, args: Any, output: Any) -> None:
        trace.hidden.append(output[0] if isinstance(output, tuple) else output)

    handles = [layer.register_forward_pre_hook(before, with_kwargs=True) for layer in layers]
    handles += [layer.register_forward_hook(after) for layer in layers]
    try:
        trace.logits = run().float()
    finally:
        for handle in handles:
            handle.remove()
    return trace


@contextmanager
def _no_bars(transformers: Any) -> Iterator[None]:
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers.utils.logging.enable_progress_bar()
