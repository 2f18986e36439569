"""Weights of Hugging Face and torchtitan, read into our models on one process."""

import json
import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from tests.support.foreign import (
    Payload,
    assert_same,
    expected_tensors,
    logits,
    options_of,
    oracle_of,
    save_torchtitan,
    spec_of,
)
from tests.support.helpers import TinyRun, mentions
from tests.support.whole_runs import trained
from titanlite.config.load import load
from titanlite.models.base import Model
from titanlite.models.llama3 import Llama3
from titanlite.models.registry import ModelSpec, resolve_model
from titanlite.runtime.errors import UserError
from titanlite.runtime.files import file_inside
from titanlite.state import model_state
from titanlite.tools.convert.hugging_face import HuggingFaceFolder
from titanlite.tools.convert.reader import ForeignReader
from titanlite.tools.convert.source import load_model, open_source
from titanlite.tools.convert.weights import open_weights

CASES = [("llama3", False), ("llama3", True), ("qwen3", True), ("qwen3_moe", False)]
"""Every family, untied and tied."""
TOKENS = torch.randint(0, 67, (2, 33), generator=torch.Generator().manual_seed(1))


def opened(path: Path, spec: ModelSpec) -> ForeignReader:
    reader = open_weights(str(path), spec, [])
    assert reader is not None
    return reader


def loaded(path: Path, spec: ModelSpec, dtype: torch.dtype = torch.float32) -> Model:
    """Return our model with the weights at a path, all of which it must have."""
    reader = opened(path, spec)
    model = spec.model_cls(spec.args).to(dtype)
    model.init_buffers()
    wanted = {f"model.{name}": tensor.detach() for name, tensor in model_state(model).items()}
    for tensor in wanted.values():
        tensor.fill_(torch.nan if tensor.dtype.is_floating_point else 0)
    kept = {name: wanted.pop(name).zero_() for name in reader.kept}
    assert [*kept] == [name for name in kept if name.endswith("bias_E")]
    dcp.load(wanted, storage_reader=reader, no_dist=True)
    assert not reader.unknown
    assert reader.metadata.state_dict_metadata.keys() == wanted.keys()
    return model.eval()


def tensors_of(model: Model) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in model_state(model).items() if not name.endswith("bias_E")}


# Hugging Face


@pytest.mark.long
@pytest.mark.parametrize(("family", "tied"), CASES)
def test_hugging_face_folders_are_read_bit_for_bit(family: str, tied: bool, tmp_path: Path) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        oracle = oracle_of(family, tied=tied, dtype=dtype)
        oracle.save_pretrained(tmp_path / "one")
        oracle.save_pretrained(tmp_path / "shards", max_shard_size="10KB")
        assert len([*(tmp_path / "shards").glob("*.safetensors")]) > 2
        spec, expected = spec_of(family, oracle), expected_tensors(oracle)
        for folder in ("one", "one/model.safetensors", "shards"):
            assert_same(tensors_of(loaded(tmp_path / folder, spec, dtype)), expected)
        if dtype == torch.float32:
            ours = logits(loaded(tmp_path / "shards", spec), TOKENS)
            assert (ours - logits(oracle, TOKENS)).abs().max() < 1e-4
            assert ours.std() > 0.3
        else:  # a model of another dtype takes the rounded values
            model = tensors_of(loaded(tmp_path / "one", spec, torch.float32))
            assert_same(model, {name: tensor.float() for name, tensor in expected.items()})


def test_base_models_and_old_files(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    oracle = oracle_of("qwen3", tied=True)
    oracle.model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert "embed_tokens.weight" in stored, "without the prefix"
    stored["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(5)  # of older releases
    save_file(stored, tmp_path / "model.safetensors")
    assert_same(tensors_of(loaded(tmp_path, spec_of("qwen3", oracle))), expected_tensors(oracle))


@pytest.mark.parametrize("family", ["llama3", "qwen3"])
def test_a_head_of_its_own_is_used_where_the_config_ties_it(family: str, tmp_path: Path) -> None:
    """As in transformers. The same matrix twice is still one."""
    import transformers
    from safetensors.torch import load_file, save_file

    oracle = oracle_of(family, tied=True)
    oracle.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    embedding = stored["model.embed_tokens.weight"]
    for row in (None, 66):  # one row far from the first ones is a difference, too
        head = embedding.clone()
        if row is not None:
            head[row] += 1
        save_file({**stored, "lm_head.weight": head}, tmp_path / "model.safetensors", {"format": "pt"})
        found = open_source(str(tmp_path))
        assert getattr(found.spec.args, "tied_head") is (row is None)  # noqa: B009
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
        with torch.no_grad():
            assert torch.allclose(load_model(found)(TOKENS), theirs(TOKENS).logits, rtol=1e-4, atol=1e-5)
    tied = spec_of(family, oracle)
    assert getattr(tied.args, "tied_head")  # noqa: B009
    with pytest.raises(UserError, match=r"tied_head = false"):
        opened(tmp_path, tied)


def test_a_decoder_of_transformers_is_compared_with_the_config_of_a_folder(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    oracle = oracle_of("llama3", tied=True)
    oracle.save_pretrained(tmp_path)
    spec = resolve_model("transformers", None, {}, path=str(tmp_path))
    assert opened(tmp_path, spec).shape("model.embed_tokens.weight") == (67, 24)
    assert opened(tmp_path, spec).shape("model.lm_head.weight") is None, "one tensor for both"
    for changes in ({"rms_norm_eps": 1e-3}, {"hidden_act": "gelu"}):
        other = resolve_model("transformers", None, changes, path=str(tmp_path))
        with pytest.raises(UserError, match=next(iter(changes))):
            opened(tmp_path, other)
    config = json.loads((tmp_path / "config.json").read_text())
    other_rope = {**config, "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}}
    (tmp_path / "config.json").write_text(json.dumps(other_rope))
    with pytest.raises(UserError, match="rope_parameters"):
        opened(tmp_path, spec)
    (tmp_path / "config.json").write_text(json.dumps(config))
    stored = load_file(tmp_path / "model.safetensors")
    save_file({**stored, "lm_head.weight": torch.ones(67, 24)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"tie_word_embeddings = false"):
        opened(tmp_path, spec)


def test_links_of_the_cache_of_hugging_face_are_followed(tmp_path: Path) -> None:
    oracle = oracle_of("llama3")
    snapshot, blobs = tmp_path / "models--x" / "snapshots" / "abc", tmp_path / "models--x" / "blobs"
    oracle.save_pretrained(snapshot)
    blobs.mkdir()
    more = snapshot / "additional_chat_templates"
    more.mkdir()
    for file, leads in {"a": blobs / "0", "b": snapshot / "config.json", "c": tmp_path / "private"}.items():
        (more / file).symlink_to(leads)
    assert file_inside(more, "a") == more / "a"
    for name in "bc":
        with pytest.raises(UserError, match=f"'{name}'"):
            file_inside(more, name)
    shutil.rmtree(more)
    for number, file in enumerate(sorted(snapshot.iterdir())):
        file.rename(blobs / str(number))
        file.symlink_to(f"../../blobs/{number}")
    assert_same(tensors_of(loaded(snapshot, spec_of("llama3", oracle))), expected_tensors(oracle))


# torchtitan


@pytest.mark.parametrize(("family", "tied"), CASES)
def test_checkpoints_of_torchtitan_are_read_bit_for_bit(family: str, tied: bool, tmp_path: Path) -> None:
    oracle = oracle_of(family, tied=tied)
    save_torchtitan(family, oracle, tmp_path / "step-3")
    spec = spec_of(family, oracle)
    assert_same(tensors_of(loaded(tmp_path / "step-3", spec)), expected_tensors(oracle))
    if family == "llama3" and tied:
        save_torchtitan(family, oracle_of(family), tmp_path / "untied")
        with pytest.raises(UserError, match=r"model\.args\.tied_head = false"):
            opened(tmp_path / "untied", spec)


@pytest.mark.parametrize("at", ["", "model", "net"])
@pytest.mark.parametrize(("family", "tied"), CASES)
def test_dcp_with_the_names_of_transformers_is_read_bit_for_bit(
    family: str, tied: bool, at: str, tmp_path: Path
) -> None:
    """As plain PyTorch and Lightning Fabric save a model of transformers, whose experts are stacks."""
    oracle = oracle_of(family, tied=tied)
    state = oracle.state_dict()
    moments = {f"state.{name}.exp_avg": torch.zeros_like(tensor) for name, tensor in state.items()}
    others = {"optimizer": moments, "iteration": 3}
    dcp.save({**(state if at == "" else {at: state}), **others}, checkpoint_id=tmp_path)
    assert_same(tensors_of(loaded(tmp_path, spec_of(family, oracle))), expected_tensors(oracle))
    if at == "net":
        dcp.save({"net": state, "ema": state}, checkpoint_id=tmp_path / "two")
        with pytest.raises(UserError, match=r"net\., ema\."):
            opened(tmp_path / "two", spec_of(family, oracle))


def test_shards_of_dcp_that_are_not_consolidated_are_refused_as_such(tmp_path: Path) -> None:
    """What `HuggingFaceStorageWriter(save_distributed=True)` writes on two ranks: parts of tensors, and no config."""
    from safetensors.torch import save_file
    from torch.distributed.checkpoint import HuggingFaceStorageWriter
    from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files

    oracle = oracle_of("llama3")
    whole = tmp_path / "whole"
    dcp.save(oracle.state_dict(), storage_writer=HuggingFaceStorageWriter(str(whole), save_distributed=True))
    oracle.config.save_pretrained(whole)
    assert_same(tensors_of(loaded(whole, spec_of("llama3", oracle))), expected_tensors(oracle))
    for rank in (0, 1):
        parts = {name: tensor.chunk(2)[rank].clone() for name, tensor in oracle.state_dict().items()}
        first = {name: rank * (len(oracle.state_dict()[name]) - len(part)) for name, part in parts.items()}
        offsets = {name: {"saved_offsets": [first[name], 0][: part.ndim]} for name, part in parts.items()}
        file = tmp_path / f"shard-0000{rank + 1}-model-00001-of-00001.safetensors"
        save_file(parts, file, {"DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0", "format": "pt"})
    for config in (False, True):
        if config:
            oracle.config.save_pretrained(tmp_path)
        with pytest.raises(UserError, match=r"not consolidated.* consolidate_safetensors_files"):
            opened(tmp_path, spec_of("llama3", oracle))
    (tmp_path / "one").mkdir()
    consolidate_safetensors_files(str(tmp_path), str(tmp_path / "one"), dict.fromkeys(oracle.state_dict(), 1))
    oracle.config.save_pretrained(tmp_path / "one")
    assert_same(tensors_of(loaded(tmp_path / "one", spec_of("llama3", oracle))), expected_tensors(oracle))


@pytest.mark.parametrize("name", ["", "consolidated.00.pth"])
def test_weights_in_the_form_of_meta_are_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "consolidated.00.pth").touch()
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="Hugging Face"):
        opened(tmp_path / name, spec_of("llama3", oracle_of("llama3")))


# What does not fit


def test_arguments_that_differ_are_listed_with_what_to_set(tmp_path: Path) -> None:
    oracle = oracle_of("llama3")
    oracle.save_pretrained(tmp_path)
    spec = spec_of("llama3", oracle)
    other = spec._replace(args=replace(spec.args, max_seq_len=7))
    assert opened(tmp_path, other).shape("model.tok_embeddings.weight") == (67, 24), "the length is no part of it"
    changes: dict[str, Any] = {"dim": 32, "tied_head": True, "rope_theta": 5e5}
    other = spec._replace(args=replace(spec.args, **changes))
    with pytest.raises(UserError) as refusal:
        opened(tmp_path, other)
    lines = str(refusal.value).splitlines()
    assert {"  dim = 24", "  tied_head = false", "  rope_theta = 10000.0"} < {*lines}
    assert mentions(
        lines[-1], 'checkpoint.allow_changes = ["model.args.dim"', *(f'"model.args.{name}"' for name in changes)
    )
    other = spec._replace(args=replace(spec.args, rope_theta=5e5))  # pyright: ignore[reportCallIssue]
    assert open_weights(str(tmp_path), other, ["model.args.rope_*"])
    config = Llama3.formats.hugging_face.to_config(Llama3.flavors["8B"])  # pyright: ignore[reportOptionalMemberAccess]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r'\[model\](.|\n)*flavor = "8B"\n'):
        opened(tmp_path, spec)


def test_a_missing_expert_is_missing(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    oracle = oracle_of("qwen3_moe")
    oracle.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    del stored["model.layers.1.mlp.experts.2.up_proj.weight"]
    del stored["model.layers.0.mlp.experts.4.up_proj.weight"]
    save_file(stored, file)
    reader = opened(tmp_path, spec_of("qwen3_moe", oracle))
    assert reader.shape("model.layers.1.feed_forward.w3") is None
    assert reader.shape("model.layers.0.feed_forward.w3") == (4, 24, 20)


PAYLOAD = Payload(print, "code of the checkpoint runs")


def edited(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def truncated(folder: Path) -> None:
    file = next(folder.glob("model-00002*"))
    file.write_bytes(file.read_bytes()[:-100])


def with_shard_in_index(folder: Path, name: str) -> None:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["lm_head.weight"] = name
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def linked_outside(folder: Path) -> None:
    shutil.copy(next(folder.glob("model-00002*")), folder.parent / "outside.safetensors")
    file = next(folder.glob("model-00002*"))
    file.unlink()
    file.symlink_to(folder.parent / "outside.safetensors")


def with_pickles_only(folder: Path) -> None:
    for file in folder.glob("model*"):
        file.unlink()
    (folder / "pytorch_model.bin").touch()


DAMAGES: dict[str, Callable[[Path], object]] = {
    "truncated": truncated,
    "missing shard": lambda folder: with_shard_in_index(folder, "model-00009.safetensors"),
    "shard above": lambda folder: with_shard_in_index(folder, "../x.safetensors"),
    "absolute shard": lambda folder: with_shard_in_index(folder, "/etc/passwd"),
    "linked shard": linked_outside,
    "wrong shard": lambda folder: with_shard_in_index(folder, next(folder.glob("model-00002*")).name),
    "no index": lambda folder: (folder / "model.safetensors.index.json").write_text("[]"),
    "other family": lambda folder: edited(folder / "config.json", model_type="qwen3"),
    "unknown family": lambda folder: edited(folder / "config.json", model_type="gpt2"),
    "not computed": lambda folder: edited(folder / "config.json", attention_bias=True),
    "quantized": lambda folder: edited(folder / "config.json", quantization_config={"quant_method": "fp8"}),
    "no config": lambda folder: (folder / "config.json").unlink(),
    "no JSON": lambda folder: (folder / "config.json").write_text("{"),
    "pickles only": with_pickles_only,
    "twice": lambda folder: (
        (folder / "model.safetensors.index.json").rename(folder / "gone")
        and shutil.copy(next(folder.glob("model-00002*")), folder / "again.safetensors")
    ),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ModelSpec]:
    """A folder with shards, and our model of the same shape."""
    oracle, folder = oracle_of("llama3"), tmp_path_factory.mktemp("good")
    oracle.save_pretrained(folder, max_shard_size="10KB")
    assert opened(folder, spec_of("llama3", oracle))
    return folder, spec_of("llama3", oracle)


@pytest.mark.parametrize("damage", DAMAGES)
def test_bad_folders_are_refused_in_one_line(damage: str, good: tuple[Path, ModelSpec], tmp_path: Path) -> None:
    folder, spec = good
    shutil.copytree(folder, tmp_path / "model")
    DAMAGES[damage](tmp_path / "model")
    with pytest.raises(UserError) as refusal:
        opened(tmp_path / "model", spec)
    assert len(str(refusal.value).splitlines()) == 1
    assert str(tmp_path) in str(refusal.value)


@pytest.mark.parametrize("name", ["", "adapter_model.safetensors"])
def test_adapters_of_peft_are_refused_as_such(name: str, good: tuple[Path, ModelSpec], tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    (tmp_path / "adapter_model.safetensors").touch()
    with pytest.raises(UserError, match=rf"{name}.*PEFT.*merge_and_unload"):
        opened(tmp_path / name, good[1])


def test_pickles_with_other_names_are_not_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    oracle = oracle_of("llama3")
    spec = spec_of("llama3", oracle)
    save_torchtitan("llama3", oracle, tmp_path / "titan")
    metadata = tmp_path / "titan" / ".metadata"
    good = metadata.read_bytes()
    metadata.write_bytes(pickle.dumps(PAYLOAD))
    with pytest.raises(UserError, match=r"\.metadata .*builtins\.print"):
        opened(tmp_path / "titan", spec)
    metadata.write_bytes(good.replace(b"__0_0.distcp", b"../../distcp"))
    with pytest.raises(UserError, match=r"'\.\./\.\./distcp'"):
        opened(tmp_path / "titan", spec)
    metadata.write_bytes(good)
    data = tmp_path / "titan" / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[:5000])
    with pytest.raises(UserError, match=r"__0_0\.distcp\b"):
        opened(tmp_path / "titan", spec)
    assert "runs" not in capfd.readouterr().out


def test_paths_with_nothing_to_read(tmp_path: Path) -> None:
    spec = spec_of("llama3", oracle_of("llama3"))
    with pytest.raises(UserError, match=f"{tmp_path}/gone"):
        open_weights(f"{tmp_path}/gone", spec, [])
    (tmp_path / "notes.txt").touch()
    with pytest.raises(UserError, match=r"notes\.txt .*Hugging Face"):
        open_weights(f"{tmp_path}/notes.txt", spec, [])
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(UserError, match=r"\n  dim = 4096"):
        open_weights(str(tmp_path), spec, [])
    assert open_weights("memory://run", spec, []) is None


# Training


ONE_STEP = ["--training.steps=1", "--lr_scheduler.warmup_steps=1", "--optimizer.lr=0.0"]


@pytest.mark.long
@pytest.mark.usefixtures("single_process_group")
def test_keys_that_differ_are_all_listed_with_the_options_that_accept_them(tiny: TinyRun) -> None:
    from safetensors.torch import load_file, save_file

    oracle = oracle_of("qwen3", vocab_size=260)
    oracle.save_pretrained(tiny.folder / "model")
    file = tiny.folder / "model" / "model.safetensors"
    stored = load_file(file)
    for layer in (0, 1):
        del stored[f"model.layers.{layer}.self_attn.q_norm.weight"]
        stored[f"model.layers.{layer}.self_attn.extra.weight"] = torch.ones(3)
    stored["model.norm.weight"] = torch.ones(7)
    stored["score.weight"] = torch.ones(2, 24)
    save_file(stored, file)
    options = [*options_of(spec_of("qwen3", oracle)), *ONE_STEP, f"--checkpoint.initial_load_path={tiny.folder}/model"]
    with pytest.raises(UserError) as refusal:
        trained(tiny.config(*options, "--job.name=refused"))
    accept = [
        'checkpoint.allow_missing = ["model.layers.*.attention.q_norm.weight", "model.head.norm.weight"]',
        'checkpoint.allow_unexpected = ["model.layers.*.self_attn.extra.weight", "score.weight"]',
    ]
    lines = str(refusal.value).splitlines()
    assert mentions(lines[0], f"{tiny.folder}/model")
    assert [line.split() for line in lines[1:7]] == [
        ["missing", "model.layers.0.attention.q_norm.weight", "[10]"],
        ["missing", "model.layers.1.attention.q_norm.weight", "[10]"],
        ["missing", "model.head.norm.weight", "[24],", "stored", "as", "[7]"],
        ["unexpected", "model.layers.0.self_attn.extra.weight", "[3]"],
        ["unexpected", "model.layers.1.self_attn.extra.weight", "[3]"],
        ["unexpected", "score.weight", "[2,", "24]"],
    ]
    assert [line.strip() for line in lines[8:]] == accept
    found = trained(tiny.config(*options, *(f"--{line.replace(' = ', '=')}" for line in accept)))
    expected = expected_tensors(oracle)
    assert torch.equal(found["layers.1.attention.wq.weight"], expected["layers.1.attention.wq.weight"])
    assert torch.equal(found["layers.1.attention.q_norm.weight"], torch.ones(10)), "its initial value"
    part = tiny.config(*options, "--job.name=part", '--checkpoint.initial_load=["model.tok_*"]')
    assert torch.equal(trained(part)["tok_embeddings.weight"], expected["tok_embeddings.weight"])


def test_the_example_continues_the_released_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of the release's config.json; its weights are not needed to compare them."""
    import tokenizers

    example = Path("examples/continue_qwen3.toml").resolve()
    folder = tmp_path / "models" / "Qwen3-0.6B"
    folder.mkdir(parents=True)
    tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(folder / "tokenizer.json"))
    released = {
        "model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072, "vocab_size": 151936,
        "max_position_embeddings": 40960, "rms_norm_eps": 1e-06, "rope_theta": 1000000, "rope_scaling": None,
        "tie_word_embeddings": True, "attention_bias": False, "hidden_act": "silu", "use_sliding_window": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(released))
    monkeypatch.chdir(tmp_path)
    config = load(example)
    spec = resolve_model(config.model.name, config.model.flavor, config.model.args, tokenizer_size=151669)
    path = str(config.checkpoint.initial_load_path)
    with pytest.raises(UserError, match=r"models/Qwen3-0\.6B .*\*\.safetensors"):
        open_weights(path, spec, [])


def test_a_named_pipe_in_place_of_weights_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(UserError) as caught:
        HuggingFaceFolder(tmp_path).tensors(cast(Any, None), {})
    assert mentions(str(caught.value), f"{tmp_path}/model.safetensors")
