"""Compile and float8 through the same path as everything else."""

import logging
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.helpers import TinyRun, run_ranks
from tests.layouts import built, degrees, one_step, trained
from titanlite.models.base import Model
from titanlite.models.llama3 import Llama3, Llama3Args
from titanlite.parallelize.compile import compile_blocks
from titanlite.runtime.errors import UserError
from titanlite.schema import Config, Float8
from titanlite.techniques.float8.layers import check_float8, convert_to_float8

ARGS = Llama3Args(dim=32, n_layers=2, n_heads=2, n_kv_heads=1, hidden_dim=40, vocab_size=64, max_seq_len=16)


def trace_blocks(model: Model, **_: object) -> None:
    """Compile with a backend that is ready in a second; graphs are the same for any backend."""
    compile_blocks(model, backend="aot_eager")


def compile_counts(rank: int, world_size: int, config: Config) -> tuple[int, list[str]]:
    with patch("titanlite.parallelize.compile_blocks", trace_blocks):
        run = built(rank, world_size, config)
    for _ in range(3):
        one_step(run)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return graphs, [name for name, _ in run.model.named_parameters()]


@pytest.mark.slow
def test_compiled_blocks_give_the_same_losses(tiny: TinyRun) -> None:
    options = [*degrees(1, 2), "--training.steps=3"]
    run_ranks(trained, 2, tiny.config("--job.name=eager", *options, world_size=2))
    compiled = ["--compile.enable", "--activation_checkpoint.mode=selective"]
    config = tiny.config("--job.name=compiled", *compiled, *options, world_size=2)
    run_ranks(trained, 2, config, timeout=300)
    assert tiny.losses("compiled") == pytest.approx(tiny.losses("eager"), rel=1e-5)


def test_blocks_share_one_graph_and_names_stay(tiny: TinyRun) -> None:
    config = tiny.config("--compile.enable", "--activation_checkpoint.mode=full")
    [(graphs, names)] = run_ranks(compile_counts, 1, config, timeout=300)
    assert graphs == 1
    [plain] = run_ranks(parameter_names, 1, tiny.config("--job.name=plain"))
    assert names == plain


def parameter_names(rank: int, world_size: int, config: Config) -> list[str]:
    return [name for name, _ in built(rank, world_size, config).model.named_parameters()]


def meta_model(**changes: Any) -> Llama3:
    with torch.device("meta"):
        return Llama3(Llama3Args(**{**vars(ARGS), **changes}))


def test_float8_logs_what_it_converts_and_what_it_keeps(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = meta_model()
    monkeypatch.setattr(logging.getLogger("titanlite"), "propagate", True)
    with caplog.at_level(logging.INFO, logger="titanlite"):
        float8 = Float8(enable=True, emulate=True, skip_small=False, filter_fqns=["wo"])
        convert_to_float8(model, float8=float8, shard_degree=1)
    linears = [(name, module) for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    converted = {name for name, module in linears if type(module).__name__ == "Float8Linear"}
    assert converted == {f"layers.{layer}.attention.{name}" for layer in (0, 1) for name in ("wq", "wk", "wv")}
    assert len(linears) == 2 * 7 + 1
    messages = [record.getMessage() for record in caplog.records if record.name.startswith("titanlite")]
    assert messages[0].startswith("float8 (tensorwise): converted 6 linear layers: layers.0.attention.wq")
    reasons = {message.split("(")[1].split(")")[0] for message in messages[1:]}
    assert reasons == {
        "named by filter_fqns: wo",
        "float8 matmuls need sizes that are multiples of 16",
        "the loss computes its matmul itself",
    }


def test_float8_that_would_do_nothing_is_an_error() -> None:
    with pytest.raises(UserError, match="no layer can be converted"):
        convert_to_float8(meta_model(dim=36), float8=Float8(enable=True, emulate=True), shard_degree=1)
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="this machine has no hardware float8"):
            check_float8(Float8(enable=True))


@pytest.mark.parametrize(
    "recipe",
    ["tensorwise", *(pytest.param(it, marks=pytest.mark.nightly) for it in ("rowwise", "rowwise_with_gw_hp"))],
)
def test_float8_trains(tiny: TinyRun, recipe: str) -> None:
    sizes = [
        "--model.args.dim=48",
        "--model.args.hidden_dim=64",
        "--training.steps=4",
        "--optimizer.lr=1e-3",
        *degrees(1, 2),
    ]
    float8 = ["enable=true", "emulate=true", "skip_small=false", f"recipe_name={recipe}"]
    options = [*sizes, *(f"--quantize.linear.float8.{option}" for option in float8)]
    run_ranks(trained, 2, tiny.config("--job.name=float8", *options, world_size=2))
    run_ranks(trained, 2, tiny.config("--job.name=plain", *sizes, world_size=2))
    assert tiny.losses("float8") != tiny.losses("plain")
    assert tiny.losses("float8") == pytest.approx(tiny.losses("plain"), rel=0.03)


def test_float8_without_compile_is_refused(tiny: TinyRun) -> None:
    with pytest.raises(UserError, match=r"is slower than bfloat16 without compile\.enable = true"):
        tiny.config("--quantize.linear.float8.enable")
