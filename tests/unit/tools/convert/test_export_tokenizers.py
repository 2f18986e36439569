"""Tokenizer files of an export: transformers reads the ids that training used."""

import base64
import json
import random
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import transformers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.support.helpers import mentions
from titanlite.data.tokenizer import LLAMA3_SPECIAL_TOKENS, SHIPPED, Tokenizer, load_tokenizer
from titanlite.data.tokenizers.huggingface import AS_IT_IS, HuggingFaceTokenizer
from titanlite.models.llama3 import Llama3
from titanlite.runtime.console import install_hint
from titanlite.runtime.errors import UserError
from titanlite.tools import cli
from titanlite.tools.convert.check import CheckFailed, check_tokenizer
from titanlite.tools.convert.prompts import prompt_encoder
from titanlite.tools.convert.tokenizer_files import tokenizer_files


def texts() -> Iterator[str]:
    """Code, prose in many scripts, spaces, and characters drawn at random."""
    yield Path(random.__file__).read_text()
    yield Path(json.__file__).read_text()
    yield "  \t\n\n Ünïcödé ŽŠ 東京都 🤖🏽‍🚀 नमस्ते\r\n\r\n  a  b   c    d\u00a0e\u200b 12345678 it's IT'S we'll"
    yield "aaaaaaaaaaaaaaaaaaaa selfself  self.self((((((((((------========>>>>>>>>"
    draw = random.Random(0)
    letters = "aeinorst_ \n\t()=.,:'\"0129éß中🙂"
    for _ in range(60):
        yield "".join(draw.choices(letters, k=60))
    for _ in range(50):
        yield "".join(chr(draw.choice([draw.randrange(1, 0xD800), draw.randrange(0xE000, 0x11000)])) for _ in range(20))
    yield ""


def written(tokenizer: Tokenizer, folder: Path, *, add_bos: bool | None = True) -> Any:
    """Write the files beside a config.json of Llama, and load them with transformers."""
    form = Llama3.formats.hugging_face
    assert form is not None
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(form.to_config(Llama3.flavors["debug"])))
    for name, data in tokenizer_files(tokenizer, add_bos=add_bos, max_length=512).items():
        (folder / name).write_bytes(data)
    return transformers.AutoTokenizer.from_pretrained(folder)


def assert_same_ids(ours: Tokenizer, theirs: Any) -> None:
    for text in texts():
        ids = ours.encode(text).tolist()
        assert theirs.encode(text, add_special_tokens=False) == ids, text
        assert theirs.decode(ids, clean_up_tokenization_spaces=False) == ours.decode(np.array(ids, dtype=np.int64))


def rank_file(path: Path) -> Path:
    """A tiktoken file whose ranks are not those of any merging: whole words come before their parts."""
    words = ["self", "aa", "aaa", "aaaa", "aaaaaa", " se", "lf", "th", "the", " the", "東", "\n\n", "    ", "  ", "in"]
    tokens = [bytes([i]) for i in random.Random(1).sample(range(256), 256)] + [word.encode() for word in words]
    lines = [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(tokens)]
    path.write_text("\n".join(lines))
    return path


@pytest.mark.long
@pytest.mark.parametrize("name", ["bytes", "python-2k", "ranks.tiktoken"])
def test_ids_are_those_of_training(name: str, tmp_path: Path) -> None:
    if name.startswith("ranks"):
        name = str(rank_file(tmp_path / name))
    ours = load_tokenizer(name)
    theirs = written(ours, tmp_path / "hf")
    assert_same_ids(ours, theirs)
    assert (theirs.bos_token_id, theirs.eos_token_id) == (ours.bos_id, ours.eos_id)
    assert len(theirs) == ours.vocab_size
    assert theirs.model_max_length == 512
    assert theirs.encode("self") == [ours.bos_id, *ours.encode("self").tolist()], "documents begin with it in training"
    assert theirs.encode("<|begin_of_text|>", add_special_tokens=False) == [ours.bos_id]
    again = load_tokenizer(str(tmp_path / "hf"))
    assert (again.bos_id, again.eos_id, again.vocab_size) == (ours.bos_id, ours.eos_id, ours.vocab_size)
    assert (again.token_bytes() == ours.token_bytes()).all()
    for text in texts():
        assert (again.encode(text) == ours.encode(text)).all()
    without = written(ours, tmp_path / "without", add_bos=False)
    assert without.encode("self") == ours.encode("self").tolist()


def test_special_tokens_of_llama_have_their_names(tmp_path: Path) -> None:
    ours = load_tokenizer("python-2k")
    theirs = written(ours, tmp_path / "hf")
    first = len((SHIPPED / "python-2k.model").read_bytes().splitlines())
    assert theirs.convert_tokens_to_ids([*LLAMA3_SPECIAL_TOKENS]) == [*range(first, ours.vocab_size)]
    assert theirs.decode([first, *ours.encode("def f(): pass").tolist()], skip_special_tokens=True) == "def f(): pass"


@pytest.mark.long
def test_a_tokenizer_json_is_copied_with_what_belongs_to_it(tmp_path: Path) -> None:
    folder = tmp_path / "trained"
    folder.mkdir()
    fast = tokenizers.Tokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet)
    fast.train([random.__file__], trainer)
    fast.save(str(folder / "tokenizer.json"))
    ours = load_tokenizer(str(folder))
    theirs = written(ours, tmp_path / "plain")
    assert_same_ids(ours, theirs)
    assert theirs.bos_token_id is None
    assert theirs.eos_token_id == ours.eos_id is not None
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text("{{ eos_token }}!")
    (folder / "notes.txt").write_text("mine")
    files = tokenizer_files(load_tokenizer(str(folder)), add_bos=True, max_length=512)
    assert files.keys() == {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert all(data == (folder / name).read_bytes() for name, data in files.items())
    theirs = written(load_tokenizer(str(folder)), tmp_path / "with_config")
    assert theirs.pad_token == "<|endoftext|>"
    assert theirs.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "<|endoftext|>!"


BOS, EOS = "<|begin_of_text|>", "<|end_of_text|>"
TEMPLATES = {"bos": f"{BOS} $A", "bos_eos": f"{BOS} $A {EOS}", "eos": f"$A {EOS}", "nothing": "$A"}
SWITCHES = "add_bos_token", "add_eos_token"
STATED: list[dict[str, bool]] = [{}, {SWITCHES[0]: True}, {SWITCHES[0]: False}, {SWITCHES[1]: True}]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "tokenizer"
    assert cli.run(["data", "tokenizer", random.__file__, "--out", str(folder), "--vocab-size", "600"]) == 0
    return folder


def changed(trained: Path, folder: Path, processor: str, config: dict[str, Any] | None) -> Path:
    """Copy a tokenizer that `titanlite data tokenizer` wrote, with a post-processor as other programs have it."""
    shutil.copytree(trained, folder)
    fast = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    special: list[Any] = [(name, fast.token_to_id(name)) for name in (BOS, EOS)]
    level = processors.ByteLevel(trim_offsets=False)
    if name := processor.removeprefix("level").removeprefix("_"):
        kinds = {"roberta": processors.RobertaProcessing(*special[::-1])}
        template = kinds.get(name) or processors.TemplateProcessing(single=TEMPLATES[name], special_tokens=special)
        fast.post_processor = processors.Sequence([level, template]) if name != processor else template
    elif processor:
        fast.post_processor = level
    fast.save(str(folder / "tokenizer.json"))
    file = folder / "tokenizer_config.json"
    if config is None:
        file.unlink()
    else:
        file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return folder


@pytest.mark.long
@pytest.mark.parametrize("add_bos", [True, False])
@pytest.mark.parametrize("config", [None, *STATED, {"tokenizer_class": "LlamaTokenizerFast"}], ids=str)
@pytest.mark.parametrize("processor", ["", "level", *TEMPLATES, "level_bos", "level_bos_eos", "roberta"])
def test_an_export_begins_a_text_as_training_did(
    processor: str, config: dict[str, Any] | None, add_bos: bool, trained: Path, tmp_path: Path
) -> None:
    ours = load_tokenizer(str(changed(trained, tmp_path / "own", processor, config)))
    assert ours.bos_id is not None
    theirs = written(ours, tmp_path / "hf", add_bos=add_bos)
    expected = [*([ours.bos_id] if add_bos else []), *ours.encode("def f(): 1").tolist()]
    assert theirs.encode("def f(): 1") == expected
    plain = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "hf" / "tokenizer.json"))
    if SWITCHES[0] in json.loads((tmp_path / "hf" / "tokenizer_config.json").read_text()):
        assert plain.encode("def f(): 1") == expected, "programs that read tokenizer.json alone"
    again = load_tokenizer(str(tmp_path / "hf"))
    assert prompt_encoder(again, config=None, chat=None)("def f(): 1") == expected
    kept = tokenizer_files(ours, add_bos=None, max_length=512)
    assert kept["tokenizer.json"] == (tmp_path / "own" / "tokenizer.json").read_bytes()


@pytest.mark.long
@pytest.mark.parametrize("config", STATED, ids=str)
@pytest.mark.parametrize("processor", ["", "bos", "level_bos_eos"])
def test_files_of_others_are_read_as_transformers_does(
    processor: str, config: dict[str, Any], trained: Path, tmp_path: Path
) -> None:
    ours = load_tokenizer(str(changed(trained, tmp_path / "own", processor, config)))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "own").encode("a b")
    ids = ours.encode("a b").tolist()
    assert prompt_encoder(ours, config=None, chat=None)("a b") == theirs[: theirs.index(ids[0]) + len(ids)]


@pytest.mark.long
@pytest.mark.parametrize("add_bos", [True, False])
@pytest.mark.parametrize("name", ["bytes", "python-2k", "ranks.tiktoken"])
def test_translated_files_begin_a_text_as_training_did(name: str, add_bos: bool, tmp_path: Path) -> None:
    ours = load_tokenizer(str(rank_file(tmp_path / name)) if name.startswith("ranks") else name)
    theirs = written(ours, tmp_path / "hf", add_bos=add_bos)
    expected = [*([ours.bos_id] if add_bos else []), *ours.encode("self").tolist()]
    assert theirs.encode("self") == expected
    assert prompt_encoder(load_tokenizer(str(tmp_path / "hf")), config=None, chat=None)("self") == expected


# Classes of transformers that take only the vocabulary from a tokenizer.json

HARD = ("345 in 2024", " the  end\n\n it's e\u0301", "naïve 日本")


def splits_its_own_way(folder: Path) -> dict[str, Any]:
    """A byte-level BPE with numbers of three digits and no normalizer."""
    fast = tokenizers.Tokenizer(models.BPE())
    split = pre_tokenizers.Split(tokenizers.Regex(r"\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+"), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    fast.decoder = decoders.ByteLevel()
    options: dict[str, Any] = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet(), "show_progress": False}
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<|endoftext|>"], **options)
    fast.train_from_iterator([f"345 in 2024 the 345 end of 2024 e\u0301 {HARD[2]}"] * 50, trainer)
    fast.save(str(folder / "tokenizer.json"))
    return {"eos_token": "<|endoftext|>"}


def like_llama_2(folder: Path) -> dict[str, Any]:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *"▁thendof", "he", "▁t", "▁the"]
    merges = [("h", "e"), ("▁", "t"), ("▁t", "he")]
    vocab = {token: i for i, token in enumerate(tokens)}
    fast = tokenizers.Tokenizer(models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    fast.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    strip = [decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    fast.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), *strip])
    fast.add_special_tokens([tokenizers.AddedToken(token, normalized=False) for token in tokens[:3]])
    fast.save(str(folder / "tokenizer.json"))
    return {"bos_token": "<s>", "eos_token": "</s>"}


QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
KINDS = {"split": splits_its_own_way, "llama": like_llama_2}
REBUILT = [
    ("split", "Qwen2Tokenizer", "qwen3"),
    ("split", "Qwen2TokenizerFast", None),
    ("split", "PreTrainedTokenizerFast", "qwen2"),
    ("split", None, "qwen3"),
    ("split", "GPTNeoXTokenizerFast", "gpt_neox"),
    ("split", "GPTNeoXTokenizer", "olmo2"),
    ("split", "GPT2Tokenizer", "llama"),
    ("split", "CohereTokenizer", "cohere"),
    ("split", "RobertaTokenizer", None),
    ("split", "LlamaTokenizer", "llama"),
    ("llama", "LlamaTokenizer", "llama"),
    ("llama", "LlamaTokenizerFast", "mistral"),
    ("llama", "GemmaTokenizer", None),
    ("llama", "PreTrainedTokenizerFast", "llama"),
]


def of_class(folder: Path, kind: str, named: str | None, model_type: str | None) -> Path:
    folder.mkdir()
    config = KINDS[kind](folder) | ({"tokenizer_class": named} if named else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if model_type:
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder


@pytest.mark.long
@pytest.mark.parametrize(("kind", "named", "model_type"), REBUILT)
def test_classes_that_rebuild_a_tokenizer_are_followed(
    kind: str, named: str | None, model_type: str | None, tmp_path: Path
) -> None:
    own = of_class(tmp_path / "own", kind, named, model_type)
    ours, theirs = load_tokenizer(str(own)), transformers.AutoTokenizer.from_pretrained(own)
    assert isinstance(ours, HuggingFaceTokenizer)
    marked = "".join(f"{theirs.eos_token}{text}" for text in HARD)
    exported = {keep: written(ours, tmp_path / f"hf{keep}", add_bos=keep) for keep in (False, None)}
    for text in (*HARD, marked):
        ids = theirs.encode(text, add_special_tokens=False)
        assert (ours.encode_marked(text).ids if text == marked else ours.encode(text).tolist()) == ids
        assert [exported[keep].encode(text, add_special_tokens=False) for keep in exported] == [ids, ids]
    as_it_is = load_tokenizer(str(own / "tokenizer.json"))
    assert as_it_is.fingerprint == ours.fingerprint, "the same folder, named by its file"
    again = load_tokenizer(str(tmp_path / "hfFalse"))
    assert [again.encode(text).tolist() for text in HARD] == [ours.encode(text).tolist() for text in HARD]


@pytest.mark.long
def test_a_rebuilt_tokenizer_has_another_fingerprint(tmp_path: Path) -> None:
    folders = [of_class(tmp_path / str(named), "split", named, "qwen3") for named in ("Qwen2Tokenizer", AS_IT_IS)]
    one, other = (load_tokenizer(str(folder)) for folder in folders)
    assert (folders[0] / "tokenizer.json").read_bytes() == (folders[1] / "tokenizer.json").read_bytes()
    assert one.encode(HARD[0]).tolist() != other.encode(HARD[0]).tolist()
    assert one.fingerprint != other.fingerprint
    (folders[1] / "tokenizer_config.json").unlink()
    (folders[1] / "config.json").unlink()
    assert load_tokenizer(str(folders[1])).fingerprint == other.fingerprint, "as before classes were looked at"


@pytest.mark.long
def test_a_class_that_transformers_cannot_load_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = of_class(tmp_path / "own", "split", "T5Tokenizer", "llama")
    with pytest.raises(UserError) as caught:
        load_tokenizer(str(folder))
    assert mentions(str(caught.value), "data.tokenizer: ", "T5Tokenizer", AS_IT_IS)
    monkeypatch.setitem(sys.modules, "transformers", None)
    for named in ("T5Tokenizer", "Qwen2Tokenizer", AS_IT_IS):
        shutil.rmtree(folder)
        of_class(folder, "split", named, "llama")
        if named == AS_IT_IS:
            assert load_tokenizer(str(folder)).vocab_size == 278
        else:
            with pytest.raises(UserError) as caught:
                load_tokenizer(str(folder))
            assert mentions(str(caught.value), "data.tokenizer: ", named, install_hint("transformers"), AS_IT_IS)


@pytest.mark.long
def test_an_export_that_transformers_reads_with_other_tokens_fails(tmp_path: Path) -> None:
    """Beside a config.json of qwen2, no class that is named counts."""
    ours = load_tokenizer(str(of_class(tmp_path / "own", "split", AS_IT_IS, None)))
    written(ours, tmp_path / "hf")
    check_tokenizer(ours, tmp_path / "hf")
    (tmp_path / "hf/config.json").write_text(json.dumps({"model_type": "qwen2"}))
    with pytest.raises(CheckFailed) as caught:
        check_tokenizer(ours, tmp_path / "hf")
    assert mentions(str(caught.value), "qwen2", "Qwen2Tokenizer", "--no-tokenizer")


def test_dropout_is_off(tmp_path: Path) -> None:
    own = of_class(tmp_path / "own", "split", None, None)
    ids = load_tokenizer(str(own)).encode(HARD[0]).tolist()
    spec = json.loads((own / "tokenizer.json").read_text())
    spec["model"]["dropout"] = 0.9
    (own / "tokenizer.json").write_text(json.dumps(spec))
    fast = tokenizers.Tokenizer.from_file(str(own / "tokenizer.json"))
    assert len({tuple(fast.encode(HARD[0]).ids) for _ in range(20)}) > 1
    ours = load_tokenizer(str(own))
    theirs = written(ours, tmp_path / "hf")
    for _ in range(20):
        assert ours.encode(HARD[0]).tolist() == ids == theirs.encode(HARD[0])
    check_tokenizer(ours, tmp_path / "hf")


@pytest.mark.long
def test_a_rebuilt_tokenizer_with_the_same_tokens_keeps_its_fingerprint(tmp_path: Path) -> None:
    """Released files of Qwen differ from what the class builds in `trim_offsets` and in "" for null."""
    split = {"type": "Split", "pattern": {"Regex": QWEN_SPLIT}, "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    of_class(tmp_path / "own", "split", "Qwen2Tokenizer", "qwen3")
    file = tmp_path / "own/tokenizer.json"
    spec = json.loads(file.read_text())
    spec |= {"normalizer": {"type": "NFC"}, "decoder": byte_level}
    spec["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, byte_level]}
    spec["model"] |= {"continuing_subword_prefix": "", "end_of_word_suffix": ""}
    file.write_text(json.dumps(spec))
    with_class = load_tokenizer(str(file))
    for name in ("tokenizer_config.json", "config.json"):
        (tmp_path / "own" / name).unlink()
    (tmp_path / "own/tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    assert load_tokenizer(str(file)).fingerprint == with_class.fingerprint
