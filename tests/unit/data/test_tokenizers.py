"""Tokenizers: exact round trips, special tokens that text never becomes, and texts cut where ids stay the same."""

import base64
import json
import pickle
import random
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from tests.support.helpers import mentions
from titanlite.data import pieces as pieces_module
from titanlite.data.pieces import PIECE_BYTES, cut, pieces
from titanlite.data.tokenizer import (
    LLAMA3_SPECIAL_TOKENS,
    SHIPPED,
    ByteTokenizer,
    TiktokenTokenizer,
    Tokenizer,
    byte_sizes,
    find_tokenizer,
    load_tokenizer,
    text_bytes,
)
from titanlite.data.tokens import JoinedTokens
from titanlite.runtime.console import install_hint
from titanlite.runtime.errors import UserError
from titanlite.tools.ingest.bpe import train_bpe
from titanlite.tools.ingest.encoding import Options
from titanlite.tools.ingest.prepare import prepare

HARD_TEXTS = [
    "",
    "\n",
    "plain words, 12345 and more; I'LL see it's DON'T",
    "Ünïcödé: 日本語 العربية Ελληνικά हिन्दी ไทย 한국어",
    "👩‍👩‍👧‍👦 🏳️‍🌈👍🏽 x\u0301\u0327\u0301y e\u0301\u200d\ufeff\u2028\u0085",
    "tabs\t\tand\r\nlines\r\n\r\n \r\n\n\n   spaces   \x00\x07\x1b\x7f",
    "  begins with spaces and ends with them  ",
    "x" * 5000 + " " * 5000 + "-" * 3000 + "\n" * 3000,
    "<|begin_of_text|> is text when it stands in text <|eot_id|><s></s><unk>",
    "\U0010ffff\ue000\ufffd ﬁ ſ K",  # noqa: RUF001
]
KINDS = ("bytes", "ranks", "python-2k", "trained", "prepend", "metaspace")
BYTE_LEVEL = KINDS[:4]


def rank_file(folder: Path, *merged: bytes) -> Path:
    """A tiktoken file of all bytes and a few merges."""
    tokens = [*(bytes([i]) for i in range(256)), b"th", b"in", b"the", b" the", b"12", b"123", *merged]
    path = folder / "tokenizer.model"
    lines = [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(tokens)]
    path.write_text("\n".join(lines) + "\n")
    return path


def stdlib_text(size: int) -> str:
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return "".join(file.read_text(encoding="utf-8") for file in files)[:size]


def sentencepiece_like(*, metaspace: bool, added: list[AddedToken] | None = None) -> FastTokenizer:
    """A tokenizer like Llama 2's: "▁" for spaces, a space put before a text, and bytes for rare characters."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "t", "h", "e", "▁t", "he", "▁the"]
    fast = FastTokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=[("▁", "t"), ("h", "e"), ("▁t", "he")],
            byte_fallback=True,
            unk_token="<unk>",
        )
    )
    strip = [decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    if metaspace:
        fast.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        fast.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")])
    else:
        fast.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        fast.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), *strip])
    fast.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in ("<unk>", "<s>", "</s>")])
    fast.add_tokens(added or [])
    return fast


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a BPE, trained on some source code."""
    folder = tmp_path_factory.mktemp("trained") / "bpe"
    text = stdlib_text(300_000)
    train_bpe([text[:1000], text[1000:]], vocab_size=1200, out=folder)
    return folder


@pytest.fixture(scope="module")
def kinds(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    folder = tmp_path_factory.mktemp("kinds")
    for name in ("prepend", "metaspace"):
        sentencepiece_like(metaspace=name == "metaspace").save(str(folder / f"{name}.json"))
    names = {
        "ranks": rank_file(folder),
        "trained": trained,
        "prepend": folder / "prepend.json",
        "metaspace": folder / "metaspace.json",
    }
    return {kind: load_tokenizer(str(names.get(kind, kind))) for kind in KINDS}


# Every kind


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_round_trips(kind: str, kinds: dict[str, Tokenizer]) -> None:
    tokenizer = kinds[kind]
    lengths = byte_sizes(tokenizer)
    assert (lengths.shape, lengths.dtype) == ((2, tokenizer.vocab_size), np.int64)
    for text in HARD_TEXTS:
        if kind == "metaspace" and text.startswith(" "):
            continue  # the library puts no space before this one, but takes the first away in the end
        ids = tokenizer.encode(text)
        assert ids.dtype.kind == "u"
        assert tokenizer.decode(ids) == text
        assert lengths[0, ids].all(), "text never becomes a special token"
        assert text_bytes(lengths, ids) == len(text.encode())
    assert len(tokenizer.encode("")) == 0
    with pytest.raises(UnicodeEncodeError):
        tokenizer.encode("half: \ud83d")
    assert tokenizer.bos_id is not None
    assert tokenizer.eos_id is not None
    assert lengths[:, [tokenizer.bos_id, tokenizer.eos_id]].tolist() == [[0, 0], [0, 0]]
    names = LLAMA3_SPECIAL_TOKENS[:2] if kind in BYTE_LEVEL else ("<s>", "</s>")
    assert tokenizer.decode(np.array([tokenizer.bos_id, tokenizer.eos_id])) == "".join(names)
    for again in (load_tokenizer(tokenizer.name), pickle.loads(pickle.dumps(tokenizer))):
        assert again.fingerprint == tokenizer.fingerprint
        for text in (HARD_TEXTS[3], HARD_TEXTS[-2]):
            assert again.encode(text).tolist() == tokenizer.encode(text).tolist()


def test_fingerprints_tell_tokenizers_apart(kinds: dict[str, Tokenizer]) -> None:
    assert kinds["bytes"].fingerprint == "bytes"
    assert len({tokenizer.fingerprint for tokenizer in kinds.values()}) == len(kinds)


# tiktoken


def test_ids_of_a_rank_file(tmp_path: Path) -> None:
    tokenizer = TiktokenTokenizer(rank_file(tmp_path))
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (262, 263, 262 + 256)
    assert tokenizer.encode("the 123 thin").tolist() == [258, 32, 261, 32, 256, 257]
    assert tokenizer.token_bytes()[250:264].tolist() == [1] * 6 + [2, 2, 3, 4, 2, 3, 0, 0]


def test_special_tokens_have_llama_31s_ids() -> None:
    ids = {token: 128_000 + i for i, token in enumerate(LLAMA3_SPECIAL_TOKENS)}
    assert len(ids) == 256
    expected = {
        "begin_of_text": 128000, "end_of_text": 128001, "reserved_special_token_1": 128003,
        "finetune_right_pad_id": 128004, "reserved_special_token_2": 128005, "start_header_id": 128006,
        "eom_id": 128008, "eot_id": 128009, "python_tag": 128010, "reserved_special_token_247": 128255,
    }  # fmt: skip
    assert {name: ids[f"<|{name}|>"] for name in expected} == expected


def test_python_2k_is_shipped() -> None:
    tokenizer = load_tokenizer("python-2k")
    assert (tokenizer.name, tokenizer.vocab_size, tokenizer.bos_id) == ("python-2k", 2048, 1792)
    assert tokenizer.decode(np.array([1792 + 9])) == "<|eot_id|>"
    text = stdlib_text(200_000)
    assert 2.7 < len(text.encode()) / len(tokenizer.encode(text)) < 3.3
    pattern = 'titanlite.data.tokenizers" = ["*.model"]'
    assert pattern in Path("pyproject.toml").read_text()
    assert [path.name for path in SHIPPED.glob("*.model")] == ["python-2k.model"]


# Long texts


@pytest.fixture
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(pieces_module, "PIECE_BYTES", 64)
    return 64


def random_texts(count: int) -> list[str]:
    draw = random.Random(0)
    alphabet = ["\n", "\n", "\n\n", "\r\n", " ", "\t", "a", "B1", "!", "é", "日", "👍", "the", "x" * 40]
    return ["".join(draw.choices(alphabet, k=draw.randrange(400))) for _ in range(count)]


def test_pieces_are_cut_before_a_visible_character(short_pieces: int) -> None:
    assert cut(b"x" * 64) == 64
    assert cut(b"x" * 65) == 64
    assert cut(b"one\n" + b"x" * 61) == 4
    assert cut(b"one\ntwo\n" + b"x" * 61) == 8
    assert cut(b"x" * 63 + b"\ny") == 64
    assert cut(b"x" * 63 + b"\n ") == 64, "too long a line is cut anywhere"
    assert cut(b"one\n" + b"x" * 50 + b"\n" + b" " * 20) == 4
    assert cut(b"one\n" + b"x" * 50 + b"\n" + "é".encode() * 20) == 4
    assert cut(b"a\n" + b"x" * 70) == 64, "no piece has less than 4 bytes"
    assert cut("é".encode() * 40, start=2) == 66
    assert cut("日".encode() * 40) == 63
    assert cut("👍".encode() * 40, start=4) == 68
    assert cut(b"abc", start=3) == 3


def test_text_can_be_cut_while_it_is_read(short_pieces: int) -> None:
    for text in random_texts(200):
        data = text.encode()
        ends = [0]
        while ends[-1] < len(data):
            start = ends[-1]
            ends.append(cut(data, start))
            assert ends[-1] == start + cut(data[start : start + short_pieces + 1]), "it needs no more than that"
            assert 4 <= ends[-1] - start <= short_pieces or ends[-1] == len(data)
        assert "".join(pieces(text)) == text
        lengths = [len(piece.encode()) for piece in pieces(text)]
        assert lengths == np.diff(ends).tolist()
        for i, end in enumerate(ends):
            assert [len(piece.encode()) for piece in pieces(data[:end].decode())] == lengths[:i], "whatever follows"


def test_ids_of_pieces_are_those_of_the_whole(short_pieces: int) -> None:
    tokenizer = load_tokenizer("python-2k")
    assert isinstance(tokenizer, TiktokenTokenizer)
    cuts = 0
    for text in random_texts(400):
        parts = list(pieces(text))
        if all(part[-1] == "\n" and 0x21 <= ord(after[0]) <= 0x7E for part, after in zip(parts, parts[1:])):  # noqa: B905, RUF007
            cuts += len(parts) - 1
            assert tokenizer.encode(text).tolist() == tokenizer._encoding.encode_ordinary(text)
    assert cuts > 50


@pytest.mark.long
@pytest.mark.parametrize("unit", [" ", "👩‍👩‍👧‍👦"])
def test_very_long_lines(unit: str, kinds: dict[str, Tokenizer]) -> None:
    """A million spaces are more than tiktoken can split; two pieces of anything show that it never gets them."""
    text = unit * (PIECE_BYTES * 5 // 4 // len(unit.encode())) + "y"
    for kind in ("python-2k", "trained") if unit == " " else ("python-2k",):
        assert kinds[kind].decode(kinds[kind].encode(text)) == text


@pytest.mark.parametrize("kind", KINDS)
def test_a_later_piece_of_text_gets_no_space_before_it(
    kind: str, kinds: dict[str, Tokenizer], short_pieces: int
) -> None:
    tokenizer = kinds[kind]
    text = "the\nthe the\n" * 20
    parts = list(pieces(text))
    ids = [tokenizer.encode(part, begins=i == 0) for i, part in enumerate(parts)]
    assert len(ids) > 3
    assert np.concatenate(ids).tolist() == tokenizer.encode(text).tolist()
    assert tokenizer.decode(tokenizer.encode(text)) == text
    lengths = byte_sizes(tokenizer)
    assert text_bytes(lengths, tokenizer.encode(text, begins=False), begins=False) == len(text)


# tokenizer.json


def saved(folder: Path, **beside: Any) -> Path:
    sentencepiece_like(metaspace=False).save(str(folder / "tokenizer.json"))
    for name, value in beside.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


def test_tokens_that_only_the_config_lists_are_found(tmp_path: Path) -> None:
    """The form of torchtitan's tests/assets/tokenizer: ids beyond the vocabulary, and no entry bos_token."""
    plain = {"special": True, "normalized": False, "lstrip": False, "rstrip": False, "single_word": False}
    ends = {"128001": {"content": "<|end_of_text|>", **plain}, "128000": {"content": "<|begin_of_text|>", **plain}}
    folder = saved(tmp_path, tokenizer_config={"added_tokens_decoder": ends, "model_max_length": 131072})
    spec = json.loads((folder / "tokenizer.json").read_text())
    spec["added_tokens"] = []
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    tokenizer = load_tokenizer(str(folder))
    size = max(spec["model"]["vocab"].values()) + 1
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (size, size + 1, size + 2)
    ids = np.array([size, *tokenizer.encode("the <|end_of_text|>"), size + 1])
    assert tokenizer.decode(ids).split() == ["<|begin_of_text|>", "the", "<|end_of_text|><|end_of_text|>"]
    assert (ids[1:-1] < size).all(), "names of special tokens in a text are plain text"
    assert tokenizer.token_bytes()[[size, size + 1]].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("beside", "bos", "eos"),
    [
        ({}, 1, 2),
        ({"tokenizer_config": {"bos_token": "</s>", "eos_token": {"content": "<s>"}}}, 2, 1),
        ({"tokenizer_config": {"bos_token": None, "eos_token": "</s>"}, "config": {"bos_token_id": 1}}, None, 2),
        ({"tokenizer_config": {"model_max_length": 8}, "special_tokens_map": {"bos_token": "<unk>"}}, 0, 2),
        ({"config": {"bos_token_id": 7, "eos_token_id": [5, 2]}}, 7, 5),
        ({"config": {"bos_token_id": None, "eos_token_id": None}}, None, None),
    ],
)
def test_begin_and_end_are_read_from_the_files_beside(
    beside: dict[str, Any], bos: int | None, eos: int | None, tmp_path: Path
) -> None:
    tokenizer = load_tokenizer(str(saved(tmp_path, **beside)))
    assert (tokenizer.bos_id, tokenizer.eos_id) == (bos, eos)
    assert tokenizer.vocab_size == 3 + 256 + 7
    plain = load_tokenizer(str(saved(tmp_path, tokenizer_config={}, special_tokens_map={}, config={})))
    assert (tokenizer.fingerprint == plain.fingerprint) == ((bos, eos) == (1, 2))


def test_special_names_are_text_where_the_library_would_make_them_tokens(tmp_path: Path) -> None:
    added = [AddedToken(token, special=False, normalized=False) for token in ("<end>", "<tool>")]
    fast = sentencepiece_like(metaspace=False, added=added)
    fast.enable_truncation(3)
    fast.enable_padding(length=9)
    fast.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer.json"))
    assert tokenizer.eos_id == fast.token_to_id("<end>")
    fast.no_truncation()
    text = "<s>the</s><end><tool>"
    assert {1, 2, tokenizer.eos_id} <= set(fast.encode(text).ids)
    ids = tokenizer.encode(text)
    assert not {1, 2, tokenizer.eos_id} & set(ids.tolist())
    assert ids[-1] == fast.token_to_id("<tool>"), "a token like others, though added"
    assert tokenizer.decode(ids) == text
    assert text_bytes(byte_sizes(tokenizer), ids) == len(text)
    assert tokenizer.token_bytes()[[0, 1, 2, 3, tokenizer.eos_id]].tolist() == [0, 0, 0, 1, 0]


# Names, paths, and what can be wrong with them


def test_names_and_paths(tmp_path: Path) -> None:
    assert find_tokenizer("bytes") is None
    assert find_tokenizer("python-2k") == SHIPPED / "python-2k.model"
    ranks = rank_file(tmp_path)
    assert find_tokenizer(str(ranks)) == ranks
    assert find_tokenizer(str(tmp_path)) == ranks
    saved(tmp_path)
    assert find_tokenizer(str(tmp_path)) == tmp_path / "tokenizer.json"
    assert isinstance(load_tokenizer("bytes"), ByteTokenizer)
    assert isinstance(load_tokenizer(str(ranks)), TiktokenTokenizer)
    with pytest.raises(UserError, match=r"python-3k\b.*bytes, python-2k\b"):
        find_tokenizer("python-3k")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"^data\.tokenizer: .*tokenizer\.json\b.*tokenizer\.model\b"):
        load_tokenizer(str(tmp_path / "empty"))


ALL_BYTES = b"".join(base64.b64encode(bytes([i])) + b" %d\n" % i for i in range(256))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ["0, 1, 2"]),
        (b"\xff\xfe", []),
        (b"dGhl 5\n", ["0, 1, 2"]),
        (ALL_BYTES[: ALL_BYTES.rindex(b"/w==")], [1, "256 bytes"]),
        (b"\n\x0e\n\x05<unk>\x15\0\0", ["SentencePiece", "tokenizer.json"]),
    ],
)
def test_unreadable_rank_files_are_named(content: bytes, words: list[object], tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        load_tokenizer(str(path))
    assert mentions(str(caught.value), f"data.tokenizer: {path}", "tiktoken", *words)


@pytest.mark.parametrize(
    ("files", "file", "word"),
    [
        ({"tokenizer": b"{"}, "tokenizer.json", "JSON"),
        ({"tokenizer": b"{}"}, "tokenizer.json", "Hugging Face"),
        ({"tokenizer_config": b"{"}, "tokenizer_config.json", "JSON"),
        ({"tokenizer_config": b'{"bos_token": "<a>"}'}, "tokenizer.json", "'<a>'"),
        ({"config": b'{"eos_token_id": 999}'}, "tokenizer.json", "999"),
    ],
)
def test_unreadable_json_files_are_named(files: dict[str, bytes], file: str, word: str, tmp_path: Path) -> None:
    saved(tmp_path)
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_bytes(content)
    with pytest.raises(UserError) as caught:
        load_tokenizer(str(tmp_path))
    assert mentions(str(caught.value), f"data.tokenizer: {tmp_path}/{file}", word)


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    install = f"needs tokenizers: {install_hint('tokenizers')}"
    with pytest.raises(UserError) as caught:
        load_tokenizer(str(tmp_path))
    assert str(caught.value) == f"data.tokenizer: {tmp_path} {install}"
    with pytest.raises(UserError) as caught:
        train_bpe(["text"], vocab_size=512, out=tmp_path / "out")
    assert str(caught.value) == f"titanlite data tokenizer {install}"
    assert load_tokenizer("python-2k").vocab_size == 2048


# Bytes of text


def like_gemma() -> FastTokenizer:
    """Spaces as "▁", bytes for rare characters, and added tokens that are not special, some of which the model has."""
    spaces = ["▁" * count for count in range(1, 32)]
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{i:02X}>" for i in range(256)), *spaces, *"the\n", "\n\n"]
    tokens += ["he", "▁t", "▁the", "é"]
    merges = [(longer[1:], "▁") for longer in spaces[1:]] + [("h", "e"), ("▁", "t"), ("▁t", "he")]
    vocab = {token: i for i, token in enumerate(tokens)}
    fast = FastTokenizer(models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    fast.normalizer = normalizers.Replace(" ", "▁")
    fast.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    fast.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    fast.add_tokens([AddedToken(token, normalized=False) for token in (*spaces[1:], "\n\n", "<td>", "<日>")])
    fast.add_tokens([AddedToken("é the", normalized=True)])
    fast.add_special_tokens([AddedToken(token, normalized=False) for token in tokens[:4]])
    return fast


def unigram(*, byte_fallback: bool = True) -> FastTokenizer:
    tokens = [
        "<unk>",
        "</s>",
        *(f"<0x{i:02X}>" for i in range(256 if byte_fallback else 0)),
        "▁",
        *"the\n",
        "▁the",
        "é",
    ]
    pieces = [(token, -float(len(tokens) - i)) for i, token in enumerate(tokens)]
    fast = FastTokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=byte_fallback))
    fast.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    fast.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="always")])
    fast.add_special_tokens(["<unk>", "</s>"])
    return fast


def byte_level(**options: Any) -> FastTokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    fast = FastTokenizer(models.BPE({letter: i for i, letter in enumerate([*letters, "Ġt"])}, [("Ġ", "t")]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(**options)
    fast.decoder = decoders.ByteLevel()
    if not options["add_prefix_space"]:  # it puts one after added tokens, too
        fast.add_tokens([AddedToken(token, normalized=False) for token in ("  ", "<日>")])
    return fast


def with_nfc() -> FastTokenizer:
    fast = byte_level(add_prefix_space=False)
    fast.normalizer = normalizers.NFC()
    return fast


EXACT = {
    "prepend": lambda: sentencepiece_like(metaspace=False),
    "metaspace": lambda: sentencepiece_like(metaspace=True),
    "gemma": like_gemma,
    "unigram": unigram,
    "byte level": lambda: byte_level(add_prefix_space=False),
    "byte level, prefix": lambda: byte_level(add_prefix_space=True),
    "nfc": with_nfc,
}


@pytest.mark.parametrize("kind", EXACT)
def test_bytes_of_tokens_are_those_of_the_text(kind: str, tmp_path: Path) -> None:
    EXACT[kind]().save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer.json"))
    sizes = byte_sizes(tokenizer)
    draw = random.Random(kind)
    parts = [" ", "  ", " " * 9, "the", " the", "\n", "\n\n", "é", "é the", "<td>", "<日>", "👍", "x\ty", "\u00a0"]
    parts += [] if kind == "unigram" else ["<0x41>"]  # the library takes it for a byte
    for _ in range(300):
        text = "".join(draw.choices(parts, k=draw.randrange(12)))
        if "metaspace" in kind or kind in ("unigram", "byte level, prefix"):
            text = text.lstrip()  # these put no space before a space, and ids do not show it
        assert text_bytes(sizes, tokenizer.encode(text)) == len(text.encode()), repr(text)
        later = tokenizer.encode(text, begins=False)
        assert text_bytes(sizes, later, begins=False) == len(text.encode()), repr(text)


CHANGED = {
    "unk": (lambda: unigram(byte_fallback=False), "the 日本"),
    "nfc, changed": (with_nfc, "e\u0301" * 9),
    "space first": (EXACT["metaspace"], " the"),
}


@pytest.mark.parametrize("kind", [*CHANGED, *EXACT])
def test_bits_per_byte_are_left_out_where_bytes_do_not_add_up(kind: str, tmp_path: Path) -> None:
    build, text = CHANGED.get(kind, (EXACT.get(kind), "the é  the\n\n"))
    assert build is not None
    build().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "texts.jsonl").write_text(json.dumps({"text": text}) + "\n" + json.dumps({"text": "the end"}) + "\n")
    tokenizer, options = load_tokenizer(str(tmp_path / "tokenizer.json")), Options(bos=False, eos=False)
    store = prepare(
        [str(tmp_path / "texts.jsonl")],
        tmp_path / "tokens",
        tokenizer=tokenizer,
        options=options,
        workers=1,
        report=lambda line: None,
    )
    assert store.counts_bytes == (kind in EXACT)
    assert store.index["text_bytes"] == len((text + "the end").encode())
    assert (store.index["token_bytes"] == store.index["text_bytes"]) == store.counts_bytes
    assert JoinedTokens([store, store]).counts_bytes == store.counts_bytes


# Training


@pytest.mark.long
def test_a_trained_one_has_the_ids_of_transformers(trained: Path, kinds: dict[str, Tokenizer]) -> None:
    from transformers import PreTrainedTokenizerFast

    ours = kinds["trained"]
    assert (ours.vocab_size, ours.bos_id, ours.eos_id) == (1200, 944, 945)
    assert ours.decode(np.arange(944, 1200)) == "".join(LLAMA3_SPECIAL_TOKENS)
    theirs = PreTrainedTokenizerFast.from_pretrained(trained)
    assert (len(theirs), theirs.bos_token_id, theirs.eos_token_id) == (1200, 944, 945)
    for text in [*HARD_TEXTS, stdlib_text(500_000)[300_000:]]:
        ids = ours.encode(text).tolist()
        if "<|" not in text:
            assert theirs.encode(text, add_special_tokens=False) == ids
            assert theirs.decode(ids) == text
    assert theirs.encode("<|eot_id|>", add_special_tokens=False) == [944 + 9]


def test_training_is_deterministic_whatever_the_order(tmp_path: Path) -> None:
    texts = stdlib_text(60_000).splitlines(keepends=True)
    for name, order in (("a", texts), ("b", texts[::-1])):
        train_bpe(order, vocab_size=700, out=tmp_path / name)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_training_refuses(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there/file").touch()

    def failing() -> Any:
        yield "text"
        raise UserError("a file is gone")

    cases: list[tuple[Callable[[], Any], int, str, list[Any]]] = [
        (list, 511, "new", [512, 256]),
        (lambda: ["abab"], 514, "new", [513, 514]),
        (list, 512, "there", [tmp_path / "there"]),
        (failing, 512, "new", ["a file is gone"]),
    ]
    for texts, vocab_size, out, named in cases:
        with pytest.raises(UserError) as caught:
            train_bpe(texts(), vocab_size=vocab_size, out=tmp_path / out)
        assert mentions(str(caught.value), *named)
        assert [path.name for path in tmp_path.iterdir()] == ["there"], "nothing is left of it"
    train_bpe(["abab"], vocab_size=513, out=tmp_path / "new" / "deep")
    assert load_tokenizer(str(tmp_path / "new" / "deep")).encode("abab").tolist() == [256, 256]
