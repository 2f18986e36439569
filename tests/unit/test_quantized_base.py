"""Adapters on a base of 8 bits: codes, what a layer computes and keeps, memory, weights that come and go, refusals."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from tests.adapted import adapted, filled
from tests.helpers import TinyRun, mentions, train_on_this_rank
from tests.layouts import whole
from tests.weights import one_process, random_model, save_model, small_toml, state
from titanlite.checks.memory import bytes_per_parameter, weight_bytes
from titanlite.models.base import trainable_parameters, unique_parameters
from titanlite.models.quantized import QuantizedLinear, dequantize, quantize, scales_of
from titanlite.runtime.errors import UserError
from titanlite.schema import Freeze
from titanlite.tools import cli
from titanlite.tools.convert.source import load_model, open_source
from titanlite.tools.plan.estimate import Layout, plan
from titanlite.tools.plan.hardware import find_hardware

QUANTIZED = "--lora.quantize_base=int8"


def weights(rows: int = 30, columns: int = 64) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, columns, generator=generator) * torch.rand(rows, 1, generator=generator)


def test_codes_and_scales_are_those_of_torchao() -> None:
    torchao = pytest.importorskip("torchao.quantization", reason="torchao is not installed (pip install -e '.[dev]')")
    weight = weights()
    layer = torch.nn.Linear(64, 30, bias=False)
    layer.weight.data.copy_(weight)
    torchao.quantize_(layer, torchao.Int8WeightOnlyConfig(version=2))
    theirs: Any = layer.weight
    codes, scale = quantize(weight)
    assert torch.equal(theirs.qdata, codes)
    assert torch.equal(theirs.scale.flatten(), scale)
    assert torch.equal(theirs.dequantize(), dequantize(codes, scale))


def test_rows_are_quantized_by_themselves_with_a_small_error() -> None:
    weight = weights()
    weight[3] = 0
    weight[4] *= 1e-20
    codes, scale = quantize(weight)
    for first, last in ((0, 7), (7, 30), (5, 5)):
        part = quantize(weight[first:last])
        assert torch.equal(part[0], codes[first:last])
        assert torch.equal(part[1], scale[first:last])
    error = (dequantize(codes, scale) - weight).abs()
    assert (error <= 0.5 / 127 * weight.abs().amax(dim=1, keepdim=True) + 1e-37).all()
    assert not dequantize(codes, scale)[3].any()
    assert 1e-4 < error.norm() / weight.norm() < 0.03


@pytest.mark.parametrize("of_x", [torch.float32, torch.bfloat16])
def test_a_layer_multiplies_with_the_dequantized_weight_and_keeps_codes_only(of_x: torch.dtype) -> None:
    codes, scale = quantize(weights())
    x = weights(12).view(3, 4, 64).to(of_x).requires_grad_()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        out: Tensor = QuantizedLinear.apply(x, codes, scale, of_x)  # pyright: ignore
    assert [tensor.dtype for tensor in kept] == [torch.int8, torch.float32]
    gradient = weights(12, 30).view(3, 4, 30).to(of_x)
    out.backward(gradient)
    exact = x.detach().double().requires_grad_()
    wanted = F.linear(exact, codes.double() * scale.double().unsqueeze(1))
    wanted.backward(gradient.double())
    assert x.grad is not None
    assert exact.grad is not None
    assert (out.dtype, x.grad.dtype) == (of_x, of_x)
    for found, value in ((out, wanted), (x.grad, exact.grad)):
        limit = 1e-6 if of_x == torch.float32 else 2**-8
        assert (found.double() - value).norm() < limit * value.norm()


@pytest.mark.long
def test_compiled_code_keeps_codes_only() -> None:
    """The compiler would keep converted weights, which take the memory of an unsharded model."""
    one, other = quantize(weights()), quantize(weights(64, 30))
    kept: list[Tensor] = []

    def two_layers(x: Tensor) -> Tensor:
        hidden: Tensor = QuantizedLinear.apply(x, *one, x.dtype)  # pyright: ignore
        return QuantizedLinear.apply(F.silu(hidden), *other, x.dtype)  # pyright: ignore

    compiled = torch.compile(two_layers, backend="aot_eager")
    x = weights(200).bfloat16().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        out = compiled(x)
    out.sum().backward()
    assert x.grad is not None
    of_weight = [tensor.dtype for tensor in kept if tensor.shape in ((30, 64), (64, 30))]
    assert of_weight
    assert {*of_weight} == {torch.int8}
    torch.compiler.reset()


@pytest.mark.parametrize("family", ["llama3", "qwen3_moe"])
def test_weights_of_targets_are_quantized_from_the_initial_values(family: str) -> None:
    base = dict(unique_parameters(filled(adapted(family, rank=None))))
    freeze = Freeze(dtype="bfloat16")
    model = filled(adapted(family, targets=["layers.*.w[qv]"], freeze=freeze, quantize_base="int8"))
    found = dict(unique_parameters(model))
    scales = scales_of(found)
    assert [*scales] == [f"layers.{layer}.attention.{w}.weight" for layer in range(2) for w in ("wq", "wv")]
    trained = trainable_parameters(model).keys()
    assert len(trained) == 2 * len(scales)
    for parameter, value in base.items():
        if parameter in scales:
            codes, scale = quantize(value)
            assert found[parameter].dtype == torch.int8
            assert torch.equal(found[parameter], codes)
            assert torch.equal(found[scales[parameter]], scale)
        else:
            assert torch.equal(found[parameter], value.bfloat16()), parameter
    assert found.keys() - base.keys() - {*scales.values()} == trained


@pytest.mark.long
def test_a_plan_and_a_check_count_a_byte_for_each_weight_and_a_scale_for_each_row(tiny: TinyRun) -> None:
    size = "--model.args={n_layers=1, dim=48, hidden_dim=80, n_heads=4, n_kv_heads=1, vocab_size=264}"
    config = tiny.config("--lora.rank=4", "--lora.quantize_base=int8", "--freeze.dtype=bfloat16", size,
                         "--training.mixed_precision_param=bfloat16", world_size=2)  # fmt: skip
    model = adapted(n_layers=1, vocab_size=264, quantize_base="int8")
    parameters = dict(unique_parameters(model))
    scales = scales_of(parameters)
    adapters = sum(parameter.numel() for parameter in trainable_parameters(model).values())
    codes = sum(parameters[name].numel() for name in scales)
    rows = sum(parameters[name].numel() for name in scales.values())
    assert (len(scales), rows) == (7, sum(parameters[name].shape[0] for name in scales))
    others = sum(parameter.numel() for parameter in parameters.values()) - adapters - codes - rows
    planned = plan(config, Layout(2, find_hardware("H100"), 8))
    assert planned.most("parameters") == (4 * adapters + codes + 4 * rows + 2 * others) / 2
    assert planned.most("gradients") == 4 * adapters / 2
    numbers = 4 * 2 * len(model.layers) * 7  # AdamW's count of steps, of each tensor
    assert planned.most("optimizer") == 8 * adapters / 2 + numbers
    assert weight_bytes(model, config) == 4 * adapters + codes + 4 * rows + 2 * others
    in_memory, _ = bytes_per_parameter(model, config)
    whole = adapters + codes + rows + others
    assert in_memory * whole == pytest.approx(16 * adapters + codes + 4 * rows + 2 * others)


LORA = '[lora]\nrank = 3\nalpha = 12\nquantize_base = "int8"\n'
TOKENS = torch.arange(64).view(2, 32) * 5 % 384


@pytest.mark.long
def test_checkpoints_keep_codes_and_merged_logits_are_those_of_the_adapters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    toml = tmp_path / "small.toml"
    toml.write_text(small_toml("llama3") + LORA)
    model = random_model(toml, scale=2).eval()
    with torch.no_grad():
        wanted = model(TOKENS)
    with one_process():
        checkpoint = save_model(tmp_path, model, toml)
    source = open_source(str(checkpoint))
    assert source.adapters is not None
    assert len(source.adapters.layers) == 14
    for parameter, value in state(model).items():
        stored = source.adapters.read(parameter)
        assert stored.dtype == value.dtype
        assert torch.equal(stored.float(), value.float())
    merged = load_model(source)
    assert not [parameter for parameter, _ in merged.named_parameters() if "lora" in parameter or "scale" in parameter]
    with torch.no_grad():
        assert (merged(TOKENS) - wanted).abs().max() < 1e-4
        assert wanted.abs().max() > 0.5
    assert cli.run(["checkpoint", "export", str(checkpoint), "--out", f"{tmp_path}/hf", "--merge", "--check"]) == 0
    assert mentions(capsys.readouterr().out, "transformers", "128 tokens")
    assert cli.run(["checkpoint", "export", str(checkpoint), "--out", f"{tmp_path}/peft"]) == 0
    adapters = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    assert len(adapters) == 28
    found = adapters["base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"]
    assert torch.equal(found, state(model)["layers.1.attention.wq.lora_a"])


@pytest.mark.long
def test_weights_are_quantized_when_they_are_loaded_and_a_quantized_base_needs_the_option(
    tiny: TinyRun, tmp_path: Path
) -> None:
    """The base is a checkpoint of ours, a Hugging Face folder, or one that is quantized already."""
    options = ["--training.steps=1", "--lora.rank=3", "--optimizer.lr=0", "--metrics.layers.freq=1"]
    with one_process():
        plain = train_on_this_rank(tiny.config("--training.steps=1", "--job.name=base"), 0, 1)
        base = dict(unique_parameters(plain.model))
        ours, folder = f"{tiny.folder}/outputs/base", f"{tiny.folder}/hf"
        assert cli.run(["checkpoint", "export", ours, "--out", folder]) == 0
        for name, path in (("int8", ours), ("foreign", folder), ("again", f"{tiny.folder}/outputs/int8")):
            config = tiny.config(*options, QUANTIZED, f"--checkpoint.initial_load_path={path}", f"--job.name={name}")
            found = dict(unique_parameters(train_on_this_rank(config, 0, 1).model))
            scales = scales_of(found)
            assert len(scales) == 7
            for parameter, value in base.items():
                if parameter in scales:
                    codes, scale = quantize(whole(value))
                    assert torch.equal(whole(found[parameter]), codes), (name, parameter)
                    assert torch.equal(whole(found[scales[parameter]]), scale), (name, parameter)
                else:
                    assert torch.equal(whole(found[parameter]), whole(value)), (name, parameter)
        # Records of layers have weights, and no codes or scales.
        record = json.loads(Path(tiny.folder, "outputs", "int8", "layers.jsonl").read_text().splitlines()[0])
        eight_bits = {*scales, *scales.values()}
        measured = [whole(found[name]) for name in found.keys() - eight_bits if name.startswith("layers.0.")]
        squares = sum(value.double().square().sum() for value in measured)
        assert record["layers"]["layers.0"]["parameters"]["norm"] == pytest.approx(float(squares) ** 0.5)
        initial = f"--checkpoint.initial_load_path={tiny.folder}/outputs/int8"
        with pytest.raises(UserError, match=r"lora\.quantize_base: .* torch\.int8"):
            train_on_this_rank(tiny.config(*options, initial, "--job.name=refused"), 0, 1)
        other = tiny.config(*options, "--job.name=int8", "--training.steps=2")
        with pytest.raises(UserError, match=r"lora\.quantize_base .*int8.*None"):
            train_on_this_rank(other, 0, 1)
