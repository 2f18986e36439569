"""Tokenizer files of an export: transformers reads the ids that training used."""

import base64
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import transformers
from tokenizers import decoders, models, pre_tokenizers, trainers

from titanlite.data.tokenizer import LLAMA3_SPECIAL_TOKENS, SHIPPED, Tokenizer, load_tokenizer
from titanlite.models.llama3 import Llama3
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


def written(tokenizer: Tokenizer, folder: Path, *, add_bos: bool = True) -> Any:
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
