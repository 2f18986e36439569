"""Tokenizer files that transformers loads, with the ids of the tokenizer that training used."""

import base64
import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titanlite.data.tokenizer import BESIDE, LLAMA3_SPECIAL_TOKENS, LLAMA3_SPLIT, Tokenizer, files_of, find_tokenizer
from titanlite.models.formats import complete
from titanlite.runtime.files import read_small
from titanlite.tools.ingest.chat_template import read_json

ENDS = "bos_token_id", "eos_token_id", "pad_token_id"
Files = dict[str, bytes]


@dataclass(frozen=True)
class Generation:
    """What a Hugging Face folder states about generation, and our config cannot hold."""

    ids: dict[str, Any]
    """Ids of special tokens in config.json. There may be several that end a text."""
    config: dict[str, Any]
    """Content of generation_config.json."""

    def end_ids(self) -> set[int]:
        """Return the ids that end a text."""
        found = self.config.get("eos_token_id", self.ids.get("eos_token_id"))
        return {token for token in (found if isinstance(found, list) else [found]) if isinstance(token, int)}


def read_generation(folder: Path) -> Generation:
    """Return what the files of a Hugging Face folder state; nothing of files that are not there. A key that config.json
    lacks has the default of its class."""
    config = read_json(folder / "config.json")
    with suppress(ValueError):  # a wrong value is an error where the arguments are read
        config, _ = complete(config, config.get("model_type", ""))
    return Generation({key: config[key] for key in ENDS if key in config}, read_json(folder / "generation_config.json"))


def generation_beside(tokenizer: Tokenizer) -> Generation:
    """Return what the folder of a tokenizer.json states; nothing for other tokenizers."""
    path = find_tokenizer(tokenizer.name)
    return Generation({}, {}) if path is None or path.suffix != ".json" else read_generation(path.parent)


def tokenizer_files(tokenizer: Tokenizer, *, add_bos: bool | None, max_length: int) -> Files:
    """Return the content of each file.

    Args:
        add_bos: whether documents began with the beginning-of-document token in training, so that the tokenizer puts it
            before a text. None leaves the files of another program as they are.
        max_length: positions of the model.

    Raises:
        UserError: a file to copy is a link that leads out of the tokenizer's folder.
    """
    path = find_tokenizer(tokenizer.name)
    if path is not None and path.suffix == ".json":
        return _copied(path, tokenizer, add_bos, max_length)
    ranks = {bytes([i]): i for i in range(256)} if path is None else _ranks(path)
    names = LLAMA3_SPECIAL_TOKENS[: tokenizer.vocab_size - len(ranks)]
    body = _bpe(ranks, names, splits=path is not None, bos=None if add_bos is False else names[0])
    return {"tokenizer.json": json_bytes(body), **_config(names[0], names[1], max_length)}


def _copied(path: Path, tokenizer: Tokenizer, add_bos: bool | None, max_length: int) -> Files:
    from titanlite.data.tokenizers.huggingface import AS_IT_IS, HuggingFaceTokenizer

    assert isinstance(tokenizer, HuggingFaceTokenizer)
    bos, eos = tokenizer.text_of(tokenizer.bos_id), tokenizer.text_of(tokenizer.eos_id)
    files = files_of(path, BESIDE)
    if "tokenizer_config.json" not in files:
        files = {**_config(bos, eos, max_length), **files}
    if not tokenizer.is_as_its_file:
        files["tokenizer.json"] = tokenizer.to_json().encode()
    config = json.loads(files["tokenizer_config.json"])
    if config.get("tokenizer_class") != AS_IT_IS:  # the model's config.json beside it decides what other classes do
        config = {**(tokenizer.special_tokens or {}), **config, "tokenizer_class": AS_IT_IS}
        files["tokenizer_config.json"] = json_bytes(config)
    opening = [] if tokenizer.bos_id is None or not add_bos else [tokenizer.bos_id]
    # transformers 5 reads the post-processor alone. Other programs read the switches of tokenizer_config.json.
    spec = json.loads(files["tokenizer.json"])
    switches = {"add_bos_token": bool(opening), "add_eos_token": False}
    stated = {name: config[name] for name in switches if name in config}
    if add_bos is None or (tokenizer.added_ids() == (opening, []) and stated.items() <= switches.items()):
        return files
    config = {"bos_token": bos, **config, **switches}
    template = _template(bos, {bos: opening[0]}) if bos and opening else None
    parts = [part for part in (_byte_level(spec.get("post_processor")), template) if part]
    spec["post_processor"] = {"type": "Sequence", "processors": parts} if len(parts) > 1 else next(iter(parts), None)
    return {**files, "tokenizer_config.json": json_bytes(config), "tokenizer.json": json_bytes(spec)}


def _byte_level(processor: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the part of a post-processor that adds no token, and only counts the letters of a token."""
    parts = [processor, *processor.get("processors", [])] if processor else []
    return next((part for part in parts if part["type"] == "ByteLevel"), None)


def _ranks(path: Path) -> dict[bytes, int]:
    lines = map(bytes.split, read_small(path).splitlines())
    return {base64.b64decode(token): int(rank) for token, rank in lines}


def _config(bos: str | None, eos: str | None, max_length: int) -> Files:
    ends = {name: token for name, token in (("bos_token", bos), ("eos_token", eos)) if token is not None}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": max_length,
        **ends,
    }
    return {"tokenizer_config.json": json_bytes(config), "special_tokens_map.json": json_bytes(ends)}


def _bpe(ranks: dict[bytes, int], special: tuple[str, ...], *, splits: bool, bos: str | None) -> dict[str, Any]:
    """Return a tokenizer.json of byte-level BPE.

    Args:
        splits: texts are split by Llama 3's pattern.
    """
    letters = _byte_letters()

    def text(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    # tiktoken joins any two neighbours that make a token, the lowest rank first. So each such pair is a merge.
    pairs = []
    for token, rank in ranks.items():
        cuts = ((token[:at], token[at:]) for at in range(1, len(token)))
        pairs += [(rank, ranks[a], ranks[b], a, b) for a, b in cuts if a in ranks and b in ranks]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": LLAMA3_SPLIT}, "behavior": "Isolated", "invert": False}
    ids = {token: len(ranks) + i for i, token in enumerate(special)}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": token, **flags, "special": True} for token, i in ids.items()],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]} if splits else byte_level,
        "post_processor": _template(bos, ids) if bos else None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,
            "vocab": {text(token): rank for token, rank in sorted(ranks.items(), key=lambda item: item[1])},
            "merges": [[text(a), text(b)] for *_, a, b in sorted(pairs)],
        },
    }


def _template(bos: str, ids: dict[str, int]) -> dict[str, Any]:
    """Return the post-processor that puts a token before each text."""

    def token(name: str, sequence: int) -> dict[str, Any]:
        return {"SpecialToken": {"id": name, "type_id": sequence}}

    def sequence(name: str, number: int) -> dict[str, Any]:
        return {"Sequence": {"id": name, "type_id": number}}

    return {
        "type": "TemplateProcessing",
        "single": [token(bos, 0), sequence("A", 0)],
        "pair": [token(bos, 0), sequence("A", 0), token(bos, 1), sequence("B", 1)],
        "special_tokens": {bos: {"id": bos, "ids": [ids[bos]], "tokens": [bos]}},
    }


def _byte_letters() -> dict[int, str]:
    """Return the letter that stands for each byte in a byte-level tokenizer.json, as GPT-2 has them."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in visible]
    return {byte: chr(byte) for byte in visible} | {byte: chr(0x100 + i) for i, byte in enumerate(others)}


def json_bytes(value: Any) -> bytes:
    """Return the content of a JSON file as transformers writes it."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
