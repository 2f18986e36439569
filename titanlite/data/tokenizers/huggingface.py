"""tokenizer.json files of Hugging Face, read by their package `tokenizers`."""

import hashlib
import json
import re
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from tokenizers import Encoding
from tokenizers import Tokenizer as FastTokenizer

from titanlite.data.pieces import CUT_RULE, joined, pieces
from titanlite.runtime.console import install_hint
from titanlite.runtime.errors import UserError
from titanlite.runtime.files import file_beside, read_small

BOS_NAMES = ("<|begin_of_text|>", "<s>", "<bos>", "<|startoftext|>", "<｜begin▁of▁sentence｜>")  # noqa: RUF001
EOS_NAMES = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "<｜end▁of▁sentence｜>", "<|im_end|>")  # noqa: RUF001
"""Names tried in this order if no file names the tokens that begin and end a document. GPT-2's <|endoftext|> only ends
one."""


AS_IT_IS = "PreTrainedTokenizerFast"
"""`tokenizer_class` with which transformers takes a tokenizer.json as it is. With most others, transformers 5 takes the
vocabulary from the file, and the normalizer, the pre-tokenizer and more from the class."""
BESIDE = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "config.json"
"""Files that transformers reads with a tokenizer.json."""
OF_IDS = "normalizer", "pre_tokenizer", "model", "added_tokens"
"""Parts of a tokenizer.json that token ids depend on."""


class HuggingFaceTokenizer:
    """A tokenizer.json, read as transformers reads it. Which tokens begin and end a document is read
    from tokenizer_config.json, special_tokens_map.json or config.json; otherwise special tokens of well-known names are
    taken. `dropout` of a BPE is off.

    Raises:
        UserError: a file is not of its form, tokenizer.json lacks a token that another file names, or transformers is
            needed and not installed.
    """

    def __init__(self, path: Path, name: str | None = None) -> None:
        self.name = name or str(path)
        content, spec = _read_json(path)
        try:
            first = FastTokenizer.from_str(content.decode())
            self.is_as_its_file, self.special_tokens, rebuilt, read = True, None, {}, content
            if getattr(first.model, "dropout", None):
                spec["model"]["dropout"] = first.model.dropout = None
                self.is_as_its_file, read = False, json.dumps(spec).encode()
            if theirs := _of_transformers(path, read):
                own, new = (json.loads(one.to_str(), object_hook=_plain) for one in (first, theirs.backend_tokenizer))
                first, self.special_tokens = theirs.backend_tokenizer, theirs.special_tokens_map
                rebuilt = {part: new[part] for part in OF_IDS if new[part] != own[part]}
                self.is_as_its_file &= not rebuilt and new["decoder"] == own["decoder"]
                spec = json.loads(first.to_str())
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
            tokenizer.no_truncation()
            tokenizer.no_padding()
        self._first, self._later = first, later
        self._encode_names_as_text()
        self.vocab_size = max(vocab.values()) + 1
        self._token_bytes = _token_bytes(spec, vocab, prefixes=later is not first)
        key = f"{self.bos_id} {self.eos_id}{json.dumps(rebuilt) if rebuilt else ''}"
        self.fingerprint = f"huggingface-{CUT_RULE}-{hashlib.sha256(content + key.encode()).hexdigest()[:16]}"

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._encode_names_as_text()  # pickle keeps the files of the two tokenizers only

    def _encode_names_as_text(self) -> None:
        """Make the names of special tokens in a text plain text."""
        self._first.encode_special_tokens = self._later.encode_special_tokens = True

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

    def to_json(self) -> str:
        """Return a tokenizer.json that gives the ids of this tokenizer as it is."""
        return self._first.to_str()

    def added_ids(self) -> tuple[list[int], list[int]]:
        """Return the token ids that the file's post-processor puts before and after a text."""
        plain, whole = (self._first.encode("a", add_special_tokens=adds).ids for adds in (False, True))
        start = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), 0)
        return whole[:start], whole[start + len(plain) :]

    def token_bytes(self, *, begins: bool = False) -> np.ndarray:
        """Exact where what comes out is what went in: for byte-level BPE, and for SentencePiece's way of writing spaces
        and bytes. A normalizer that changes the text makes it wrong: see `TokenStore.counts_bytes`."""
        return self._token_bytes[int(begins)].copy()


def _read_json(path: Path) -> tuple[bytes, dict[str, Any]]:
    try:
        content = read_small(path)
        value = json.loads(content)
        if not isinstance(value, dict):
            raise ValueError("not a JSON object")
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"data.tokenizer: {path} cannot be read as JSON: {error}") from None
    return content, value


def _of_transformers(path: Path, content: bytes) -> Any:
    """Return the tokenizer that transformers makes of a tokenizer.json and the files beside it; None if these name
    no class that rebuilds it, and no model, so that the file alone counts.

    Raises:
        UserError: transformers is not installed, or cannot load it.
    """
    files = {name: _read_json(file) for name in BESIDE if (file := file_beside(path, name))}
    about = [files[name][1] for name in ("tokenizer_config.json", "config.json") if name in files]
    named = next((name for one in about if (name := one.get("tokenizer_class"))), None)
    if named in (None, AS_IT_IS) and not any("model_type" in one for one in about):
        return None
    take = f'"tokenizer_class": "{AS_IT_IS}" in tokenizer_config.json takes the file as it is'
    if find_spec("transformers") is None:
        if named == AS_IT_IS:
            return None
        why = f"transformers may read it by other rules, those of {named or 'its config.json'}"
        raise UserError(f"data.tokenizer: {path}: {why}: {install_hint('transformers')}. Or {take}")
    from transformers import AutoTokenizer
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with TemporaryDirectory() as folder:  # a copy, in which no link leads elsewhere, and which has no code
            for name, (data, _) in {**files, "tokenizer.json": (content, {})}.items():
                (Path(folder) / name).write_bytes(data)
            found = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        if not hasattr(found, "backend_tokenizer"):
            raise ValueError(f"{type(found).__name__} is not of the package tokenizers")
        found.encode("a 日")  # some classes need a token for what they do not know
    except Exception as error:  # each class has errors of its own
        why = f"transformers cannot read it by the rules of {named or 'its config.json'}"
        raise UserError(f"data.tokenizer: {path}: {why}: {' '.join(str(error).split())}. {take}") from None
    finally:
        logging.set_verbosity(verbosity)
    return found


def _plain(part: dict[str, Any]) -> dict[str, Any]:
    """Return a part of a tokenizer.json in which "", false and null are the same, without what no token depends on."""
    return {key: value or None for key, value in part.items() if key != "trim_offsets"}


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


def _token_bytes(spec: dict[str, Any], vocab: dict[str, int], *, prefixes: bool) -> np.ndarray:
    """Return int64 [2, V]: the bytes of each token within a text, and at its beginning.

    Args:
        prefixes: a space is put before a text.
    """
    parts: list[dict[str, Any]] = []
    pipeline = [spec.get(name) for name in ("normalizer", "pre_tokenizer", "decoder")]
    json.loads(json.dumps(pipeline), object_hook=lambda obj: parts.append(obj) or obj)
    kinds, spaces = {part.get("type") for part in parts}, []
    for part in parts:
        match part:
            case {"type": "Metaspace", "replacement": written}:
                spaces.append(written)
            case {"type": "Replace", "pattern": {"String": written}, "content": " "}:
                spaces.append(written)
            case {"type": "Replace", "pattern": {"String": " "}, "content": written}:
                spaces.append(written)
    by_bytes = "ByteLevel" in kinds  # a character for each byte, and "Ġ" for a space

    def length(token: str) -> int:
        if by_bytes:
            return len(token)
        if "ByteFallback" in kinds and re.fullmatch("<0x[0-9A-F]{2}>", token):
            return 1
        for space in spaces:
            token = token.replace(space, " ")
        return len(token.encode())

    sizes = np.zeros((2, max(vocab.values()) + 1), dtype=np.int64)
    begins = ("Ġ",) if by_bytes else (" ", *spaces)
    for token, i in vocab.items():
        sizes[:, i] = length(token)
        sizes[1, i] -= prefixes and token.startswith(begins)
    of_model = spec["model"].get("vocab", {})
    of_model = {token for token, *_ in of_model} if isinstance(of_model, list) else of_model
    for token in spec["added_tokens"]:
        text = token["content"]
        if token["special"]:
            sizes[:, token["id"]] = 0
        elif by_bytes or not (text in of_model or token["normalized"]):  # its text is that before any normalizer
            sizes[:, token["id"]] = len(text.encode())
    return sizes
