"""`export --check` names what differs: each mistake that tables of names can have is made on purpose."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models

from tests.support.helpers import mentions
from tests.support.weights import OWN, one_process, random_model, save_model, save_random
from titanlite.data.tokenizer import load_tokenizer
from titanlite.models.base import Model
from titanlite.models.formats import Entry, Formats, HuggingFace, Table
from titanlite.tools import cli
from titanlite.tools.convert import check as check_module
from titanlite.tools.convert.check import CheckFailed, check_folder
from titanlite.tools.convert.export import OutputFolder, export_folder
from titanlite.tools.convert.layout import export_tensors
from titanlite.tools.convert.source import OpenedWeights, open_source
from titanlite.tools.convert.tokenizer_files import read_generation

Change = Callable[[Entry], Entry]


def with_table(source: OpenedWeights, change: Change, **fields: object) -> OpenedWeights:
    """The source with another table of names in its model's class."""
    right = form_of(source.spec.model_cls)
    table = Table([change(entry) for entry in right.tensors.entries])
    formats = Formats(hugging_face=replace(right, tensors=table, **fields))
    model_cls = type("Wrong", (source.spec.model_cls,), {"formats": formats})
    return replace(source, spec=source.spec._replace(model_cls=model_cls))


def form_of(model_cls: type[Model]) -> HuggingFace:
    assert model_cls.formats.hugging_face is not None
    return model_cls.formats.hugging_face


def failure(source: OpenedWeights, out: Path) -> str:
    with pytest.raises(CheckFailed) as caught:
        export_folder(source, OutputFolder(str(out)), max_shard_bytes=10**9, check=True)
    assert not out.exists()
    assert not out.with_name(f".{out.name}.staging").exists()
    return str(caught.value)


def exchanged(one: str, other: str) -> Change:
    """A table in which two tensors of a block have each other's names."""

    def change(entry: Entry) -> Entry:
        for a, b in ((one, other), (other, one)):
            if entry.ours.endswith(a):
                return replace(entry, ours=entry.ours.removesuffix(a) + b)
        return entry

    return change


def marked(suffixes: tuple[str, ...], **fields: bool) -> Change:
    return lambda entry: replace(entry, **fields) if entry.ours.endswith(suffixes) else entry


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, OpenedWeights]:
    """A source of each family. Experts are square, so that one that is transposed has the right shape."""
    found = {}
    for family in OWN:
        folder = tmp_path_factory.mktemp(family)
        found[family] = open_source(str(save_random(folder, family, hidden_dim=48)[0]))
    return found


OR = ", or an argument in config.json"
MISTAKES: dict[str, tuple[str, Change, str]] = {
    "swapped projections": (
        "llama3",
        exchanged("w1.weight", "w3.weight"),
        "layers.0.feed_forward: ",
    ),
    "swapped norms": (
        "qwen3",
        exchanged("attention_norm.weight", "ffn_norm.weight"),
        "layers.0: layers.0.attention_norm.weight (model.layers.0.post_attention_layernorm.weight) and ",
    ),
    "rotary layout of keys": (
        "qwen3",
        marked(("wk.weight",), interleaved=True),
        f"layers.0.attention.wk: layers.0.attention.wk.weight (model.layers.0.self_attn.k_proj.weight){OR}",
    ),
    "all experts transposed": (
        "qwen3_moe",
        marked(("feed_forward.w1", "feed_forward.w2", "feed_forward.w3"), transposed=False),
        "layers.0.feed_forward: layers.0.feed_forward.router (model.layers.0.mlp.gate.weight) and "
        "layers.0.feed_forward.w1 (model.layers.0.mlp.experts.0.gate_proj.weight) and ",
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("family", OWN)
def test_tokens_that_a_tokenizer_lacks_are_stated_as_null(
    family: str, sources: dict[str, OpenedWeights], tmp_path: Path
) -> None:
    """The classes of transformers have ids of other tokenizers as defaults: Llama's 1 and 2, SmolLM3's 128000."""
    fast = Tokenizer(models.BPE({letter: i for i, letter in enumerate("abc")}, []))
    fast.save(str(tmp_path / "tokenizer.json"))
    source = replace(sources[family], tokenizer=load_tokenizer(str(tmp_path / "tokenizer.json")))
    export_folder(source, OutputFolder(str(tmp_path / "hf")), max_shard_bytes=10**9, with_tokenizer=False)
    stated = json.loads((tmp_path / "hf/config.json").read_text())
    read = transformers.AutoConfig.from_pretrained(tmp_path / "hf")
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert (stated[key], getattr(read, key)) == (None, None), key
    assert read_generation(tmp_path / "hf").ids == dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))


@pytest.mark.long
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_of_the_table_is_named(name: str, sources: dict[str, OpenedWeights], tmp_path: Path) -> None:
    family, change, reason = MISTAKES[name]
    text = failure(with_table(sources[family], change), tmp_path / "hf")
    assert text.splitlines()[1].startswith(f"  {reason}")
    assert text.startswith("hidden states after block 0 ")


@pytest.mark.long
def test_mistakes_outside_of_the_blocks_are_named(sources: dict[str, OpenedWeights], tmp_path: Path) -> None:
    def swapped(entry: Entry) -> Entry:
        names = {"tok_embeddings.weight": "head.output.weight", "head.output.weight": "tok_embeddings.weight"}
        return replace(entry, ours=names.get(entry.ours, entry.ours))

    text = failure(with_table(sources["llama3"], swapped), tmp_path / "hf")
    assert mentions(text, "embedding", "tok_embeddings.weight", "lm_head.weight")

    def last_norm(entry: Entry) -> Entry:
        norms = {"head.norm.weight": "layers.1.ffn_norm.weight"}
        return replace(entry, ours=norms.get(entry.ours, entry.ours))

    table = with_table(sources["llama3"], last_norm)
    folder = tmp_path / "norm"
    with pytest.raises(CheckFailed, match=r"model\.norm\.weight|logits"):
        export_folder(table, OutputFolder(str(folder)), max_shard_bytes=10**9, check=True, drop=["head.norm.weight"])


@pytest.mark.long
def test_a_wrong_argument_of_the_config_is_found_in_its_block(
    sources: dict[str, OpenedWeights], tmp_path: Path
) -> None:
    source = sources["qwen3"]
    fields = {name: key for name, key in form_of(source.spec.model_cls).fields.items() if name != "norm_eps"}
    text = failure(
        with_table(source, lambda entry: entry, fields=fields, constants={"rms_norm_eps": 0.5}), tmp_path / "a"
    )
    assert mentions(text.splitlines()[0], "block 0")
    assert text.splitlines()[1].startswith("  layers.0.attention_norm: ")


def test_missing_tensors_are_named(sources: dict[str, OpenedWeights], tmp_path: Path) -> None:
    def other(entry: Entry) -> Entry:
        return replace(entry, theirs=entry.theirs.replace("k_proj", "key_proj"))

    text = failure(with_table(sources["llama3"], other), tmp_path / "a")
    assert re.search(r"missing: .*model\.layers\.0\.self_attn\.k_proj\.weight", text)
    assert re.search(r"unexpected: .*model\.layers\.0\.self_attn\.key_proj\.weight", text)


def test_changed_files_are_named(sources: dict[str, OpenedWeights], tmp_path: Path) -> None:
    """A tensor of the files that is not the checkpoint's is named before anything is computed."""
    source = sources["llama3"]
    out = tmp_path / "hf"
    export_folder(source, OutputFolder(str(out)), max_shard_bytes=10**9)
    tensors = export_tensors(source, form_of(source.spec.model_cls).tensors, dtype=None, drop=[])
    assert mentions(check_folder(source, out, tensors), len(tensors))
    content = load_file(out / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    content[name][3, 5] += 0.25
    save_file(content, out / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckFailed, match=rf"{name} .*layers\.1\.feed_forward\.w3\.weight .*\b0\.25\b"):
        check_folder(source, out, tensors)
    content[name] = content[name][:-1].clone()
    save_file(content, out / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckFailed, match=rf"{name} .*\[47, 48\].*\[48, 48\]"):
        check_folder(source, out, tensors)


@pytest.mark.parametrize("family", OWN)
def test_the_command_reports_what_it_checked(
    family: str, sources: dict[str, OpenedWeights], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["checkpoint", "export", sources[family].where, "--out", str(tmp_path / "hf"), "--check"]
    assert cli.run([*words, "--dtype", "bfloat16", "--max-shard-size", "50KB"]) == 0
    out = capsys.readouterr().out
    found = re.search(r"check: (\d+) .*\b128\b.* (\S+) \(.*\).* (\S+)\n", out)
    assert found, out
    assert int(found[1]) == {"llama3": 21, "qwen3": 24, "qwen3_moe": 45}[family]
    assert float(found[2]) < 1e-5
    assert float(found[3]) < 1e-5


def test_without_transformers_nothing_is_computed(
    sources: dict[str, OpenedWeights], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_module, "find_spec", lambda name: None)
    done = export_folder(sources["qwen3_moe"], OutputFolder(str(tmp_path / "hf")), max_shard_bytes=10**9, check=True)
    assert mentions(done.report, "45 tensors", "nothing was computed")


@pytest.mark.long
def test_the_example_of_the_guide_is_the_gpt2_of_transformers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model of the user's own is exported by its table, transposed matrices included."""
    toml = tmp_path / "gpt2.toml"
    example = Path(__file__).parents[4] / "examples" / "my_model" / "gpt2.py"
    args = "dim = 32\nn_layers = 2\nn_heads = 2\nvocab_size = 384\n"
    toml.write_text(
        f'[model]\nfile = "{example}"\n[model.args]\n{args}[data]\ntokenizer = "bytes"\n[training]\nseq_len = 64\n'
    )
    with one_process():
        checkpoint = save_model(tmp_path, random_model(toml), toml)
    words = ["checkpoint", "export", str(checkpoint), "--out", str(tmp_path / "hf"), "--model-file", str(example)]
    assert cli.run([*words, "--check"]) == 0
    found = re.search(r"check: 28 tensors .* logits within (\S+)\n", capsys.readouterr().out)
    assert found
    assert float(found[1]) < 1e-5
    assert type(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")).__name__ == "GPT2LMHeadModel"
