"""`titanlite checkpoint import`, and the commands and runs that read what it has written."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoTokenizer

from tests.support.chat_tokenizer import write_chat_tokenizer
from tests.support.foreign import (
    assert_same,
    expected_tensors,
    options_of,
    oracle_of,
    save_torchtitan,
    spec_of,
)
from tests.support.helpers import TinyRun, mentions
from tests.support.whole_runs import trained
from titanlite.runtime.errors import UserError
from titanlite.state import model_state
from titanlite.tools import cli
from titanlite.tools.convert.prompts import prompt_encoder, stop_ids
from titanlite.tools.convert.source import load_model, open_source, tokenizer_of

TOKENS = torch.randint(0, 67, (2, 33), generator=torch.Generator().manual_seed(1))


def imported(*words: str | Path) -> int:
    return cli.run(["checkpoint", "import", *map(str, words)])


def tensors_at(path: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    model = load_model(open_source(str(path)), dtype=dtype)
    found = {name: tensor.detach() for name, tensor in model_state(model).items()}
    for name in [name for name in found if name.endswith("bias_E")]:
        assert not found.pop(name).any()
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "dtype", "tied"),
    [
        ("llama3", torch.float32, False),
        ("qwen3", torch.bfloat16, True),
        ("qwen3_moe", torch.bfloat16, False),
        ("glm4_moe", torch.bfloat16, False),
    ],
)
def test_what_comes_in_goes_out_bit_for_bit(family: str, dtype: torch.dtype, tied: bool, tmp_path: Path) -> None:
    oracle_of(family, tied=tied, dtype=dtype).save_pretrained(tmp_path / "hf")
    assert imported(tmp_path / "hf", "--out", tmp_path / "ours") == 0
    for source, out in (("ours", "again"), ("hf", "direct")):
        words = ["checkpoint", "export", str(tmp_path / source), "--out", str(tmp_path / out), "--no-tokenizer"]
        assert cli.run(words) == 0
        assert_same(load_file(tmp_path / out / "model.safetensors"), load_file(tmp_path / "hf" / "model.safetensors"))
    again = AutoConfig.from_pretrained(tmp_path / "again").to_dict()
    first = AutoConfig.from_pretrained(tmp_path / "hf").to_dict()
    same = ("model_type", "rope_parameters", "tie_word_embeddings", "hidden_size", "rms_norm_eps", "dtype")
    assert {key: again[key] for key in same} == {key: first[key] for key in same}


def test_what_ends_a_text_is_that_of_the_source(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Neither config.toml nor a tokenizer can hold two end tokens and the defaults of sampling."""
    hf, bare = tmp_path / "hf", tmp_path / "bare"
    oracle_of("llama3", vocab_size=384).save_pretrained(hf)
    config = json.loads((hf / "config.json").read_text()) | {"bos_token_id": 5, "eos_token_id": [1, 2]}
    config |= {"pad_token_id": None}
    (hf / "config.json").write_text(json.dumps(config))
    defaults = {"do_sample": True, "temperature": 0.6, "eos_token_id": [1, 2]}
    (hf / "generation_config.json").write_text(json.dumps(defaults))
    shutil.copytree(hf, bare)
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        config.pop(key)
    (bare / "config.json").write_text(json.dumps(config))
    (bare / "generation_config.json").unlink()
    write_chat_tokenizer(tmp_path, None)
    shutil.copy(tmp_path / "tokenizer.json", hf)
    keys = "bos_token_id", "eos_token_id", "pad_token_id"
    for folder, ids, generation in (
        (
            hf,
            {"bos_token_id": 5, "eos_token_id": [1, 2], "pad_token_id": None},
            {"do_sample": True, "temperature": 0.6},
        ),
        (bare, {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}, {}),  # the defaults of Llama's class
    ):
        place = tmp_path / f"from_{folder.name}"
        assert imported(folder, "--out", place / "ours") == 0
        capfd.readouterr()
        for source in (folder, place / "ours"):
            out = place / f"export_{source.name}"
            assert cli.run(["checkpoint", "export", str(source), "--out", str(out), "--no-tokenizer"]) == 0
            written = json.loads((out / "config.json").read_text())
            assert {key: written[key] for key in keys if key in written} == ids
            file = out / "generation_config.json"
            found = json.loads(file.read_text()) if file.exists() else {}
            assert found == ids | generation
    capfd.readouterr()
    for source in (bare, tmp_path / "from_bare" / "ours"):
        assert cli.run(["generate", str(source), "--prompt", "a"]) == 2
        assert "--tokenizer" in capfd.readouterr().err
    tokenizer = open_source(str(tmp_path / "from_hf" / "ours")).tokenizer
    assert tokenizer is not None
    assert stop_ids(tokenizer) >= {1, 2}


@pytest.mark.long
@pytest.mark.parametrize("opens", [True, False])
def test_what_begins_a_text_is_that_of_the_source(opens: bool, tmp_path: Path) -> None:
    """Before the import, after it, and in an export of it, whose files are those that came."""
    oracle_of("llama3", vocab_size=384).save_pretrained(tmp_path / "hf")
    write_chat_tokenizer(tmp_path / "hf", None)
    file = tmp_path / "hf" / "tokenizer.json"
    if not opens:
        file.write_text(json.dumps(json.loads(file.read_text()) | {"post_processor": None}))
    assert imported(tmp_path / "hf", "--out", tmp_path / "ours") == 0
    expected = [*([256] if opens else []), *AutoTokenizer.from_pretrained(tmp_path / "hf")("a b").input_ids[opens:]]
    for name in ("hf", "ours"):
        source = open_source(str(tmp_path / name))
        assert prompt_encoder(tokenizer_of(source), config=source.config, chat=None)("a b") == expected
        assert cli.run(["checkpoint", "export", str(tmp_path / name), "--out", str(tmp_path / f"{name}-out")]) == 0
        assert AutoTokenizer.from_pretrained(tmp_path / f"{name}-out")("a b").input_ids == expected
        assert (tmp_path / f"{name}-out" / "tokenizer.json").read_bytes() == file.read_bytes()


@pytest.mark.long
@pytest.mark.usefixtures("single_process_group")
def test_an_imported_checkpoint_is_like_any_other(tiny: TinyRun, capfd: pytest.CaptureFixture[str]) -> None:
    oracle = oracle_of("qwen3", vocab_size=260)
    hf, out = tiny.folder / "hf", tiny.folder / "out"
    oracle.save_pretrained(hf)
    assert imported(hf, "--out", out) == 0
    assert mentions(capfd.readouterr().out, f"{out}/step-00000000", hf)
    assert sorted(file.name for file in (out / "step-00000000").iterdir()) == [
        ".metadata", "__0_0.distcp", "checksums.json", "config.toml", "manifest.json", "origin.json",
    ]  # fmt: skip
    for command in ("verify", "list", "show"):
        assert cli.run(["checkpoint", command, str(out)]) == 0
    shown = capfd.readouterr().out
    assert mentions(shown, "step 0", "5 files")
    assert "  model.args.n_layers = 2" in shown
    assert_same(tensors_at(out), expected_tensors(oracle))
    options = ["--training.steps=1", "--lr_scheduler.warmup_steps=1", "--optimizer.lr=0.0"]
    options += [*options_of(spec_of("qwen3", oracle)), f"--checkpoint.initial_load_path={out}"]
    found = trained(tiny.config(*options))
    for name, tensor in expected_tensors(oracle).items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("rows", [60, 75])
def test_a_config_may_have_another_number_of_tokens(
    rows: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    oracle, file = oracle_of("llama3", vocab_size=68), tmp_path / "mine.toml"
    oracle.save_pretrained(tmp_path / "hf")
    args = [line.partition("model.args.")[2] for line in options_of(spec_of("llama3", oracle)) if "model.args" in line]
    args = [line if not line.startswith("vocab_size") else f"vocab_size={rows}" for line in args]
    text = "\n".join(["[model]", 'name = "llama3"', "[model.args]", *(line.replace("=", " = ") for line in args)])
    accepted = 'allow_changes = ["model.args.vocab_size"]'
    words = tmp_path / "hf", "--config", file, "--out", tmp_path / "out"
    file.write_text(text)
    assert imported(*words) == 2
    assert accepted in capfd.readouterr().err
    file.write_text(f"{text}\n[checkpoint]\n{accepted}\n")
    assert imported(*words) == 0
    found = tensors_at(tmp_path / "out")
    for name, expected in expected_tensors(oracle).items():
        if len(found[name]) == rows:
            mean = expected.double().mean(0).float().expand(max(rows - 68, 0), -1)
            expected = torch.cat([expected[:rows], mean])
        assert torch.equal(found[name], expected), name


@pytest.mark.long
def test_torchtitan_needs_a_model(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    oracle = oracle_of("llama3", vocab_size=68)
    spec = spec_of("llama3", oracle)
    save_torchtitan("llama3", oracle, tmp_path / "titan")
    assert imported(tmp_path / "titan", "--out", tmp_path / "out") == 2
    assert "(--model, --config)" in capfd.readouterr().err
    assert imported(tmp_path / "titan", "--model", "llama3", "--out", tmp_path / "out") == 2
    assert "(--flavor, --config)" in capfd.readouterr().err
    assert imported(tmp_path / "titan", "--model", "llama3", "--flavor", "debug", "--out", tmp_path / "out") == 2
    assert "[24, 24]" in capfd.readouterr().err
    args = "\n".join(line.partition("model.args.")[2] for line in options_of(spec) if "model.args" in line)
    (tmp_path / "mine.toml").write_text(f'[model]\nname = "llama3"\n[model.args]\n{args.replace("=", " = ")}\n')
    assert imported(tmp_path / "titan", "--config", tmp_path / "mine.toml", "--out", tmp_path / "out") == 0
    assert_same(tensors_at(tmp_path / "out"), expected_tensors(oracle))
    assert not list(tmp_path.glob("out*/.staging*"))


MISTAKES: dict[str, list[str]] = {
    "taken": ["hf", "--out", "taken"],
    "a file": ["hf", "--out", "notes.txt"],
    "ours": ["taken", "--out", "x"],
    "empty": ["empty", "--out", "x"],
    "gone": ["gone", "--out", "x"],
    "other family": ["hf", "--out", "x", "--model", "qwen3"],
    "both": ["hf", "--out", "x", "--model", "llama3", "--config", "debug"],
    "other size": ["hf", "--out", "x", "--flavor", "8B"],
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("folders")
    oracle_of("llama3").save_pretrained(place / "hf")
    assert imported(place / "hf", "--out", place / "taken") == 0
    (place / "empty").mkdir()
    (place / "notes.txt").touch()
    return place


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_write_nothing(mistake: str, folders: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path, _, out, *rest = MISTAKES[mistake]
    assert imported(folders / path, "--out", folders / out, *rest) == 2
    assert capfd.readouterr().err.startswith("error: ")
    assert not (folders / "x").exists()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", None),
        ("hidden_size", 25),
        ("num_hidden_layers", 1_000_000),
        ("hidden_size", 3 * 2**40),
        ("num_hidden_layers", 2.0),
        ("rms_norm_eps", "1e-5"),
    ],
)
def test_values_that_fit_no_model_are_one_line(
    key: str, value: Any, folders: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    config = json.loads((folders / "hf" / "config.json").read_text()) | {key: value}
    (tmp_path / "config.json").write_text(json.dumps(config))
    os.link(folders / "hf" / "model.safetensors", tmp_path / "model.safetensors")
    assert imported(tmp_path, "--out", tmp_path / "out") == 2
    [line] = capfd.readouterr().err.splitlines()
    assert line.startswith("error: ")


def test_what_a_refusal_of_arguments_offers_is_accepted(
    folders: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    args = {**vars(open_source(str(folders / "hf")).spec.args), "rope_theta": 5e5}
    lines = [f"{name} = {str(value).lower()}" for name, value in args.items() if name != "max_seq_len"]
    toml = tmp_path / "run.toml"
    toml.write_text("\n".join(['[model]\nname = "llama3"', "[model.args]", *lines]))
    words = [folders / "hf", "--config", toml, "--out", tmp_path / "out"]
    assert imported(*words) == 2
    offered = 'allow_changes = ["model.args.rope_theta"]'
    assert f"checkpoint.{offered}" in capfd.readouterr().err
    toml.write_text(f"{toml.read_text()}\n[checkpoint]\n{offered}\n")
    assert imported(*words) == 0
    assert getattr(open_source(str(tmp_path / "out")).spec.args, "rope_theta") == 5e5  # noqa: B009


def test_unexpected_tensors_are_left_out_where_allowed(
    folders: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    stored = load_file(folders / "hf" / "model.safetensors")
    stored |= {f"model.layers.{layer}.extra": torch.ones(2) for layer in (0, 1)}
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folders / "hf" / "config.json").read_bytes())
    assert imported(tmp_path, "--out", tmp_path / "out") == 2
    assert "--allow-unexpected 'model.layers.*.extra'" in capfd.readouterr().err
    assert imported(tmp_path, "--out", tmp_path / "out", "--allow-unexpected", "model.layers.*.extra") == 0
    del stored["lm_head.weight"]
    save_file(stored, tmp_path / "model.safetensors")
    assert imported(tmp_path, "--out", tmp_path / "out2", "--allow-unexpected", "*") == 2
    assert mentions(capfd.readouterr().err, "missing", "model.head.output.weight [67, 24]")


def test_a_failed_import_leaves_nothing(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from titanlite.storage.storage import LocalStorage

    def full(self: LocalStorage, folder: str, manifest: bytes) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "publish", full)
        assert imported(folders / "hf", "--out", tmp_path / "out") == 1
    [line] = capfd.readouterr().err.splitlines()
    assert mentions(line, "error", "[Errno 28]")
    assert list((tmp_path / "out").iterdir()) == []
    (tmp_path / "out" / ".staging-step-00000000-import").mkdir()  # of a killed one
    (tmp_path / "out" / ".staging-step-00000000-import" / "__0_0.distcp").write_bytes(b"half")
    assert imported(folders / "hf", "--out", tmp_path / "out") == 0
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["step-00000000"]


def test_memory_holds_one_tensor_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that are alive while each one is read: none of those before it."""
    import weakref

    from titanlite.tools.convert import import_weights

    oracle_of("qwen3_moe").save_pretrained(tmp_path / "hf")
    alive: list[weakref.ref[torch.Tensor]] = []
    most = []
    original = import_weights.read_whole

    def read(*words: Any, **options: Any) -> torch.Tensor:
        most.append(sum(ref() is not None for ref in alive))
        tensor = original(*words, **options)
        alive.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(import_weights, "read_whole", read)
    assert imported(tmp_path / "hf", "--out", tmp_path / "out") == 0
    assert len(most) > 20
    assert max(most) <= 1


def test_sources_of_other_programs_have_their_tokenizer(folders: Path, tmp_path: Path) -> None:
    import tokenizers

    source = open_source(str(folders / "hf"))
    assert (source.tokenizer, source.config) == (None, None)
    assert source.identity
    for name in ("config.json", "model.safetensors"):
        os.link(folders / "hf" / name, tmp_path / name)
    tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"a": 0, "b": 1, "c": 2}, merges=[])).save(
        str(tmp_path / "tokenizer.json")
    )
    tokenizer = open_source(str(tmp_path)).tokenizer
    assert tokenizer
    assert tokenizer.vocab_size == 3
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    with pytest.raises(UserError, match=r"\bmodel\.layers\.1\."):
        load_model(open_source(str(tmp_path)))
