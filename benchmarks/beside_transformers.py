"""Train a config beside transformers: its LlamaForCausalLM, PyTorch's AdamW and a plain loop of ten lines.

    python benchmarks/beside_transformers.py [--section.key=value ...]

The config is debug. Both begin with the weights that transformers draws, but for embeddings of standard deviation 1:
with its 0.02, a learning rate of 3e-3 changes them by a sixth in a step, so that rounding is amplified: titanlite with
two micro-batches instead of one differs by 1e-3 after 30 steps. Both read the same batches. The losses of each step go
to benchmarks/beside_transformers.jsonl, their picture to docs/images/beside_transformers.svg, and the largest relative
difference is printed. Needs the extra `test`, and matplotlib for the picture.
"""

import json
import sys
import tempfile
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import transformers

import titanlite

RECORDS = Path(__file__).with_suffix(".jsonl")
PICTURE = Path(__file__).parents[1] / "docs" / "images" / "beside_transformers.svg"


def transformers_model(args: Any) -> Any:
    """Return the Llama of these arguments, with initial values of transformers but for its embeddings."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=args.vocab_size,
            hidden_size=args.dim,
            intermediate_size=args.hidden_dim,
            num_hidden_layers=args.n_layers,
            num_attention_heads=args.n_heads,
            num_key_value_heads=args.n_kv_heads,
            rms_norm_eps=args.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": args.rope_theta},
            tie_word_embeddings=args.tied_head,
            max_position_embeddings=args.max_seq_len,
        )
    )
    torch.nn.init.normal_(model.get_input_embeddings().weight)
    return model


def plain_losses(model: Any, batches: list[dict[str, torch.Tensor]], rates: list[float], config: Any) -> list[float]:
    """Train in a plain loop, and return the loss of each step.

    Args:
        rates: learning rate of each step.
    """
    chosen, losses, parameters = config.optimizer, [], [*model.parameters()]
    matrices, others = ([p for p in parameters if (p.ndim > 1) == wanted] for wanted in (True, False))
    groups = [{"params": matrices, "weight_decay": chosen.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(chosen.beta1, chosen.beta2), eps=chosen.eps)
    for batch, rate in zip(batches, rates, strict=True):
        for group in optimizer.param_groups:
            group["lr"] = rate
        logits = model(input_ids=batch["tokens"]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten())
        loss.backward()
        # PyTorch's own norm adds millions of float32 squares on a CPU, which leaves four digits of it.
        norm = torch.stack([parameter.grad.double().square().sum() for parameter in parameters]).sum().sqrt()
        torch.nn.utils.clip_grads_with_norm_(parameters, config.training.max_norm, norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def draw(records: list[dict[str, float]]) -> None:
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    mpl.rcParams["svg.hashsalt"] = "titanlite"  # the same file each time
    figure, (losses, differences) = plt.subplots(
        2, 1, figsize=(8, 5), layout="constrained", height_ratios=[2, 1], sharex=True
    )
    steps = [record["step"] for record in records]
    for name, style in {"transformers": "-", "titanlite": "--"}.items():
        losses.plot(steps, [record[name] for record in records], style, label=name, linewidth=2)
    differences.semilogy(steps, [abs(r["titanlite"] / r["transformers"] - 1) or None for r in records], ".")
    losses.set(ylabel="training loss")
    differences.set(xlabel="step", ylabel="relative difference")
    losses.legend()
    for axes in (losses, differences):
        axes.grid(alpha=0.3)
    figure.savefig(PICTURE, metadata={"Date": None})


def main() -> None:
    if "--help" in sys.argv:
        raise SystemExit(__doc__)
    words = dict(word.removeprefix("--").split("=", 1) for word in sys.argv[1:])
    args = titanlite.build_model(titanlite.load_config("debug", words)).args
    model = transformers_model(args)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(f"{folder}/weights")
        options = {
            "job.dump_folder": folder, "job.name": "beside", "metrics.log_freq": 1, "checkpoint.enable": False,
            "checkpoint.initial_load_path": f"{folder}/weights", "data.cache_folder": f"{folder}/data", **words,
        }  # fmt: skip
        config = titanlite.load_config("debug", options)
        with titanlite.build_run(config) as run:
            batches = [*islice(run.batches, config.training.steps)]
        records = titanlite.run_training(titanlite.load_config("debug", options | {"job.name": "ours"}))
    theirs = plain_losses(model, batches, [rate or 0.0 for rate in records.column("lr")], config)
    pairs = zip(records.steps, records.column("loss"), theirs, strict=True)
    found = [{"step": step, "titanlite": ours, "transformers": its} for step, ours, its in pairs]
    RECORDS.write_text("".join(json.dumps(record) + "\n" for record in found))
    draw(found)
    largest = max(abs(record["titanlite"] / record["transformers"] - 1) for record in found)
    print(f"{len(found)} steps, the largest relative difference of losses is {largest:.1e}")


if __name__ == "__main__":
    main()
