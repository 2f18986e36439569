"""Frozen parameters: the rest trains as if they were constants. With every technique: tests/matrix.py."""

from typing import Any

import numpy as np
import pytest

from tests.support.helpers import THREE_BLOCKS, TinyRun, run_in_turn, run_ranks
from tests.support.layouts import degrees, trained
from titanlite.models.base import build_on_meta
from titanlite.models.decoder import Decoder
from titanlite.models.registry import resolve_model
from titanlite.runtime.errors import UserError
from titanlite.schema import Freeze
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


@pytest.mark.usefixtures("single_process_group")
def test_the_rest_trains_as_beside_constants(tiny: TinyRun) -> None:
    """The oracle trains everything, with a learning rate of 0 for what is frozen here."""
    options = {"frozen": FREEZE, "constant": CONSTANTS}
    several = [
        tiny.config(*degrees(1, 2), *SHORT, option, f"--job.name={name}", world_size=2)
        for name, option in options.items()
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
