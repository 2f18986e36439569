"""tokenizer.json files of Hugging Face, read by their package `tokenizers`."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Encoding
from tokenizers import Tokenizer as FastTokenizer

from titanlite.data.pieces import CUT_RULE, joined, pieces
from titanlite.runtime.errors import UserError
from titanlite.runtime.files import file_beside, read_small

BOS_NAMES = ("<|begin_of_text|>", "<s>", "<bos>", "<|startoftext|>", "<｜begin▁of▁sentence｜>")  # noqa: RUF001
EOS_NAMES = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "<｜end▁of▁sentence｜>", "<|im_end|>")  # noqa: RUF001
"""Names tried in this order if no file names the tokens that begin and end a document. GPT-2's <|endoftext|> only ends
one."""


class HuggingFaceTokenizer:
    """A tokenizer.json. Which tokens begin and end a document is read from the files beside it, tokenizer_config.json,
    special_tokens_map.json or config.json; otherwise special tokens of well-known names are taken.

    Raises:
        UserError: a file is not of its form, or tokenizer.json lacks a token that another file names.
    """

    def __init__(self, path: Path, name: str | None = None) -> None:
        self.name = name or str(path)
        content, spec = _read_json(path)
        try:
            first = FastTokenizer.from_str(content.decode())
            vocab = first.get_vocab()
            missing = _missing_tokens(path, vocab)
            added = spec["added_tokens"] = [*spec["added_tokens"], *missing]
            vocab |= {token["content"]: token["id"] for token in missing}
            special = {token["content"] for token in added if token["special"]}
            self.bos_id, self.eos_id = (
                _document_end(key, path, vocab, [name for name in names if name in special])
                for key, names in (("bos_token", BOS_NAMES), ("eos_token", EOS_NAMES))
            )
            plain = [token for token in added if token["id"] in (self.bos_id, self.eos_id) and not token["special"]]
            for token in plain:
                token["special"] = True
            without_prefix = spec | _without_prefix(spec)
            first = FastTokenizer.from_str(json.dumps(spec)) if missing or plain else first
            later = FastTokenizer.from_str(json.dumps(without_prefix)) if without_prefix != spec else first
        except UserError:
            raise
        except Exception as error:  # tokenizers raises plain Exception for a wrong file
            raise UserError(f"data.tokenizer: {path} is not a tokenizer.json of Hugging Face: {error}") from None
        for tokenizer in (first, later):
            tokenizer.encode_special_tokens = True  # names of special tokens are plain text
            tokenizer.no_truncation()
            tokenizer.no_padding()
        self._first, self._later = first, later
        self.vocab_size = max(vocab.values()) + 1
        self._token_bytes = _token_bytes(spec, vocab, self.vocab_size)
        self._token_bytes[[i for i in (self.bos_id, self.eos_id) if i is not None]] = 0
        key = hashlib.sha256(content + f"{self.bos_id} {self.eos_id}".encode()).hexdigest()[:16]
        self.fingerprint = f"huggingface-{CUT_RULE}-{key}"

    def encode(self, text: str, *, begins: bool = True) -> np.ndarray:
        ids: list[np.ndarray] = []
        for piece in pieces(text):
            tokenizer = self._first if begins and not ids else self._later
            ids.append(np.array(tokenizer.encode(piece, add_special_tokens=False).ids, dtype=np.uint32))
        return joined(ids)

    def decode(self, ids: np.ndarray) -> str:
        return self._first.decode(np.asarray(ids).tolist(), skip_special_tokens=False)

    def encode_marked(self, text: str) -> Encoding:
        """Encode a text in which the names of special tokens stand for those tokens, as in a rendered chat."""
        self._first.encode_special_tokens = False
        try:
            return self._first.encode(text, add_special_tokens=False)
        finally:
            self._first.encode_special_tokens = True

    def text_of(self, token: int | None) -> str | None:
        """Return a token as the file writes it."""
        return None if token is None else self._first.id_to_token(token)

    def added_ids(self) -> tuple[list[int], list[int]]:
        """Return the token ids that the file's post-processor puts before and after a text."""
        plain, whole = (self._first.encode("a", add_special_tokens=adds).ids for adds in (False, True))
        start = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), 0)
        return whole[:start], whole[start + len(plain) :]

    def token_bytes(self) -> np.ndarray:
        """Exact for byte-level BPE, and for SentencePiece's way of writing spaces and bytes, but for the space that is
        put before a text. Of other kinds: the length of the token as it is written."""
        return self._token_bytes.copy()


def _read_json(path: Path) -> tuple[bytes, dict[str, Any]]:
    try:
        content = read_small(path)
        value = json.loads(content)
        if not isinstance(value, dict):
            raise ValueError("not a JSON object")
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"data.tokenizer: {path} cannot be read as JSON: {error}") from None
    return content, value


def _missing_tokens(path: Path, vocab: dict[str, int]) -> list[dict[str, Any]]:
    """Return the tokens that only `added_tokens_decoder` of tokenizer_config.json lists, as entries of `added_tokens`.

    They get the next free ids, as transformers gives them, in the order of the ids that the file states.
    """
    beside = file_beside(path, "tokenizer_config.json")
    stated = _read_json(beside)[1].get("added_tokens_decoder") or {} if beside else {}
    tokens = [stated[key] for key in sorted(stated, key=int) if stated[key]["content"] not in vocab]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    first = max(vocab.values()) + 1
    return [flags | token | {"id": first + i} for i, token in enumerate(tokens)]


def _document_end(key: str, path: Path, vocab: dict[str, int], names: list[str]) -> int | None:
    """Return the id of bos_token or eos_token. null in a file means that there is none."""
    for file in ("tokenizer_config.json", "special_tokens_map.json", "config.json"):
        beside = file_beside(path, file)
        about = _read_json(beside)[1] if beside else {}
        if key in about:
            token = about[key]["content"] if isinstance(about[key], dict) else about[key]
            found = vocab.get(token)
        elif f"{key}_id" in about:
            token = about[f"{key}_id"]
            token = token[0] if isinstance(token, list) else token  # training used the first of them
            found = token if token in vocab.values() else None
        else:
            continue
        if token is not None and found is None:
            raise UserError(f"data.tokenizer: {path} has no token {token!r}, which {beside} names as {key}")
        return found
    return vocab[names[0]] if names else None


def _without_prefix(spec: dict[str, Any]) -> dict[str, Any]:
    """Return the parts of a tokenizer that put a space before a text, changed so that they do not."""

    def changed(part: dict[str, Any]) -> dict[str, Any] | None:
        match part:
            case {"type": "Prepend"}:
                return None
            case {"type": "Metaspace" | "ByteLevel"}:
                never = {"add_prefix_space": False, "prepend_scheme": "never"}
                return part | {key: value for key, value in never.items() if key in part}
            case {"type": "Sequence"}:
                lists = {key: value for key, value in part.items() if isinstance(value, list)}
                return part | {key: [member for member in value if member is not None] for key, value in lists.items()}
        return part

    changing = {key: spec[key] for key in ("normalizer", "pre_tokenizer") if key in spec}
    return json.loads(json.dumps(changing), object_hook=changed)


def _token_bytes(spec: dict[str, Any], vocab: dict[str, int], vocab_size: int) -> np.ndarray:
    parts: list[dict[str, Any]] = []
    json.loads(
        json.dumps([spec.get("pre_tokenizer"), spec.get("decoder")]), object_hook=lambda obj: parts.append(obj) or obj
    )
    kinds, spaces = {part.get("type") for part in parts}, []
    for part in parts:
        match part:
            case {"type": "Metaspace", "replacement": written}:
                spaces.append(written)
            case {"type": "Replace", "pattern": {"String": written}, "content": " "}:
                spaces.append(written)

    def length(token: str) -> int:
        if "ByteLevel" in kinds:  # a character for each byte
            return len(token)
        if "ByteFallback" in kinds and re.fullmatch("<0x[0-9A-F]{2}>", token):
            return 1
        for space in spaces:
            token = token.replace(space, " ")
        return len(token.encode())

    lengths = np.zeros(vocab_size, dtype=np.int64)
    for token, i in vocab.items():
        lengths[i] = length(token)
    for token in spec["added_tokens"]:
        lengths[token["id"]] = 0 if token["special"] else len(token["content"].encode())
    return lengths
