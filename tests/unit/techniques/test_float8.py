"""Float8: layers that are converted, reasons of those that are not, refusals, and training."""

import re
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tests.support.helpers import TinyRun, mentions, train_on_this_rank
from titanlite.config.load import load
from titanlite.models.base import Model
from titanlite.models.layers import Linear
from titanlite.models.llama3 import Llama3, Llama3Args
from titanlite.models.qwen3_moe import Qwen3Moe, Qwen3MoeArgs
from titanlite.runtime.console import install_hint
from titanlite.runtime.errors import UserError
from titanlite.schema import Float8
from titanlite.techniques.float8.layers import check_float8, choose_layers, convert_to_float8, float8_parameters
from titanlite.tools.plan.estimate import Layout
from titanlite.tools.plan.hardware import find_hardware
from titanlite.tools.plan.search import Layouts

LARGE = Llama3Args(
    dim=4096, n_layers=1, n_heads=32, n_kv_heads=8, hidden_dim=14336, vocab_size=512, max_seq_len=16
)  # fmt: skip
"""One block with the sizes of Llama 3 8B."""


def on_meta(model_cls: type[Model], args: Any) -> Any:
    with torch.device("meta"):
        return model_cls(args)


def test_small_layers_stay_and_the_log_has_the_reason(log: Callable[[], list[str]]) -> None:
    pytest.importorskip("torchao")
    convert_to_float8(on_meta(Llama3, LARGE), float8=Float8(enable=True), shard_degree=8)
    converted, small, output = log()
    assert mentions(
        converted, "tensorwise", 5, "layers.0.attention.wq", "layers.0.attention.wo", "layers.0.feed_forward.w1"
    )
    assert mentions(converted, "2 of 4096 x 4096", "2 of 14336 x 4096", "1 of 4096 x 14336")
    assert mentions(small, 2, "1024 x 4096", "layers.0.attention.wk", "layers.0.attention.wv")
    assert mentions(output, 1, "head.output")


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_the_limits_are_those_of_torchao(recipe: str) -> None:
    """Sizes are on both sides of each limit."""
    utils = pytest.importorskip("torchao.float8.float8_linear_utils")
    wanted = utils._auto_filter_for_recipe(recipe, filter_fqns=[])
    sizes = [16, 1024, 1040, 2048, 2064, 4096, 4112, 8192, 1000]
    found = {}
    for rows in sizes:
        for columns in sizes:
            model = torch.nn.Module()
            model.layer = torch.nn.Linear(columns, rows, bias=False, device="meta")
            model.head = torch.nn.Identity()  # the last child is the head
            both = [bool(choose_layers(model, Float8(recipe_name=name))[0]) for name in (recipe, "rowwise_with_gw_hp")]  # pyright: ignore
            found[rows, columns] = both[0]
            assert both[0] == wanted(model.layer, "layer"), (rows, columns)
            assert recipe == "tensorwise" or both[0] == both[1]
    assert set(found.values()) == {True, False}


def test_nothing_to_convert_names_the_option(tiny: TinyRun) -> None:
    pytest.importorskip("torchao")
    args = Llama3Args(dim=64, n_layers=1, n_heads=4, n_kv_heads=2, hidden_dim=64, vocab_size=64, max_seq_len=16)
    with pytest.raises(UserError, match="skip_small = false"):
        convert_to_float8(on_meta(Llama3, args), float8=Float8(enable=True), shard_degree=1)
    with pytest.raises(UserError) as error:
        convert_to_float8(on_meta(Llama3, args), float8=Float8(enable=True, filter_fqns=["layers"]), shard_degree=1)
    assert "skip_small" not in str(error.value)


def test_experts_stay_and_the_log_has_the_reason(log: Callable[[], list[str]]) -> None:
    pytest.importorskip("torchao")
    args = Qwen3MoeArgs(
        dim=64, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=32, hidden_dim=64, n_experts=4, n_active_experts=2,
        vocab_size=64, max_seq_len=16,
    )  # fmt: skip
    model = on_meta(Qwen3Moe, args)
    convert_to_float8(model, float8=Float8(enable=True, skip_small=False), shard_degree=1)
    [line] = [line for line in log() if "experts" in line]
    assert mentions(line, 6, "layers.0.feed_forward.w1", "layers.0.feed_forward.w2", "layers.0.feed_forward.w3")
    assert mentions(log()[0], "tensorwise", 8, "layers.0.attention.wq")


def test_rows_that_do_not_divide_are_not_gathered_in_float8(log: Callable[[], list[str]]) -> None:
    """FSDP pads uneven shards, and cannot pad these: ranks would take part in an all-gather with different sizes."""
    pytest.importorskip("torchao")
    for shard_degree, wrapped in ((8, True), (3, False), (1, False)):
        model = on_meta(Llama3, LARGE)
        convert_to_float8(model, float8=Float8(enable=True), shard_degree=shard_degree)
        assert hasattr(model.layers[0].attention.wq.weight, "_precomputed_scale") is wrapped
    [line] = [line for line in log() if "gathered" in line]
    assert mentions(line, 5, 3, "layers.0.attention.wq", "layers.0.attention.wo", "layers.0.feed_forward.w1")


@pytest.mark.usefixtures("single_process_group")
def test_parts_of_split_layers_need_multiples_of_16_too(log: Callable[[], list[str]]) -> None:
    pytest.importorskip("torchao")
    args = Llama3Args(dim=64, n_layers=1, n_heads=4, n_kv_heads=2, hidden_dim=96, vocab_size=64, max_seq_len=16)
    model, axis = on_meta(Llama3, args), SimpleNamespace(size=lambda: 4, get_group=lambda: dist.group.WORLD)
    convert_to_float8(model, float8=Float8(enable=True, skip_small=False), shard_degree=1, tensor=axis)  # pyright: ignore
    converted = {name for name, module in model.named_modules() if type(module).__name__ == "SplitFloat8Linear"}
    assert converted == {"layers.0.attention.wq", "layers.0.attention.wo"}
    assert float8_parameters(model).keys() == {model.get_parameter(f"{name}.weight") for name in converted}
    assert any(mentions(line, 5, 16, "layers.0.attention.wk", "layers.0.attention.wv") for line in log())


@pytest.mark.parametrize(
    ("capability", "recipe", "refusal"),
    [
        (None, "tensorwise", r"enable: .* 8\.9.*emulate = true"),
        ((8, 9), "tensorwise", None),
        ((8, 9), "rowwise", r"recipe_name: rowwise.*9\.0.*8\.9.*tensorwise"),
        ((9, 0), "rowwise", None),
        ((9, 0), "mxfp8", r"recipe_name: mxfp8.*10\.0.*9\.0.*tensorwise"),
        ((10, 0), "mxfp8", None),
    ],
)
def test_what_the_machine_cannot_do_is_refused(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None, recipe: Any, refusal: str | None
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    check_float8(Float8(enable=True, recipe_name=recipe, emulate=True))
    if refusal is None:
        check_float8(Float8(enable=True, recipe_name=recipe))
        return
    with pytest.raises(UserError, match=refusal):
        check_float8(Float8(enable=True, recipe_name=recipe))


def test_a_missing_torchao_is_reported(tiny: TinyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titanlite.techniques.float8.find_spec", lambda name: None)
    with pytest.raises(UserError, match=re.escape(f"needs torchao: {install_hint('float8')}")):
        tiny.config("--quantize.linear.float8.enable", "--compile.enable")


def rounded_in_blocks(x: Tensor, dim: int) -> Tensor:
    """Round values to float8 with the smallest power of two, for each 32 along a dim, that lets the largest fit."""
    blocks = x.float().movedim(dim, -1).unflatten(-1, (-1, 32))
    scale = torch.exp2(torch.ceil(torch.log2(blocks.abs().amax(-1, keepdim=True).clamp(min=1e-9) / 448)))
    return ((blocks / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2).movedim(-1, dim)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_mxfp8_is_the_product_of_blocks_with_one_scale(dtype: torch.dtype, tolerance: float) -> None:
    """Output and gradients, also with tokens that are not whole blocks, and with values that differ in size."""
    pytest.importorskip("torchao")
    from titanlite.techniques.float8.mxfp8 import mxfp8_linear

    torch.manual_seed(0)
    size = torch.logspace(-3, 3, 64)
    x, weight, gradient = torch.randn(2, 24, 64) * size, torch.randn(96, 64) / size, torch.randn(2, 24, 96)
    layer = mxfp8_linear(Linear(64, 96, bias=True).to(dtype), emulate=True)
    layer.load_state_dict({"weight": weight, "bias": torch.ones(96)})
    x, gradient, weight = x.to(dtype).requires_grad_(), gradient.to(dtype), layer.weight.detach()
    out = layer(x)
    out.backward(gradient)
    padded, padded_gradient = (F.pad(tensor.detach().flatten(0, 1), (0, 0, 0, 16)) for tensor in (x, gradient))
    wanted = {
        "output": rounded_in_blocks(padded, 1) @ rounded_in_blocks(weight, 1).T + 1,
        "input": rounded_in_blocks(padded_gradient, 1) @ rounded_in_blocks(weight, 0),
        "weight": rounded_in_blocks(padded_gradient, 0).T @ rounded_in_blocks(padded, 0),
    }
    found = {"output": out.flatten(0, 1), "input": x.grad.flatten(0, 1), "weight": layer.weight.grad}  # pyright: ignore
    plain = padded.float() @ weight.float().T + 1
    assert (plain - wanted["output"]).abs().max() > 0.02 * plain.abs().max(), "nothing is rounded"
    for name, value in found.items():
        assert value.dtype == dtype
        difference = (value.float() - wanted[name][: len(value)]).abs().max() / wanted[name].abs().max()
        assert difference < tolerance, (name, difference)


@pytest.mark.usefixtures("single_process_group")
def test_mxfp8_needs_whole_blocks_also_in_parts(log: Callable[[], list[str]]) -> None:
    pytest.importorskip("torchao")
    args = Llama3Args(dim=64, n_layers=1, n_heads=4, n_kv_heads=2, hidden_dim=80, vocab_size=64, max_seq_len=16)
    axis = SimpleNamespace(size=lambda: 2, get_group=lambda: dist.group.WORLD)
    float8 = Float8(enable=True, skip_small=False, recipe_name="mxfp8")
    for tensor, converted in ((None, {"wq", "wk", "wv", "wo"}), (axis, {"wq", "wo"})):
        model = on_meta(Llama3, args)
        convert_to_float8(model, float8=float8, shard_degree=2, tensor=tensor)  # pyright: ignore
        new = {name.split(".")[-1] for name, module in model.named_modules() if type(module).__name__ == "Mxfp8Linear"}
        assert new == converted
        assert {
            name.split(".")[-2] for name, parameter in model.named_parameters() if parameter in float8_parameters(model)
        } == new
    assert any(mentions(line, 3, 32, "layers.0.feed_forward.w1") for line in log())


def test_mxfp8_without_its_matmul_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchao")
    monkeypatch.setitem(sys.modules, "torchao.prototype.moe_training.mxfp8_linear", None)
    monkeypatch.delitem(sys.modules, "titanlite.techniques.float8.mxfp8", raising=False)
    with pytest.raises(UserError, match="torchao"):
        convert_to_float8(on_meta(Llama3, LARGE), float8=Float8(recipe_name="mxfp8"), shard_degree=1)


def test_a_search_leaves_float8_where_every_layer_is_small() -> None:
    def tried(*options: str) -> list[str]:
        config = load("train_configs/debug.toml", ["--compile.enable", *options])
        return [*Layouts(config, Layout(2, find_hardware("H100"), 8), 8).variants]

    assert tried() == [""]
    assert tried("--quantize.linear.float8.skip_small=false") == ["", "float8"]


SHAPE = ["--model.args.dim=64", "--model.args.hidden_dim=96", "--model.args.n_heads=4", "--model.args.n_kv_heads=2"]


@pytest.mark.nightly
@pytest.mark.usefixtures("single_process_group")
def test_convergence_is_that_of_float32(tiny: TinyRun) -> None:
    """60 steps, emulated on the CPU, end within 2 % of float32, and are not the same."""
    pytest.importorskip("torchao")
    options = [*SHAPE, "--training.steps=60", "--optimizer.lr=3e-3", "--checkpoint.enable=false"]

    def losses(name: str, *more: str) -> list[float]:
        train_on_this_rank(tiny.config(f"--job.name={name}", *options, *more), 0, 1)
        return tiny.losses(name)

    plain = losses("float32")
    assert plain[-1] < 0.5 * plain[0]
    for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8"):
        float8 = ["enable", "emulate", "skip_small=false", f"recipe_name={recipe}"]
        found = losses(recipe, *(f"--quantize.linear.float8.{option}" for option in float8))
        differences = [abs(one / other - 1) for one, other in zip(found, plain, strict=True)]
        assert max(differences) > 1e-3, "float8 was not at work"
        last = sum(found[-10:]) / 10, sum(plain[-10:]) / 10
        assert last[0] == pytest.approx(last[1], rel=0.02), recipe
