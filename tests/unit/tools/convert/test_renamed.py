"""Folders whose tensors transformers renames, splits and joins: read as it reads them, written as it writes them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file, save_model
from torch import Tensor, nn

from tests.support import families, foreign
from tests.support.foreign import assert_same, logits
from titanlite.checkpoint.difference import Difference
from titanlite.checkpoint.initial import stored_tensors
from titanlite.models.registry import resolve_model
from titanlite.state import model_state
from titanlite.tools import cli
from titanlite.tools.convert.export import OutputFolder, export_folder
from titanlite.tools.convert.hugging_face import HuggingFaceFolder
from titanlite.tools.convert.reader import load_tensors
from titanlite.tools.convert.source import load_model, open_source
from titanlite.tools.convert.weights import open_weights

SIZE: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 260, "max_position_embeddings": 64, "num_experts": 3,
    "num_local_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": None,
}  # fmt: skip
LINEAR = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "qwen2": {"tie_word_embeddings": True},
    "gpt_neox": {},
    "qwen3_moe": {},
    "mixtral": {},
    "lara_mini": LINEAR,
    "olmo_hybrid": LINEAR,
    "qwen3_next": LINEAR,
}
"""A tied head; another prefix and head; experts in one stack; also another name; a matrix that is split; and joined;
layers to pass over."""
CASES = [
    pytest.param(kind, marks=[pytest.mark.long] if kind in ("qwen3_moe", "olmo_hybrid") else [])
    for kind in [*KINDS][:-1]
]
TOKENS = torch.randint(0, 260, (1, 24), generator=torch.Generator().manual_seed(0))


def oracle(kind: str) -> Any:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **{**SIZE, **KINDS[kind]})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():  # so that no two are alike
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def loaded(folder: Path, config: Path) -> nn.Module:
    """Return our model with the weights of a folder, all of which it must have."""
    source = open_source(str(folder), config=config)
    model = source.spec.model_cls(source.spec.args)
    model.init_buffers()
    load_tensors(source.reader, stored_tensors(source.reader, model_state(model), where=source.where))
    return model.eval()


def toml_of(folder: Path, args: str = "") -> Path:
    file = folder / "run.toml"
    file.write_text(f'[model]\nname = "transformers"\npath = "{folder}"\nargs = {{{args}}}\n')
    return file


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("kind", CASES)
def test_any_folder_of_transformers_begins_and_returns(kind: str, tmp_path: Path) -> None:
    model = oracle(kind)
    model.save_pretrained(tmp_path / "files", max_shard_size="20KB")
    model.save_pretrained(tmp_path / "own", save_original_format=False)
    stored, config = tensors_of(tmp_path / "files"), toml_of(tmp_path / "files")
    for folder in ("files", "own"):
        ours = loaded(tmp_path / folder, config)
        assert (logits(ours, TOKENS) - logits(model, TOKENS)).abs().max() < 1e-5
        source = open_source(str(tmp_path / folder), config=config)
        target = OutputFolder(str(tmp_path / f"{folder}_again"))
        export_folder(source, target, max_shard_bytes=10**9, with_tokenizer=False)
        assert_same(tensors_of(tmp_path / f"{folder}_again"), stored)


def test_what_transformers_passes_over_is_passed_over(tmp_path: Path) -> None:
    """Releases have the layers that predict further tokens, with experts."""
    oracle("qwen3_next").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    further = {f"{name}.layers.0.mlp.experts.0.up_proj.weight": torch.ones(2) for name in ("mtp", "more")}
    save_file({**load_file(file), **further}, file)
    assert [*open_source(str(tmp_path), config=toml_of(tmp_path)).reader.unknown] == [[*further][1]]


def test_infinities_in_a_config_are_those_of_transformers(tmp_path: Path) -> None:
    config = transformers.Mamba2Config(hidden_size=32, num_heads=4, head_dim=16, num_hidden_layers=1, vocab_size=260)
    config.save_pretrained(tmp_path)
    model_cls = resolve_model("transformers", None, {}, path=str(tmp_path)).model_cls
    args = HuggingFaceFolder(tmp_path).read_args(model_cls)
    form = model_cls.formats.hugging_face
    assert form is not None
    written = form.to_config(next(iter(model_cls.flavors.values())))
    assert written["time_step_limit"] == json.loads((tmp_path / "config.json").read_text())["time_step_limit"]
    assert json.loads(json.dumps(written, allow_nan=False)) == written
    assert args["num_hidden_layers"] == 1


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss", "qwen3_next", "glm4_moe", "qwen3_moe"])
def test_stacks_of_experts_are_read_as_the_matrices_of_each(family: str, tmp_path: Path) -> None:
    """The model's own state, as `save_original_format=False` or a state dict in a file has it."""
    theirs = foreign.oracle_of(family) if family == "qwen3_moe" else families.oracle(families.built(family))
    theirs.save_pretrained(tmp_path / "files")
    theirs.save_pretrained(tmp_path / "own", save_original_format=False, max_shard_size="20KB")
    shutil.copytree(tmp_path / "files", tmp_path / "state")
    state = {name: tensor.contiguous() for name, tensor in theirs.model.state_dict().items()}  # without "model."
    save_file({**state, "lm_head.weight": theirs.lm_head.weight.detach()}, tmp_path / "state" / "model.safetensors")
    expected = tensors_of_model(tmp_path / "files")
    for folder in ("own", "state"):
        assert_same(tensors_of_model(tmp_path / folder), expected)
    names = tensors_of(tmp_path / "own")
    assert any(name.endswith("experts.gate_up_proj") for name in names)
    assert not any("experts.0." in name for name in names)


def tensors_of_model(folder: Path) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in model_state(load_model(open_source(str(folder)))).items()}


@pytest.mark.parametrize("kept", ["lm_head.weight", "model.embed_tokens.weight"])
def test_either_name_of_a_tied_matrix_is_read(kept: str, tmp_path: Path) -> None:
    """safetensors' `save_model` keeps the head, and leaves the embedding out."""
    model = foreign.oracle_of("llama3", tied=True)
    model.config.save_pretrained(tmp_path)
    save_model(model, str(tmp_path / "model.safetensors"))
    stored = tensors_of(tmp_path)
    assert "model.embed_tokens.weight" not in stored, "what this test is about"
    head = stored.pop("lm_head.weight")
    save_file({**stored, kept: head}, tmp_path / "model.safetensors", {"format": "pt"})
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    tokens = TOKENS % 67
    for config in (None, toml_of(tmp_path, "vocab_size = 67")):
        ours = load_model(open_source(str(tmp_path), config=config)) if config is None else loaded(tmp_path, config)
        assert (logits(ours, tokens) - logits(again, tokens)).abs().max() < 1e-5
    untied = resolve_model("llama3", None, {**vars(open_source(str(tmp_path)).spec.args), "tied_head": False})
    reader = open_weights(str(tmp_path), untied, ["model.args.tied_head"])
    assert reader is not None
    assert reader.shape("model.head.output.weight") == reader.shape("model.tok_embeddings.weight") == (67, 24)


@pytest.mark.parametrize(
    "experts",
    [
        {"model.layers.0.feed_forward.w1": "model.layers.0.feed_forward.w1 [4, 16, 32]"},
        {"model.layers.0.mlp.experts.0.up_proj.weight": "model.layers.0.mlp.experts.0.up_proj.weight [16, 32]"},
    ],
)
def test_a_refusal_never_offers_to_leave_the_experts_out(experts: dict[str, str]) -> None:
    norm = {"model.head.norm.weight": "model.head.norm.weight [32]", "conv": "conv.weight [32, 1, 4]"}
    for missing, unexpected in ((experts, norm), (norm, experts), (experts, {})):  # not even those of the file
        assert "allow_" not in Difference(missing, unexpected).offer()
    offer = Difference(norm, norm).offer()
    assert 'allow_missing = ["model.head.norm.weight", "conv"]' in offer
    assert "allow_unexpected" in offer


def test_experts_of_other_names_are_refused_without_an_offer(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    foreign.oracle_of("qwen3_moe").save_pretrained(tmp_path / "files")
    file = tmp_path / "files" / "model.safetensors"
    save_file({name.replace(".experts.", ".others."): tensor for name, tensor in load_file(file).items()}, file)
    assert cli.run(["checkpoint", "import", str(tmp_path / "files"), "--out", str(tmp_path / "out")]) == 2
    error = capfd.readouterr().err
    assert "layers.0.feed_forward.w1" in error
    assert "--allow" not in error
