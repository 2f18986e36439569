"""Released files with the module that predicts the token after the next: read, left out, and written."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.modeling_layers import MtpModel

from tests.support.families import built, oracle
from tests.support.foreign import assert_same
from tests.support.helpers import TinyRun, mentions
from tests.support.quantized import of_float8, quantize_folder, to_float8
from tests.support.whole_runs import trained
from titanlite.loss import token_loss
from titanlite.models.decoder import Decoder
from titanlite.models.multi_token import look_ahead
from titanlite.ops.cpu import CpuKernels
from titanlite.ops.kernels import set_kernels
from titanlite.parallelize.materialize import allocate
from titanlite.state import model_state
from titanlite.step import model_arguments
from titanlite.tools import cli
from titanlite.tools.convert.reader import load_tensors
from titanlite.tools.convert.source import load_model, open_source

CPU = torch.device("cpu")
LAYERS = 4
DEEPSEEK = {
    "block": f"model.layers.{LAYERS}.",
    "next_norm": f"model.layers.{LAYERS}.enorm.weight",
    "hidden_norm": f"model.layers.{LAYERS}.hnorm.weight",
    "join": f"model.layers.{LAYERS}.eh_proj.weight",
    "norm": f"model.layers.{LAYERS}.shared_head.norm.weight",
    "embedding": f"model.layers.{LAYERS}.embed_tokens.weight",
    "head": f"model.layers.{LAYERS}.shared_head.head.weight",
}
QWEN = {
    "block": "mtp.layers.0.",
    "next_norm": "mtp.pre_fc_norm_embedding.weight",
    "hidden_norm": "mtp.pre_fc_norm_hidden.weight",
    "join": "mtp.fc.weight",
    "norm": "mtp.norm.weight",
}
NAMES = {"deepseek_v3": DEEPSEEK, "glm4_moe": DEEPSEEK, "qwen3_next": QWEN}
TOKENS = torch.randint(0, 260, (2, 41), generator=torch.Generator().manual_seed(1))


def release(family: str, folder: Path) -> dict[str, Tensor]:
    """Write a folder as the family is released, and return its tensors."""
    theirs, names, random = oracle(built(family, vocab_size=260)), NAMES[family], torch.Generator().manual_seed(5)
    theirs.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    last = f"model.layers.{LAYERS - 1}."
    for name in [name for name in tensors if name.startswith(last)]:
        found = tensors[name]
        noise = torch.randn(found.shape, generator=random)
        tensors[names["block"] + name.removeprefix(last)] = found + found.std() * noise / 2
    dim = len(tensors["model.norm.weight"])
    for part in ("next_norm", "hidden_norm", "norm"):
        tensors[names[part]] = 1 + 0.2 * torch.randn(dim, generator=random)
    tensors[names["join"]] = 0.2 * torch.randn(dim, 2 * dim, generator=random)
    if "embedding" in names:
        tensors[names["embedding"]] = tensors["model.embed_tokens.weight"].clone()
        tensors[names["head"]] = tensors["lm_head.weight"].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    return tensors


@pytest.fixture(params=NAMES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


def config_with_it(folder: Path, family: str) -> Path:
    """Write a config that asks for the module."""
    args = {key: value for key, value in vars(open_source(str(folder)).spec.args).items() if key != "max_seq_len"}
    lines = "\n".join(f"{key} = {json.dumps(value)}" for key, value in args.items())
    toml = folder.parent / "with_it.toml"
    toml.write_text(
        f'[model]\nname = "{family}"\n[model.args]\n{lines}\n[data]\ntokenizer = "bytes"\n'
        "[training]\nmulti_token_weight = 0.3\n"
    )
    return toml


def predicting(path: Path) -> Decoder:
    """Return the model with the module, with the weights at a path."""
    source = open_source(str(path))
    model = source.spec.build()
    assert isinstance(model, Decoder)
    model.predict_further(0.3)
    allocate(model, CPU, CPU)
    kept = getattr(source.reader, "kept", set())
    state = {name: value for name, value in model_state(model).items() if f"model.{name}" not in kept}
    load_tensors(source.reader, state)
    set_kernels(model, CpuKernels())
    return model


@pytest.mark.slow
def test_files_come_in_and_go_out_bit_for_bit(family: str, tmp_path: Path) -> None:
    hf, ours = tmp_path / "hf", tmp_path / "ours"
    expected = release(family, hf)
    words = ["--config", str(config_with_it(hf, family)), "--out", str(ours)]
    assert cli.run(["checkpoint", "import", str(hf), *words]) == 0
    for source in (hf, ours):
        out = tmp_path / f"from_{source.name}"
        words = ["checkpoint", "export", str(source), "--out", str(out), "--no-tokenizer", "--check"]
        assert cli.run(words) == 0
        assert_same(load_file(out / "model.safetensors"), expected)
        assert json.loads((out / "config.json").read_text())["num_nextn_predict_layers"] == 1


def apart(ours: Path, theirs: Path) -> float:
    """Return how far the hidden states of the module are from those of transformers with a folder."""
    model = predicting(ours)
    seen: list[Any] = []
    model.head.further_norm.register_forward_hook(lambda _module, _args, out: seen.append(out))
    tokens, arguments = model_arguments(look_ahead({"tokens": TOKENS[:, :-1], "labels": TOKENS[:, 1:]}), token_loss, {})
    model(tokens, **arguments)
    other: Any = transformers.AutoModelForCausalLM.from_pretrained(theirs, attn_implementation="eager").eval()
    # Names of the number of layers of releases: transformers leaves their tensors out, and finds the module by them.
    other._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{LAYERS}.*"]
    module: Any = MtpModel.from_pretrained(other).eval()
    with torch.no_grad():
        hidden_BLD = other.model(TOKENS[:, :-1]).last_hidden_state
        places = torch.arange(40)[None]
        rotary = other.model.rotary_emb(hidden_BLD, places)
        mask = torch.full((40, 40), -torch.inf).triu(1)[None, None]
        next_BLD = other.model.embed_tokens(TOKENS[:, 1:])
        expected = module.layers[0](next_BLD, hidden_BLD, rotary, mask, None, None)
    assert expected.std() > 0.1
    return float((seen[0].detach() - expected)[:, :-1].abs().max())


@pytest.mark.long
@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])  # transformers has no module of Qwen3-Next
def test_the_module_computes_what_that_of_transformers_does(family: str, tmp_path: Path) -> None:
    release(family, tmp_path / "hf")
    words = ["--out", str(tmp_path / "back"), "--no-tokenizer"]
    assert cli.run(["checkpoint", "export", str(tmp_path / "hf"), *words]) == 0
    assert apart(tmp_path / "hf", tmp_path / "back") < 1e-5
    other = predicting(tmp_path / "hf").formats.hugging_face
    assert other
    further = other.tensors.further
    names = [f"layers.{{layer}}.{norm}_norm.weight" for norm in ("next", "hidden")]
    swapped = {names[0]: further[names[1]], names[1]: further[names[0]]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(other.tensors, "further", {**further, **swapped})
        assert apart(tmp_path / "hf", tmp_path / "back") > 1e-3
    file = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(file)
    join = NAMES[family]["join"]
    save_file(tensors | {join: tensors[join].roll(tensors[join].shape[1] // 2, 1)}, file, {"format": "pt"})
    assert apart(tmp_path / "hf", tmp_path / "back") > 1e-3, "the other half of the columns first"


@pytest.mark.long
def test_without_it_the_module_is_left_out(tmp_path: Path, family: str, capfd: pytest.CaptureFixture[str]) -> None:
    release(family, tmp_path / "hf")
    assert cli.run(["checkpoint", "import", str(tmp_path / "hf"), "--out", str(tmp_path / "ours")]) == 0
    [line] = [line for line in capfd.readouterr().out.splitlines() if "left out" in line]
    assert mentions(line, "training.multi_token_weight")
    names = {*open_source(str(tmp_path / "ours")).metadata.state_dict_metadata}
    assert not [name for name in names if f"layers.{LAYERS}" in name or "further" in name]
    found = load_model(open_source(str(tmp_path / "ours")))
    direct = load_model(open_source(str(tmp_path / "hf")))
    assert_same(found.state_dict(), direct.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_next"])
@pytest.mark.usefixtures("single_process_group")
def test_a_run_takes_the_module_or_leaves_it_out(family: str, tiny: TinyRun, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    hf = tiny.folder / "hf"
    release(family, hf)
    imported = tiny.folder / "imported"
    words = ["--config", str(config_with_it(hf, family)), "--out", str(imported)]
    assert cli.run(["checkpoint", "import", str(hf), *words]) == 0
    args = {key: value for key, value in vars(open_source(str(hf)).spec.args).items() if key != "max_seq_len"}
    options = [f"--model.name={family}", *(f"--model.args.{key}={json.dumps(value)}" for key, value in args.items())]
    options += ["--training.steps=1", "--lr_scheduler.warmup_steps=1", "--optimizer.lr=0.0"]
    expected = dict(predicting(hf).named_parameters())
    for source in (hf, imported):
        load = f"--checkpoint.initial_load_path={source}"
        caplog.clear()
        found = trained(
            tiny.config(*options, load, f"--job.name=with-{source.name}", "--training.multi_token_weight=0.3")
        )
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
        assert "training.multi_token_weight" not in caplog.text
        found = trained(tiny.config(*options, load, f"--job.name=without-{source.name}"))
        kept = {
            name: value for name, value in expected.items() if f"layers.{LAYERS}" not in name and "further" not in name
        }
        assert len(kept) < len(expected)
        assert all(torch.equal(found[name], tensor) for name, tensor in kept.items())
        assert not [name for name in found if f"layers.{LAYERS}" in name]
        assert "training.multi_token_weight" in caplog.text


def test_its_weights_may_be_quantized(tmp_path: Path) -> None:
    hf, block, ours = tmp_path / "hf", DEEPSEEK["block"], f"layers.{LAYERS}"
    tensors = release("deepseek_v3", hf)
    quantize_folder(hf, (16, 12))
    found = dict(predicting(hf).named_parameters())
    for name, theirs in (
        (f"{ours}.join.weight", DEEPSEEK["join"]),
        (f"{ours}.block.attention.wo.weight", f"{block}self_attn.o_proj.weight"),
    ):
        assert torch.equal(found[name], of_float8(*to_float8(tensors[theirs], 16, 12), 16, 12))


def test_what_a_release_lacks_is_missing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tensors = release("glm4_moe", tmp_path / "hf")
    tensors = {name: value for name, value in tensors.items() if f"layers.{LAYERS}." not in name}
    config = config_with_it(tmp_path / "hf", "glm4_moe")
    save_file(tensors, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    words = ["checkpoint", "import", str(tmp_path / "hf"), "--out", str(tmp_path / "ours")]
    assert cli.run([*words, "--config", str(config)]) == 2
    assert mentions(capfd.readouterr().err, "missing", f"model.layers.{LAYERS}.join.weight [64, 128]")
    assert cli.run(words) == 0
    assert "training.multi_token_weight" not in capfd.readouterr().out
