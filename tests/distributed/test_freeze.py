"""Frozen parameters: the rest trains as if they were constants, on every layout and with every technique."""

from fnmatch import fnmatchcase
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers import THREE_BLOCKS, TinyRun, run_in_turn, run_ranks
from tests.layouts import built, degrees, trained, whole
from titanlite.checkpoint.state import state_of
from titanlite.models.base import build_on_meta, unique_parameters
from titanlite.models.decoder import Decoder
from titanlite.models.registry import resolve_model
from titanlite.runtime.errors import UserError
from titanlite.schema import Config, Freeze
from titanlite.step import train_step
from titanlite.techniques.freeze import freeze

PATTERNS = '["tok_embeddings.*", "layers.0.*", "layers.*.attention.w[qk].weight", "layers.1.ffn_norm.weight"]'
FREEZE = f"--freeze.parameters={PATTERNS}"
CONSTANTS = (
    f"--optimizer.groups=[{{match={PATTERNS}, lr=0.0, weight_decay=0.0}}, "
    '{match=["layers.[12].attention.w[vo].weight", "layers.[12].attention_norm.weight", "layers.2.ffn_norm.weight", '
    '"layers.[12].feed_forward.*", "head.*"]}]'
)
NO_CLIPPING = "--training.max_norm=0"
SHORT = [THREE_BLOCKS, NO_CLIPPING, "--training.steps=3", "--checkpoint.enable=false"]
MOE = [
    "--model={name='qwen3_moe', flavor='debug', args={dim=32, n_layers=2, vocab_size=259}}",
    '--freeze.parameters=["layers.*.feed_forward.w1", "layers.0.feed_forward.router", "head.output.weight"]',
]  # fmt: skip
TECHNIQUES = {
    "FSDP": degrees(1, 2),
    "HSDP, AC": [*degrees(2, 1), "--activation_checkpoint.mode=full"],
    "in backward": [*degrees(1, 2), "--optimizer.in_backward=true"],
    "bfloat16 frozen": [*degrees(1, 2), "--freeze.dtype=bfloat16"],
    "offload": [*degrees(1, 2), "--training.enable_cpu_offload=true"],
    "disk": [
        *degrees(2, 1), "--training.enable_cpu_offload", "--offload.parameters=disk", "--offload.optimizer=disk",
    ],
    "Muon": [*degrees(1, 2), "--optimizer.name=Muon", "--training.local_batch_size=2"],
    "bfloat16": [*degrees(1, 2), "--training.dtype=bfloat16", "--training.mixed_precision_param=bfloat16"],
}  # fmt: skip


def one_start(rank: int, world_size: int, config: Config) -> float:
    """Train a step that changes the trained parameters alone, and gives only them gradients and optimizer states.

    Returns the norm of the gradients.
    """
    run = built(rank, world_size, config)
    parameters = dict(unique_parameters(run.model))
    expected = {it for it in parameters if not any(fnmatchcase(it, pattern) for pattern in config.freeze.parameters)}
    before = {name: whole(p) for name, p in parameters.items()}
    with_gradient: set[str] = set()
    for name, parameter in parameters.items():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: with_gradient.add(name))
    batches = list(islice(run.batches, run.accumulation))
    result = train_step(
        run.model, batches, optimizer=run.optimizer, group=run.group, max_norm=0.0, loss_function=run.loss_function,
        gradients=run.gradients,
    )  # fmt: skip
    run.batches.close()
    assert with_gradient == expected
    assert [name for name, p in parameters.items() if p.grad is not None] == []
    moments = state_of(run.model, run.optimizer)["optimizer"]
    assert {name.removeprefix("state.").rpartition(".")[0] for name in moments} == expected
    assert {name for name, p in parameters.items() if not torch.equal(whole(p), before[name])} == expected
    if config.freeze.dtype == "bfloat16":
        assert {name for name, p in parameters.items() if p.dtype == torch.bfloat16} == parameters.keys() - expected
    return float(result.grad_norm)


@pytest.mark.usefixtures("single_process_group")
def test_the_rest_trains_as_beside_constants(tiny: TinyRun) -> None:
    """The oracle trains everything, with a learning rate of 0 for what is frozen here."""
    options = {"frozen": FREEZE, "constant": CONSTANTS}
    several = [
        tiny.config(*degrees(1, 2), *SHORT, it, f"--job.name={name}", world_size=2) for name, it in options.items()
    ]
    [frozen, constant] = run_in_turn(trained, 2, several)
    for name, value in constant[0].items():
        np.testing.assert_allclose(frozen[0][name], value, rtol=0, atol=1e-6, err_msg=name)
    single = trained(0, 1, tiny.config(*SHORT, FREEZE, "--job.name=single"))
    for name, value in single.items():
        np.testing.assert_allclose(frozen[0][name], value, rtol=0, atol=2e-6, err_msg=name)
    assert tiny.losses("frozen") == pytest.approx(tiny.losses("constant"), abs=2e-6)
    norms = [[record["grad_norm"] for record in tiny.records(name)] for name in options]
    assert all(mine < theirs * (1 - 1e-4) for mine, theirs in zip(*norms, strict=True)), norms


@pytest.mark.nightly
def test_frozen_bits_never_change_whatever_the_technique(tiny: TinyRun) -> None:
    configs = [
        tiny.config(THREE_BLOCKS, *options, NO_CLIPPING, FREEZE, f"--job.name=case-{number}", world_size=2)
        for number, options in enumerate(TECHNIQUES.values())
    ]
    configs.append(tiny.config(*MOE, *degrees(1, 2), "--job.name=experts", world_size=2))
    for config, norms in zip(configs, run_in_turn(one_start, 2, configs), strict=True):
        assert norms[0] == norms[1] > 0, config.job.name


@pytest.mark.usefixtures("single_process_group")
def test_a_frozen_run_resumes_bit_for_bit_on_another_layout(tiny: TinyRun) -> None:
    options = [THREE_BLOCKS, FREEZE, "--freeze.dtype=bfloat16", "--training.steps=4"]
    for more in (["--job.name=whole"], ["--job.name=parts", "--training.steps=2"], ["--job.name=parts"]):
        trained(0, 1, tiny.config(*options, *more))
    assert tiny.losses("parts") == tiny.losses("whole")
    run_ranks(trained, 2, tiny.config(*options, "--job.name=parts", "--training.steps=5", world_size=2))
    assert len(tiny.losses("parts")) == 5
    with pytest.raises(UserError, match=r"freeze\.parameters .*\[.*\].* None"):
        trained(0, 1, tiny.config(THREE_BLOCKS, "--freeze.dtype=bfloat16", "--job.name=parts", "--training.steps=8"))


def decoder(name: str, *frozen: str, **args: Any) -> Decoder:
    spec = resolve_model(name, "debug", args, None, tokenizer_size=None)
    model = build_on_meta(spec.model_cls, spec.args)
    freeze(model, Freeze(parameters=[*frozen]))
    assert isinstance(model, Decoder)
    return model


@pytest.mark.parametrize("name", ["llama3", "qwen3_moe"])
def test_frozen_weights_save_the_operations_of_their_gradients(name: str) -> None:
    seq_len = 64
    plain = decoder(name)
    whole_flops = plain.flops_per_token(seq_len)
    head = decoder(name, "head.output.weight")
    assert whole_flops - head.flops_per_token(seq_len) == 2 * plain.args.dim * plain.args.vocab_size
    assert decoder(name, "tok_embeddings.*").flops_per_token(seq_len) == whole_flops  # a lookup
    norms = decoder(name, "*norm.weight")
    assert norms.flops_per_token(seq_len) == whole_flops
    blocks = decoder(name, "layers.*")  # the embedding is trained, so backward goes through them
    weights = (whole_flops - 6 * plain.args.dim * plain.args.vocab_size) - 12 * plain.args.n_layers * (
        plain.args.n_heads * plain.args.head_size * seq_len
    )
    assert whole_flops - blocks.flops_per_token(seq_len) == pytest.approx(weights / 3)
    ends_at_head = decoder(name, "layers.*", "tok_embeddings.*")  # forward alone in the blocks
    forward = weights / 3 + 4 * plain.args.n_layers * plain.args.n_heads * plain.args.head_size * seq_len
    assert ends_at_head.flops_per_token(seq_len) == pytest.approx(6 * plain.args.dim * plain.args.vocab_size + forward)
