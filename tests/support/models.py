"""Small Llama 3 and Qwen3 models, comparisons with transformers, and documents in packed sequences."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from tests.support.helpers import world
from titanlite.batch import IGNORE
from titanlite.loss import token_loss
from titanlite.models.decoder import Decoder, DecoderArgs
from titanlite.models.layers import Documents
from titanlite.models.llama3 import Llama3, Llama3Args
from titanlite.models.qwen3 import Qwen3, Qwen3Args
from titanlite.models.qwen3_moe import Qwen3Moe, Qwen3MoeArgs
from titanlite.ops.cpu import CpuKernels
from titanlite.ops.kernels import set_kernels
from titanlite.optim import build_optimizer, set_learning_rate
from titanlite.parallelize import build_mesh
from titanlite.parallelize.materialize import draw_weights
from titanlite.schedule import learning_rate
from titanlite.schema import Config, LRScheduler, Optimizer
from titanlite.step import Step, model_arguments, no_observer

SMALL = Llama3Args(
    dim=64, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=96, vocab_size=101, max_seq_len=64, rope_theta=10000.0,
    rope_scaling_factor=1.0,
)  # fmt: skip
SIZES: dict[str, Any] = {
    "dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 24, "vocab_size": 101, "max_seq_len": 64,
    "rope_theta": 10000.0,
}  # fmt: skip
DENSE = Qwen3Args(hidden_dim=96, **SIZES)
MOE = Qwen3MoeArgs(hidden_dim=32, n_experts=8, n_active_experts=2, balance_rate=1e-3, **SIZES)


def built(args: DecoderArgs, scale: float = 5) -> Decoder:
    """Args:
    scale: of matrices, beyond the initial one; so that attention and routing are far from uniform.
    """
    model = {Llama3Args: Llama3, Qwen3Args: Qwen3, Qwen3MoeArgs: Qwen3Moe}[type(args)](args)
    draw_weights(model, device=torch.device("cpu"), seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(scale)
    model.init_buffers()
    set_kernels(model, CpuKernels())
    return model


def documents(rows: list[list[int]]) -> Documents:
    lengths = torch.tensor([length for row in rows for length in row])
    positions = [torch.cat([torch.arange(length) for length in row]) for row in rows]
    ids = [torch.arange(len(row), dtype=torch.int32).repeat_interleave(torch.tensor(row)) for row in rows]
    boundaries = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0))).int()
    return Documents(torch.stack(positions), torch.stack(ids), boundaries)


def assert_gradients_equal(
    model: Decoder, theirs: Any, theirs_of: Callable[[dict[str, Tensor]], dict[str, Tensor]]
) -> None:
    """Compare logits and gradients of a batch with those of transformers' model.

    Args:
        theirs_of: renames and lays out tensors of ours by name like transformers.
    """
    tokens = torch.randint(0, model.args.vocab_size, (2, 65), generator=torch.Generator().manual_seed(1))
    ours, other = model(tokens[:, :-1]), theirs(tokens[:, :-1]).logits
    assert ours.std() > 0.1
    assert (ours - other).abs().max() < 1e-5 * other.abs().max().clamp(min=1)
    model(tokens[:, :-1], loss=partial(token_loss, labels_BL=tokens[:, 1:])).total.div(128).backward()
    theirs(tokens, labels=tokens).loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert_same(gradients, model, theirs, theirs_of)


def assert_same(
    gradients: dict[str, Tensor],
    model: Decoder,
    theirs: Any,
    theirs_of: Callable[[dict[str, Tensor]], dict[str, Tensor]],
) -> None:
    """Compare the gradients of all parameters with those of transformers' model."""
    assert len(gradients) == len([*model.parameters()])
    for name, gradient in theirs_of(gradients).items():
        expected = theirs.get_parameter(name).grad
        limit = 1e-4 * expected.abs().max() + 1e-8  # 0 of a router to one expert
        assert (gradient - expected).abs().max() < limit, name


def balanced_gradients(model: Decoder, batch: Any, kind: type[Step] = Step) -> tuple[dict[str, Tensor], Tensor]:
    """Return the gradients of a step on one process, and its balance loss."""
    world()
    step = plain_step(model, build_optimizer(model, Optimizer(), seed=0), kind)
    step.accumulate([batch], no_observer)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    step.unscale([*gradients.values()], micro_batches=1)
    return gradients, model.end_step(torch.tensor(True))["balance_loss"]


def assert_balance_loss_equal(
    model: Any, theirs: Any, theirs_of: Callable[[dict[str, Tensor]], dict[str, Tensor]]
) -> None:
    """Compare the balance loss of a batch, and the gradients of the whole loss, with those of transformers' model and
    its function for the logits of each layer. All tokens count, and not all labels."""
    tokens = torch.randint(0, model.args.vocab_size, (2, 33), generator=torch.Generator().manual_seed(1))
    labels = tokens[:, 1:].index_fill(1, torch.tensor([3, 4, 20]), IGNORE)
    gradients, found = balanced_gradients(model, {"tokens": tokens[:, :-1], "labels": labels})
    out = theirs(tokens[:, :-1], output_router_logits=True)
    of_layers = [
        load_balancing_loss_func((logits,), model.args.n_experts, model.args.n_active_experts)
        for logits in out.router_logits
    ]
    expected: Any = sum(of_layers) / len(of_layers)
    assert float(found) == pytest.approx(float(expected.detach()), rel=1e-5)
    assert abs(float(out.aux_loss.detach()) - float(found)) > 1e-3, "transformers' own is over all layers"
    cross_entropy = F.cross_entropy(out.logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE)
    (cross_entropy + model.args.balance_loss * expected).backward()
    assert_same(gradients, model, theirs, theirs_of)


def assert_balance_loss_is_the_formula(model: Any, plain: Any, batch: Any, kind: type[Step] = Step) -> None:
    """Compare the balance loss of a step, and the gradients of its whole loss, with those that autograd computes.

    Args:
        plain: the same model without a balance loss, whose router has sigmoid scores.
    """
    seen: list[tuple[Tensor, Tensor]] = []

    def look(layer: Any, inputs: Any) -> None:
        x_TD = inputs[0].flatten(0, 1)
        scores_TE = F.linear(x_TD, layer.router).sigmoid()
        seen.append((scores_TE / scores_TE.sum(dim=-1, keepdim=True), layer.route(x_TD)[1]))

    for layer in plain.experts():
        layer.register_forward_pre_hook(look)
    gradients, found = balanced_gradients(model, batch, kind)
    tokens, arguments = model_arguments(batch, token_loss, {})
    total = plain(tokens, **arguments).total / (batch["labels"] != IGNORE).sum()
    assert len(seen) == len(plain.experts())
    of_layers = [
        model.args.n_experts
        * (
            F.one_hot(chosen_TK, model.args.n_experts).sum(dim=1).float().mean(dim=0) * probabilities_TE.mean(dim=0)
        ).sum()
        for probabilities_TE, chosen_TK in seen
    ]
    expected: Any = sum(of_layers) / len(of_layers)
    assert float(found) == pytest.approx(float(expected.detach()), rel=1e-5)
    (total + model.args.balance_loss * expected).backward()
    assert_same(gradients, model, plain, dict)


def assert_steps_equal(model: Decoder, theirs: Any) -> None:
    """titanlite's step against a plain loop: clip, AdamW with its groups, warm-up."""
    theirs = theirs.train()
    optimizer = build_optimizer(model, Optimizer(), seed=0)
    vectors = {name: p for name, p in theirs.named_parameters() if p.ndim < 2 or "conv1d" in name}
    decayed = [p for name, p in theirs.named_parameters() if name not in vectors]
    plain = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1},
         {"params": [*vectors.values()], "weight_decay": 0.0}],
        betas=(0.9, 0.95),
    )  # fmt: skip
    world()
    generator = torch.Generator().manual_seed(2)
    batches = torch.randint(0, model.args.vocab_size // 4, (20, 2, 33), generator=generator)
    found, expected = [], []
    for step, tokens in enumerate(batches, 1):
        lr = learning_rate(step, peak=3e-3, end=20, config=LRScheduler(warmup_steps=5))
        set_learning_rate(optimizer, lr)
        set_learning_rate(plain, lr)
        batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}
        found.append(float(plain_step(model, optimizer, max_norm=1.0)([batch]).loss))
        loss = theirs(tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        plain.step()
        plain.zero_grad()
        expected.append(float(loss.detach()))
    assert expected[-1] < 0.8 * expected[0]
    assert found == pytest.approx(expected, rel=1e-4)


def plain_step(
    model: Any, optimizer: torch.optim.Optimizer, kind: type[Step] = Step, *, max_norm: float = 0.0, **options: Any
) -> Step:
    """Return the step of a model on a single process that does not shard it."""
    config = Config.model_validate({"training": {"max_norm": max_norm}})
    mesh = build_mesh(config.parallelism, world_size=1, device_type="cpu")
    return kind(config=config, model=model, optimizer=optimizer, mesh=mesh, **options)
