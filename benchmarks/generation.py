"""Tokens a second of greedy generation: titanlite beside transformers, the same weights, the same prompt.

    python benchmarks/generation.py [--runs 5] [--dim 768] [--layers 12] [--dtype float32] [--record FILE]

Both take turns in one process, on a Llama with random weights, one sequence. Above 1, titanlite is faster. In float32
the tokens must be the same. The time is that of all new tokens, the prompt's included. CPU time is compared, too: it
differs less where other programs run.
"""

import argparse
import os
import statistics
import time
from typing import Any

import torch
import transformers
from record import add_record_option, ratios, record

from titanlite.models.base import build_on_meta
from titanlite.models.llama3 import Llama3, Llama3Args
from titanlite.ops import pick_kernels
from titanlite.ops.kernels import set_kernels, set_key_source
from titanlite.parallelize.fsdp import DTYPES
from titanlite.parallelize.materialize import allocate, draw_weights, set_dtype
from titanlite.runtime.process_group import Ranks, pick_device
from titanlite.tools.convert.generation import Generator, Sampler


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--dim", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--vocab-size", type=int, default=32_000)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    add_record_option(parser)
    options = parser.parse_args()
    device = pick_device(Ranks(0, 1, 0, 1))
    ours, theirs = models(options, device)
    parameters = sum(parameter.numel() for parameter in ours.parameters()) / 1e6
    shape = f"{parameters:.0f} M Llama, {options.dtype}, {options.prompt_tokens} + {options.new_tokens} tokens"
    print(f"{shape}, {device}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    contenders = {
        "transformers": lambda: generate_theirs(theirs, options, device),
        "titanlite": lambda: generate_ours(ours, options, device),
    }
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in contenders}
    loads = []
    for run in range(options.runs + 1):  # the first is a warm-up
        tokens = {}
        loads.append(os.getloadavg()[0])
        for name, act in contenders.items():
            start, cpu_start = time.perf_counter(), time.process_time()
            tokens[name] = act()
            seconds[name].append(time.perf_counter() - start)
            cpu_seconds[name].append(time.process_time() - cpu_start)
        first, *others = tokens.values()
        assert all(len(ids) == options.new_tokens for ids in tokens.values())
        if options.dtype == "float32" and any(other != first for other in others):
            raise SystemExit("the tokens differ")
        print(
            f"  {run}: " + ", ".join(f"{name} {options.new_tokens / times[-1]:.1f}" for name, times in seconds.items())
        )
    for what, found in (("second", seconds), ("CPU second", cpu_seconds)):
        base, mine = found["transformers"][1:], found["titanlite"][1:]
        pairs = ratios(base, mine)
        ratio = statistics.median(base) / statistics.median(mine)
        print(f"titanlite / transformers, tokens a {what}: {ratio:.3f} (pairs {min(pairs):.3f} to {max(pairs):.3f})")
        record(
            options.record, name=f"titanlite / transformers, tokens a {what}, {shape}", pairs=(base, mine),
            better="higher", aim=">= 1",
        )  # fmt: skip
    print(f"load of the machine before each run: {min(loads):.1f} to {max(loads):.1f}")


def models(options: argparse.Namespace, device: torch.device) -> tuple[Llama3, Any]:
    """Return a Llama, and transformers' with the same weights."""
    args = Llama3Args(
        dim=options.dim, n_layers=options.layers, n_heads=options.dim // 64, n_kv_heads=max(1, options.dim // 256),
        hidden_dim=options.dim * 8 // 3 // 64 * 64, vocab_size=options.vocab_size, max_seq_len=4096,
        rope_scaling_factor=1.0,
    )  # fmt: skip
    ours = build_on_meta(Llama3, args)
    assert isinstance(ours, Llama3)
    set_dtype(ours, DTYPES[options.dtype])
    allocate(ours, device, device)
    draw_weights(ours, device=device, seed=0)
    set_kernels(ours, pick_kernels(device))
    form = Llama3.formats.hugging_face
    assert form is not None
    config = transformers.LlamaConfig(**{**form.to_config(args), "dtype": options.dtype})
    state = {}
    for name, parameter in ours.named_parameters():
        found = form.tensors.find(name)
        assert found is not None
        state[found[1]] = parameter.data
    theirs: Any = transformers.LlamaForCausalLM(config)
    theirs = theirs.to(device, DTYPES[options.dtype]).eval()
    theirs.load_state_dict(state)
    theirs.generation_config.eos_token_id = None
    return ours, theirs


def prompt(options: argparse.Namespace) -> list[int]:
    draw = torch.Generator().manual_seed(0)
    return torch.randint(options.vocab_size, (options.prompt_tokens,), generator=draw).tolist()


def generate_theirs(model: Any, options: argparse.Namespace, device: torch.device) -> list[int]:
    ids = torch.tensor([prompt(options)], device=device)
    found = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=options.new_tokens, do_sample=False)
    return found[0, options.prompt_tokens :].tolist()


def generate_ours(model: Llama3, options: argparse.Namespace, device: torch.device) -> list[int]:
    """Generate from an empty cache."""
    set_key_source(model, None)
    generator = Generator(model, kernels=pick_kernels(device), vocab_size=options.vocab_size, max_seq_len=4096)
    return list(generator.stream(prompt(options), max_new_tokens=options.new_tokens, sampler=Sampler()))


if __name__ == "__main__":
    main()
