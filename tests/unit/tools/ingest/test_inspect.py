"""Output of `titanlite data inspect`, to the digit."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.helpers import mentions
from titanlite.data.tokenizer import ByteTokenizer
from titanlite.data.tokens import TokenStore
from titanlite.runtime.errors import UserError
from titanlite.tools.ingest.inspect import inspect
from titanlite.tools.ingest.token_writer import TokenWriter

BOS, EOS = ByteTokenizer.bos_id, ByteTokenizer.eos_id


def write(folder: Path, texts: list[str], *, shard_tokens: int = 2**20, notes: dict[str, Any] | None = None) -> Path:
    """Each text as one document of bytes; text between | and | does not count in the loss."""
    with TokenWriter(folder, vocab_size=258, tokenizer="bytes", shard_tokens=shard_tokens) as writer:
        writer.notes = notes or {}
        for text in texts:
            ids, mask = [BOS], [True]
            for i, part in enumerate(text.split("|")):
                ids += part.encode()
                mask += [i % 2 == 0] * len(part.encode())
            writer.add(np.array([*ids, EOS]), mask=np.array([*mask, True]))
    return folder


def test_counts_of_a_small_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    counts = dict.fromkeys(("files", "documents", "tokens", "bytes", "empty", "left_out", "errors"), 0)
    notes = {
        "text_bytes": 27, "empty": 1, "left_out": 3, "errors": 2,
        "first_errors": ["b.jsonl:3: not \x1b JSON"],
        "inputs": [
            {"path": "a/*.txt", **counts, "files": 2, "documents": 3, "tokens": 1034, "bytes": 17},
            *[{"path": f"{number}.txt", **counts} for number in range(21)],
        ],
    }  # fmt: skip
    folder = write(tmp_path / "tokens", ["", "one", "x" * 1025, "0123|45|6789"], notes=notes)
    inspect(folder)
    store, out = TokenStore(folder), capsys.readouterr().out
    shown = {line[2:20].strip(): line[20:] for line in out.splitlines() if line.startswith("  ")}
    for name, words in {
        "documents": [4], "tokens": ["1,046"], "shards": [1, "uint16"], "text": [27, 0.026],
        "tokenizer": [258, "bytes"],
        "tokens a document": [261.5, 5, "1,027"], "boundaries": ["bos", "eos"], "loss": [2, "0.19%"],
        "unigram entropy": [f"{store.index['unigram_entropy']:.4f}"], "fingerprint": [store.fingerprint],
    }.items():  # fmt: skip
        assert mentions(shown[name], *words), name
    [line] = [line for line in out.splitlines() if line.startswith("  a/*.txt: ")]
    assert re.findall(r"[\d,]*\d", line) == ["2", "3", "1,034", "17"]
    assert "\n  18.txt: " in out
    assert "\n  19.txt: " not in out
    assert mentions(out, "2 more inputs", "1 empty", "3 binary", "2 that", "b.jsonl:3: not \u241b JSON", "all 3 files")


def test_lengths_over_shard_borders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with TokenWriter(tmp_path / "tokens", vocab_size=10, tokenizer="test", shard_tokens=4) as writer:
        writer.add(np.array([1, 2, 3, 4, 5]))
        writer.add(np.array([6, 7, 8, 9]), starts=np.array([2]))
        writer.add(np.array([1, 2, 3, 4]), starts=np.array([], dtype=np.int64))
        writer.add(np.array([1, 2]))
        writer.add(np.array([1, 2]))
    assert TokenStore(tmp_path / "tokens").document_starts(0, 17).tolist() == [0, 7, 13, 15]
    inspect(tmp_path / "tokens", quick=True)
    [line] = [line for line in capsys.readouterr().out.splitlines() if "median" in line]
    assert re.findall(r"[\d.]*\d", line.partition("mean")[2]) == ["4.2", "2", "90", "7", "7"]


def test_samples_show_documents_as_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = ["first\nline \x1b[31m", "ask: |why?|", "a" * 300 + "b" * 300, "last"]
    folder = write(tmp_path / "tokens", texts, shard_tokens=10)
    inspect(folder, sample=9, quick=True)
    shown = capsys.readouterr().out.partition("in the loss\n")[2].splitlines()
    assert [re.findall(r"\d+", line) if line.startswith("document ") else line for line in shown] == [
        "",
        ["1", "4", "18", "0"],
        "  | <bos>first",
        "  | line ␛[31m<eos>",
        "",
        ["2", "4", "11", "18"],
        "  | <bos>ask: ⟦why?⟧<eos>",
        "",
        ["3", "4", "602", "29"],
        "  | <bos>" + "a" * 255,
        "  | [... 218 tokens ...]",
        "  | " + "b" * 127 + "<eos>",
        "",
        ["4", "4", "6", "631"],
        "  | <bos>last<eos>",
    ]


def test_samples_are_ids_without_the_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with TokenWriter(tmp_path / "tokens", vocab_size=99, tokenizer="other", bos=False, eos=False) as writer:
        writer.add(np.array([5, 7, 9, 98]), mask=np.array([True, False, False, True]))
    for name, reason in {
        None: "--tokenizer",
        "bytes": "258",
        str(tmp_path / "none"): "none",
    }.items():
        inspect(tmp_path / "tokens", sample=1, quick=True, tokenizer=name)
        out = capsys.readouterr().out
        assert "no tokens" in out
        assert reason in next(line for line in out.splitlines() if line.startswith("samples are token ids: "))
        assert "\n  | 5 ⟦7 9⟧ 98\n" in out


def test_every_damaged_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path / "tokens", ["one", "two", "three"], shard_tokens=1)
    for name in ("00000.tokens", "00002.documents"):
        content = bytearray((folder / name).read_bytes())
        content[-1] ^= 1
        (folder / name).write_bytes(content)
    inspect(folder, quick=True)
    with pytest.raises(UserError) as error:
        inspect(folder)
    lines = str(error.value).splitlines()
    for line, name in zip(lines, ("00000.tokens", "00002.documents"), strict=True):
        assert mentions(line, f"data.path: {folder / name}", "index.json")
    assert "checksums" not in capsys.readouterr().out
