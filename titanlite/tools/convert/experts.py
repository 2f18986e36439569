"""Experts that a compressed student keeps: those that the router of its teacher uses most on a sample of text.

Experts are compared by the tokens that the router sends them, as in arXiv:2404.05089. The teacher computes the sample
block by block. Only one block of it is in memory at a time, beside the hidden states of the sample.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor, nn

from titanlite.checkpoint.state import model_state
from titanlite.data.samples import Samples
from titanlite.data.sources import open_sources
from titanlite.data.tokenizer import load_tokenizer
from titanlite.models.base import Model
from titanlite.models.registry import ModelSpec
from titanlite.ops import pick_kernels
from titanlite.ops.kernels import set_kernels
from titanlite.runtime.console import progress_console
from titanlite.runtime.errors import UserError
from titanlite.runtime.files import write_atomically
from titanlite.schema import Data
from titanlite.tools.convert.import_weights import ReadTensor
from titanlite.tools.ingest.prepare import prepare_text

KEEP = re.compile(r"keep=(\d{1,6})")
SEQ_LEN = 2048
"""Tokens of a sequence of the sample, if the model can compute as many."""


@dataclass(frozen=True)
class Sample:
    """Text on which the router is watched."""

    path: str
    """Text or prepared tokens, as `data.path` takes them."""
    tokens: int
    """Number of tokens to read."""


def most_used(counts: Mapping[str, Sequence[int]], keep: int) -> dict[str, list[int]]:
    """Return the experts of each layer that have most tokens, in the order of their numbers.

    Args:
        counts: tokens that the router sent to each expert, by the name of a layer's experts.
    """
    return {
        name: sorted(sorted(range(len(tokens)), key=lambda expert: (-tokens[expert], expert))[:keep])
        for name, tokens in counts.items()
    }


def parse_keep(text: str, spec: ModelSpec) -> int:
    """Return the number of experts in a text such as "keep=64".

    Raises:
        UserError: the text is wrong, the model has no experts, or it cannot have as many.
    """
    if (match := KEEP.fullmatch(text)) is None:
        raise UserError(f"--experts: expected keep=NUMBER, such as keep=64, got {text!r}")
    experts, keep = getattr(spec.args, "n_experts", None), int(match[1])
    if not isinstance(experts, int) or not expert_stacks(spec.build()):
        raise UserError(f"--experts: {spec.model_cls.__name__} has no experts")
    least = int(getattr(spec.args, "n_active_experts", 1))
    if not least <= keep <= experts:
        what = f"a token uses {least}" if keep < least else f"there are {experts}"
        raise UserError(f"--experts: keep={keep} is not possible: {what} of the {experts} experts of a layer")
    return keep


def expert_stacks(model: Model) -> dict[str, list[str]]:
    """Return the tensors with one entry for each expert along dim 0, by the name of the module that holds them.

    Such a module counts the tokens of its experts in a buffer load_E; see `qwen3_moe.Experts`.
    """
    found: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        load = getattr(module, "load_E", None)
        if isinstance(load, Tensor):
            tensors = {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}
            of_experts = [key for key, tensor in tensors.items() if 0 < tensor.ndim <= 3 and len(tensor) == len(load)]
            found[name] = [key for key in of_experts if key != "load_E"]
    return found


def watch_routers(spec: ModelSpec, read: ReadTensor, tokens_BL: Tensor) -> dict[str, list[int]]:
    """Return the tokens of each expert, by the name of a layer's experts.

    Args:
        tokens_BL: sequences of the sample.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = spec.build().requires_grad_(False)
    with device:
        model.init_buffers()
    set_kernels(model, pick_kernels(device))
    names = set(model_state(model))
    counts: dict[str, list[int]] = {}

    def fill(module: nn.Module, prefix: str) -> None:
        own = {key: f"{prefix}.{key}" for key in module.state_dict() if f"{prefix}.{key}" in names}
        module.load_state_dict({key: read(name).to(device) for key, name in own.items()}, strict=False, assign=True)

    for name, child in model.named_children():
        if child is not model.layers:
            fill(child, name)
    with ExitStack() as stack:
        progress = stack.enter_context(Progress(console=progress_console(), transient=True))
        task = progress.add_task("watching the routers", total=len(model.layers))
        for index, block in enumerate(model.layers):
            sequences = _OneByOne(block, before=lambda b, i=index: fill(b, f"layers.{i}"))
            sequences.register_forward_hook(lambda *_, b=block, i=index: _collect(b, f"layers.{i}", counts))
            sequences.register_forward_hook(lambda *_: progress.advance(task))
            model.layers[index] = sequences
        model.train()  # only then are the tokens counted; nothing has a gradient
        model(tokens_BL.to(device), loss=lambda hidden_BLD, weight_VD: None)
    return counts


class _OneByOne(nn.Module):
    """Block that computes one sequence after the other, to need little memory.

    Args:
        before: called once, before the block computes.
    """

    def __init__(self, block: nn.Module, *, before: Callable[[nn.Module], object]) -> None:
        super().__init__()
        self.block, self._before = block, before

    def forward(self, x_BLD: Tensor, *args: Any, **options: Any) -> Tensor:
        self._before(self.block)
        return torch.cat([self.block(x_1LD, *args, **options) for x_1LD in x_BLD.split(1)])


def _collect(block: nn.Module, prefix: str, counts: dict[str, list[int]]) -> None:
    """Read the counters of a block that has computed all sequences, and free its memory."""
    for name, module in block.named_modules():
        load = getattr(module, "load_E", None)
        if isinstance(load, Tensor):
            counts[f"{prefix}.{name}"] = [int(count) for count in load.tolist()]
    block.to_empty(device="meta")


def read_sample(sample: Sample, spec: ModelSpec, tokenizer: str, *, cache_folder: Path) -> Tensor:
    """Return sequences of the sample -> [B, L] int64, as many as have its number of tokens.

    Raises:
        UserError: there is nothing to read, or too little.
    """
    seq_len = min(SEQ_LEN, spec.args.max_seq_len, sample.tokens)
    data = Data(path=sample.path, tokenizer=tokenizer)
    try:
        known = load_tokenizer(tokenizer)
        if known.vocab_size > spec.args.vocab_size:
            raise UserError(
                f"the tokenizer {tokenizer} has {known.vocab_size:,} tokens, and the model {spec.args.vocab_size:,}: "
                "name that of the teacher in data.tokenizer of a --config"
            )
        sources = open_sources(
            data, data, tokenizer=known, seq_len=seq_len, cache_folder=cache_folder, prepare_text=prepare_text
        )
    except UserError as error:
        raise UserError(f"--sample: {str(error).removeprefix('data.path: ')}") from None
    samples, count = Samples(sources, seed=0), max(1, sample.tokens // seq_len)
    if (there := len(sources[0].sequences)) < count:
        raise UserError(
            f"--sample: {sample.path} has {there * seq_len:,} tokens in sequences of {seq_len:,}, and --sample-tokens "
            f"asks for {count * seq_len:,}"
        )
    return samples.__getitems__([*range(count)])["tokens"]


def choose_experts(
    spec: ModelSpec, tokenizer: str | None, read: ReadTensor, *, keep: str, sample: Sample, out: str
) -> dict[str, list[int]]:
    """Return the experts to keep, for each tensor that has one entry for each expert.

    Args:
        spec, tokenizer, read: the teacher's model, the name of its tokenizer, and what reads its tensors.
        keep: value of `--experts`.
        out: folder of the checkpoint, in which the tokens of each expert are recorded; not if it is a URL.

    Raises:
        UserError: a mistake in the input.
    """
    count, stacks = parse_keep(keep, spec), expert_stacks(spec.build())
    if tokenizer is None:
        raise UserError("--sample: the tokenizer of the teacher is not here: name it in data.tokenizer of a --config")
    tokens_BL = read_sample(sample, spec, tokenizer, cache_folder=Path("outputs", "data_cache"))
    counts = watch_routers(spec, read, tokens_BL)
    if "://" not in out:
        place = Path(out) / "router_statistics.json"
        place.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(place, json.dumps({"tokens": tokens_BL.numel(), "counts": counts}, indent=1))
        print(f"wrote {place}, from {tokens_BL.numel():,} tokens")
    kept = most_used(counts, count)
    for layer, experts in kept.items():
        share = sum(counts[layer][expert] for expert in experts) / max(sum(counts[layer]), 1)
        print(f"{layer}: the kept experts had {share:.1%} of the tokens")
    return {f"{layer}.{tensor}": kept[layer] for layer, tensors in stacks.items() for tensor in tensors}
