"""Prediction of the token after the next, against the module of transformers and plain formulas of the loss."""

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast, get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from transformers.modeling_layers import MtpLayer
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer, DeepseekV3RMSNorm

from tests.support import models
from tests.support.distillation import Given
from tests.support.families import FAMILIES, built, oracle, renamed
from tests.support.models import plain_step
from tests.support.weights import one_process, random_model, save_model, small_toml
from titanlite.batch import IGNORE, Batch
from titanlite.loss import token_loss
from titanlite.models.decoder import Decoder
from titanlite.models.initial import Constant
from titanlite.models.layers import RMSNorm
from titanlite.models.multi_token import look_ahead
from titanlite.observer import OnPhase
from titanlite.ops.attention import SequencePart
from titanlite.ops.cpu import CpuKernels
from titanlite.ops.kernels import set_kernels
from titanlite.parallelize.activation_checkpoint import RecomputePolicy, apply_activation_checkpoint
from titanlite.parallelize.materialize import draw_weights
from titanlite.schema import Distill
from titanlite.step import model_arguments, no_observer
from titanlite.techniques.context.sequences import split_batch
from titanlite.techniques.distill.divergence import distilled_loss
from titanlite.tools.convert.generation import Generator, Sampler
from titanlite.tools.convert.source import load_model, open_source

WEIGHT = 0.3
TOKENS = torch.randint(0, 101, (2, 41), generator=torch.Generator().manual_seed(1))


def predicting(family: str = "deepseek_v3", **changes: Any) -> Decoder:
    """Return a small model that predicts the token after the next, with random weights."""
    model = built(family, **changes)
    model.predict_further(WEIGHT)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        known = {name for name, _ in built(family).named_parameters()}
        for name, parameter in [pair for pair in model.named_parameters() if pair[0] not in known]:
            center = isinstance(model.init_weight(name, parameter.shape), Constant)
            parameter.copy_(center + 0.2 * torch.randn(parameter.shape, generator=generator))
    set_kernels(model, CpuKernels())
    return model


def measured(model: Decoder, labels: Tensor, tokens: Tensor = TOKENS[:, :-1], **options: Any) -> Any:
    """Return the loss of a model for a batch of whole sequences, as a step does."""
    tokens, arguments = model_arguments(look_ahead({"tokens": tokens, "labels": labels}), token_loss, {})
    return model(tokens, **arguments, **options)


def theirs_of(model: Decoder, other: Any) -> MtpLayer:
    """Return transformers' module with the same weights."""
    theirs = MtpLayer(other.config, DeepseekV3DecoderLayer, DeepseekV3RMSNorm, 3)
    own = model.layers[-1].state_dict()
    names = {"next_norm": "enorm", "hidden_norm": "hnorm", "join": "eh_proj"}
    found = {f"{their_name}.weight": own[f"{ours}.weight"] for ours, their_name in names.items()}
    found["post_norm.weight"] = model.head.further_norm.weight
    block = {name.replace("block.", "layers.3."): tensor for name, tensor in own.items() if name.startswith("block.")}
    found |= {name.replace("model.layers.3.", "mtp_block."): tensor for name, tensor in renamed(model, block).items()}
    theirs.load_state_dict(found)
    return theirs


def test_the_module_is_that_of_transformers() -> None:
    model = predicting()
    other = oracle(built("deepseek_v3"))
    theirs = theirs_of(model, other)
    tokens = TOKENS[:, :-1]
    seen: list[Any] = []
    model.head.further_norm.register_forward_hook(lambda _module, _args, out: seen.append(out))
    measured(model, TOKENS[:, 1:])
    with torch.no_grad():
        hidden_BLD = other.model(tokens).last_hidden_state
        positions = other.model.rotary_emb(hidden_BLD, torch.arange(40)[None])
        mask = torch.full((40, 40), -torch.inf).triu(1)[None, None]
        next_BLD = other.model.embed_tokens(TOKENS[:, 1:])
        expected = theirs(next_BLD, hidden_BLD, positions, mask, None, None)
    assert expected.std() > 0.1
    assert (seen[0] - expected)[:, :-1].abs().max() < 1e-5


SEVERAL = {"llama3": models.SMALL, "qwen3": models.DENSE, "qwen3_moe": models.MOE}


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", [*FAMILIES, *SEVERAL])
def test_recomputation_and_hooks_of_kept_tensors_change_no_gradient(family: str, dtype: torch.dtype) -> None:
    """Nor do activations on the host, which are such hooks. Within them, linear layers keep other tensors. Yet the
    gradients of a tensor that several layers take are added up in one order."""

    def gradients(mode: str) -> dict[str, Tensor]:
        model = predicting(family) if family in FAMILIES else models.built(SEVERAL[family])
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
        set_kernels(model, CpuKernels(hardware_bfloat16=False))
        if mode in get_args(RecomputePolicy):
            policies: list[RecomputePolicy] = [cast(RecomputePolicy, mode)] * len(model.layers)
            apply_activation_checkpoint(model, policies)
        with saved_tensors_hooks(lambda kept: kept, lambda kept: kept) if mode == "hooks" else nullcontext():
            loss = measured(model, TOKENS[:, 1:]).total if family in FAMILIES else model(TOKENS).float().square().sum()
        loss.backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    expected = gradients("none")
    assert len(expected) > 20
    for mode in ("full", "op", "hooks"):
        found = gradients(mode)
        assert [name for name in expected if not torch.equal(found[name], expected[name])] == [], mode


def plain_loss(model: Decoder, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Losses of the next token and of the one after it, by whole logits of the model without its own loss."""
    tokens = TOKENS[:, :-1]
    cos_LH, sin_LH = model.rope_cos[0, :40], model.rope_sin[0, :40]
    x_BLD = embedded_BLD = model.tok_embeddings(tokens)
    for block in model.layers[:-1]:
        x_BLD = block(x_BLD, cos_LH, sin_LH, None)
    hidden_BLD = model.head.norm(x_BLD)
    next_BLD = torch.cat([embedded_BLD[:, 1:], torch.zeros_like(embedded_BLD[:, :1])], dim=1)
    further_BLD = model.layers[-1](hidden_BLD, next_BLD, cos_LH, sin_LH, None)
    total = partial(F.cross_entropy, ignore_index=IGNORE, reduction="sum")
    own = total(model.head.output(hidden_BLD).flatten(0, 1), labels.flatten())
    after = torch.full_like(labels, IGNORE)
    for row, place in [(row, place) for row in range(2) for place in range(39)]:
        if labels[row, place] != IGNORE:
            after[row, place] = labels[row, place + 1]
    return own, total(model.head.output(model.head.further_norm(further_BLD)).flatten(0, 1), after.flatten())


def test_loss_and_gradients_are_those_of_plain_formulas() -> None:
    labels = TOKENS[:, 1:].clone()
    labels[0, 11] = labels[1, 20:25] = IGNORE
    model = predicting()
    found = measured(model, labels)
    found.total.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    own, further = plain_loss(model, labels)
    (own + WEIGHT * further).backward()
    assert float(found.cross_entropy) == pytest.approx(float(own.detach()), rel=1e-5)
    assert float(found.metrics["multi_token_loss"]) == pytest.approx(float(further.detach()), rel=1e-5)
    assert float(found.total.detach()) == pytest.approx(float((own + WEIGHT * further).detach()), rel=1e-5)
    for name, parameter in model.named_parameters():
        gradient, expected = gradients[name], parameter.grad
        assert gradient is not None, name
        assert expected is not None, name
        assert (gradient - expected).abs().max() < 1e-4 * expected.abs().max() + 1e-8, name


@pytest.mark.usefixtures("single_process_group")
def test_a_balance_loss_counts_the_experts_of_the_module() -> None:
    model, plain = (predicting(balance_loss=weight) for weight in (0.3, 0.0))
    batch = look_ahead({"tokens": TOKENS[:, :-1], "labels": TOKENS[:, 1:]})
    models.assert_balance_loss_is_the_formula(model, plain, batch)


@pytest.mark.parametrize("family", ["olmo3", "deepseek_v3"])
def test_documents_are_predicted_as_if_alone(family: str) -> None:
    model = predicting(family)
    rows = [[19, 21], [40]]
    tokens, labels = TOKENS[:, :-1], TOKENS[:, 1:].clone()
    labels[0, 18] = labels[:, -1] = IGNORE
    packed = measured(model, labels, documents=models.documents(rows))
    parts = [
        part
        for row, sequence in zip(rows, torch.stack([tokens, labels], 2), strict=True)
        for part in sequence.split(row)
    ]
    alone = [measured(model, part[None, :, 1], part[None, :, 0]) for part in parts]
    total = sum(float(loss.metrics["multi_token_loss"]) for loss in alone)
    assert float(packed.metrics["multi_token_loss"]) == pytest.approx(total, rel=1e-5)


class Taught:
    def __call__(self, batch: Batch, on_phase: OnPhase) -> dict[str, Any]:
        drawn = (torch.randn(size, generator=torch.Generator().manual_seed(3)) for size in ((2, 40, 16), (101, 16)))
        return {"teacher": Given(*drawn)}


@pytest.mark.usefixtures("single_process_group")
def test_a_teacher_teaches_the_next_token_alone() -> None:
    batch = look_ahead({"tokens": TOKENS[:, :-1], "labels": TOKENS[:, 1:]})
    taught: Any = partial(distilled_loss, distill=Distill(ratio=0.6))
    found = []
    for loss, targets in ((token_loss, None), (taught, Taught())):
        model = predicting()
        optimizer = torch.optim.SGD(model.parameters())
        losses = plain_step(model, optimizer, loss_function=loss, targets=targets).accumulate([batch], no_observer)
        totals, metrics = losses.total, losses.metrics
        found.append((metrics["multi_token_loss"], model.layers[-1].get_submodule("join").weight.grad, totals))
    (alone, gradient, total), (further, its_gradient, its_total) = found
    assert torch.equal(further, alone)
    assert torch.equal(its_gradient, gradient)
    assert abs(its_total - total) > 0.1


def test_a_loss_that_returns_something_else_is_left_to_the_step() -> None:
    tokens = torch.stack([TOKENS, TOKENS], dim=-1)
    assert predicting()(tokens, loss=lambda *_: 3.0, further=lambda *_: 3.0) == 3.0


def test_chunks_of_sequences_know_the_tokens_behind_them() -> None:
    """Two documents of 4 tokens, of which the second begins with a token that is not learned."""
    labels = torch.tensor([[11, 12, 13, IGNORE, IGNORE, 16, 17, IGNORE]])
    batch = look_ahead({"tokens": torch.arange(10, 18)[None], "labels": labels})
    assert batch["next_labels"].tolist() == [[12, 13, IGNORE, IGNORE, IGNORE, 17, IGNORE, IGNORE]]
    parts = [split_batch(batch, SequencePart(rank, 2)) for rank in range(2)]
    assert [part["tokens"].tolist() for part in parts] == [[[10, 11, 16, 17]], [[12, 13, 14, 15]]]
    assert [part["next_tokens"].tolist() for part in parts] == [[[11, 12, 17, 10]], [[13, 14, 15, 16]]]
    assert [part["next_labels"].tolist() for part in parts] == [
        [[12, 13, IGNORE, IGNORE]], [[IGNORE, IGNORE, IGNORE, 17]]
    ]  # fmt: skip


@pytest.mark.parametrize("family", ["gemma3", "olmo3"])
def test_its_norms_begin_as_ones(family: str) -> None:
    model = built(family)
    model.predict_further(WEIGHT)
    draw_weights(model, device=torch.device("cpu"), seed=0)
    norms = [module for module in (*model.layers[-1].modules(), model.head.further_norm) if isinstance(module, RMSNorm)]
    assert len(norms) >= 5
    assert all((norm.weight + norm.offset == 1).all() for norm in norms)


def test_the_next_token_is_predicted_as_before() -> None:
    plain, model = built("olmo3"), predicting("olmo3")
    with torch.no_grad():
        assert torch.equal(model(TOKENS), plain(TOKENS))
        evaluated = model(TOKENS[:, :-1], loss=partial(token_loss, labels_BL=TOKENS[:, 1:]))
    assert "multi_token_loss" not in evaluated.metrics
    names = {name for name, _ in model.named_parameters()} - {name for name, _ in plain.named_parameters()}
    assert {name.split(".")[1] for name in names} == {"4", "further_norm"}
    prompt, sampler = TOKENS[0, :9].tolist(), Sampler()
    generators = (Generator(each, kernels=CpuKernels(), vocab_size=101, max_seq_len=64) for each in (plain, model))
    expected, found = ([*generator.stream(prompt, max_new_tokens=12, sampler=sampler)] for generator in generators)
    assert found == expected


def test_flops_count_the_module_and_its_logits() -> None:
    args = built("olmo3").args
    more = predicting("olmo3").flops_per_token(40) - built("olmo3").flops_per_token(40)
    block = args.dim * args.head_size * 12 + 3 * args.dim * args.hidden_dim
    assert more == 6 * (block + args.dim * (args.vocab_size + 2 * args.dim)) + 12 * args.dim * 40


def test_commands_leave_the_module_out(tmp_path: Path) -> None:
    toml = tmp_path / "small.toml"
    toml.write_text(small_toml("llama3").replace("[training]\n", "[training]\nmulti_token_weight = 0.3\n"))
    model = random_model(toml)
    with one_process():
        checkpoint = save_model(tmp_path, model, toml)
    found = load_model(open_source(str(checkpoint)))
    assert len(found.layers) == len(model.layers) - 1
    with torch.no_grad():
        assert torch.equal(found(TOKENS), model.eval()(TOKENS))
