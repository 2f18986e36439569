"""Adapters in a checkpoint: merged for every command, exported merged, and exported in PEFT's format."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from tests.support.helpers import TinyRun, mentions
from tests.support.weights import AS_CASES, one_process, random_model, save_model, save_random, small_toml, state
from titanlite.checks.preflight import preflight
from titanlite.models.base import Model
from titanlite.runtime.process_group import Ranks
from titanlite.tools import cli
from titanlite.tools.convert.source import load_model, open_source, read_tensor

TOKENS = torch.arange(64).view(2, 32) * 5 % 384
LORA = "[lora]\nrank = 3\nalpha = 12\n"
SCALE = 4.0
LIMIT = 1e-4
"""Largest difference of float32 logits, whose largest is about 2. The merged model rounds W + s B A once, and sums in
another order. These random weights have sharp attention, which multiplies that."""


def export(*words: object) -> int:
    return cli.run(["checkpoint", "export", *map(str, words)])


def refusal(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert export(*words) == 2
    [error] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    return error


def save_adapted(folder: Path, family: str, text: str = LORA, **args: Any) -> tuple[Path, Model]:
    """Save a model with random adapters; return (checkpoint, model)."""
    folder.mkdir(exist_ok=True)
    toml = folder / "small.toml"
    toml.write_text(small_toml(family, **args) + text)
    model = random_model(toml, scale=3)  # with more, attention is so sharp that it multiplies rounding
    with one_process():
        return save_model(folder, model, toml), model.eval()


class Saved(NamedTuple):
    """A checkpoint with adapters, the Hugging Face folder of the same model without them, and what it computes."""

    checkpoint: Path
    base: Path
    model: Model
    logits: Tensor


@pytest.fixture(scope="module", params=AS_CASES)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp(request.param)
    checkpoint, model = save_adapted(folder / "run", request.param)
    plain, _ = save_adapted(folder / "base", request.param, "")
    assert export(plain, "--out", folder / "hf") == 0
    return Saved(checkpoint, folder / "hf", model, logits(model))


@torch.no_grad()
def logits(model: Any, tokens: Tensor = TOKENS) -> Tensor:
    found = model(tokens)
    return found if isinstance(found, Tensor) else found.logits


def transformers_model(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.mark.long
def test_merged_logits_are_those_of_the_adapters(
    saved: Saved, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = logits(load_model(open_source(str(saved.base))))
    assert (base - saved.logits).abs().max() > 0.5
    merged = load_model(open_source(str(saved.checkpoint)))
    assert not [name for name, _ in merged.named_parameters() if "lora" in name]
    assert (logits(merged) - saved.logits).abs().max() < LIMIT

    tensors, name = state(saved.model), "layers.1.attention.wo"
    expected = tensors[f"{name}.weight"] + SCALE * tensors[f"{name}.lora_b"] @ tensors[f"{name}.lora_a"]
    torch.testing.assert_close(read_tensor(open_source(str(saved.checkpoint)), f"{name}.weight"), expected)

    out = tmp_path / "merged"
    assert export(saved.checkpoint, "--out", out, "--merge", "--check") == 0
    assert mentions(capsys.readouterr().out, "transformers", "128 tokens")
    assert (logits(transformers_model(out)) - saved.logits).abs().max() < LIMIT


@pytest.mark.long
def test_a_bfloat16_base_is_merged_without_a_rounding(tmp_path: Path) -> None:
    checkpoint, model = save_adapted(tmp_path / "run", "llama3", f'{LORA}[freeze]\ndtype = "bfloat16"\n')
    assert state(model)["layers.0.attention.wq.weight"].dtype == torch.bfloat16
    wanted = logits(model.float())
    assert (logits(load_model(open_source(str(checkpoint)))) - wanted).abs().max() < LIMIT
    assert export(checkpoint, "--out", tmp_path / "as-it-is", "--merge") == 0
    found = load_file(tmp_path / "as-it-is" / "model.safetensors")
    assert found["model.layers.0.self_attn.q_proj.weight"].dtype == torch.float32
    assert found["model.embed_tokens.weight"].dtype == torch.bfloat16
    assert export(checkpoint, "--out", tmp_path / "narrow", "--merge", "--dtype", "bfloat16") == 0
    narrow = load_file(tmp_path / "narrow" / "model.safetensors")
    assert {tensor.dtype for tensor in narrow.values()} == {torch.bfloat16}
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(narrow[name], found[name].bfloat16())


@pytest.mark.long
def test_peft_loads_the_export_and_computes_the_same(saved: Saved, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed (pip install -e '.[dev]')")
    out = tmp_path / "adapters"
    assert export(saved.checkpoint, "--out", out) == 0
    assert sorted(path.name for path in out.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    loaded = peft.PeftModel.from_pretrained(transformers_model(saved.base), out)
    assert (logits(loaded.eval()) - saved.logits).abs().max() < LIMIT
    assert (logits(loaded.merge_and_unload()) - saved.logits).abs().max() < LIMIT


@pytest.mark.long
@pytest.mark.parametrize("saved", ["llama3"], indirect=True)
def test_the_export_names_layers_as_peft_does_and_the_folder_that_the_run_began_with(
    saved: Saved, tmp_path: Path
) -> None:
    """target_modules has last parts of names where they match no other layer, and else whole names."""
    began = f'[checkpoint]\ninitial_load_path = "{saved.base}"\n'
    for name, text, expected, base in (
        ("all", LORA, ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"], None),
        ("two", f'{LORA}targets = ["*.w[qv]"]\n{began}', ["q_proj", "v_proj"], str(saved.base)),
        ("one", f'{LORA}targets = ["layers.1.attention.wq"]\n', ["model.layers.1.self_attn.q_proj"], None),
    ):
        checkpoint, model = save_adapted(tmp_path / name, "llama3", text)
        out = tmp_path / f"{name}-out"
        assert export(checkpoint, "--out", out, "--dtype", "bfloat16") == 0
        config = json.loads((out / "adapter_config.json").read_text())
        assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 3, 12)
        assert config["target_modules"] == expected
        assert config["base_model_name_or_path"] == base
        tensors = load_file(out / "adapter_model.safetensors")
        assert len(tensors) == {"all": 28, "two": 8, "one": 2}[name]
        found = tensors["base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"]
        assert torch.equal(found, state(model)["layers.1.attention.wq.lora_a"].bfloat16())


@pytest.mark.long
def test_what_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint, _ = save_adapted(tmp_path / "run", "qwen3_moe")
    out = tmp_path / "out"
    (tmp_path / "plain").mkdir()
    plain, _ = save_random(tmp_path / "plain", "llama3")
    assert mentions(refusal(capsys, plain, "--out", out, "--merge"), "step-00000010", "adapters")
    assert "add --merge" in refusal(capsys, checkpoint, "--out", out, "--check")
    toml = tmp_path / "run" / "small.toml"
    model = random_model(toml)
    model.get_buffer("layers.1.feed_forward.bias_E")[2] = 0.25
    with one_process():
        biased = save_model(tmp_path / "run", model, toml, step=11)
    assert "layers.1.feed_forward.bias_E" in refusal(capsys, biased, "--out", out)
    assert export(biased, "--out", out, "--drop", "layers.*.bias_E") == 0
    assert mentions(refusal(capsys, biased, "--out", out), out)


OWN_MODEL = """
from titanlite.models.formats import Entry, Formats, HuggingFace, Table
from titanlite.models.llama3 import Llama3
class Mine(Llama3):
    draws_random = False
    formats = Formats(hugging_face=HuggingFace(
        architecture="M", model_type="m", fields={}, tensors=Table([
            Entry("tok_embeddings.weight", "e"), Entry("head.norm.weight", "n"), Entry("head.output.weight", "o"),
            Entry("layers.{layer}.attention_norm.weight", "a{layer}"),
            Entry("layers.{layer}.ffn_norm.weight", "f{layer}"),
            *(Entry(f"layers.{{layer}}.attention.{w}.weight", f"{w}{{layer}}.weight", transposed=w == "wk")
              for w in ("wq", "wk", "wv", "wo")),
            *(Entry(f"layers.{{layer}}.feed_forward.{w}.weight", f"{w}{{layer}}.weight") for w in ("w1", "w2", "w3")),
        ])))
"""


@pytest.mark.long
def test_a_layer_of_another_layout_can_only_be_merged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, toml = tmp_path / "mine.py", tmp_path / "small.toml"
    file.write_text(OWN_MODEL)
    toml.write_text(small_toml("llama3").replace('name = "llama3"', f'file = "{file}"\nflavor = "debug"') + LORA)
    model = random_model(toml)
    with one_process():
        checkpoint = save_model(tmp_path, model, toml)
    own = "--model-file", file
    error = refusal(capsys, checkpoint, "--out", tmp_path / "out", *own)
    assert mentions(error, "layers.0.attention.wk", "adapter")
    assert export(checkpoint, "--out", tmp_path / "out", "--merge", "--no-tokenizer", *own) == 0


def test_adapters_need_no_place_in_the_table_of_names(tiny: TinyRun) -> None:
    """`check_exports` passes, because PEFT's format has a place for them."""
    config = tiny.config("--lora.rank=4", "--checkpoint.last_save_in_hf=true")
    assert preflight(config, Ranks(0, 1, 0, 1), torch.device("cpu"))


def test_a_base_of_8_bits_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Releases before 0.2 saved such checkpoints. Their codes must not be taken for weights."""
    toml = tmp_path / "small.toml"
    toml.write_text(small_toml("llama3") + LORA)
    model = random_model(toml)
    for layer in model.modules():
        if hasattr(layer, "lora_a"):
            layer.weight_scale = torch.nn.Parameter(torch.ones(1))  # pyright: ignore[reportAttributeAccessIssue]
    with one_process():
        checkpoint = save_model(tmp_path, model, toml)
    assert mentions(refusal(capsys, checkpoint, "--out", tmp_path / "hf"), "8", "--merge")
