"""Tokens of Megatron-LM are read in place, with the documents that its own reader gives."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.support.helpers import mentions
from titanlite.config.load import load
from titanlite.data import prepared
from titanlite.data.megatron import HEADER, MAGIC, MegatronTokens
from titanlite.data.packing import BestFit, Stream
from titanlite.data.sources import open_sources, open_tokens
from titanlite.data.tokenizer import ByteTokenizer
from titanlite.data.tokens import JoinedTokens
from titanlite.runtime.errors import UserError
from titanlite.schema import Data
from titanlite.tools import cli
from titanlite.tools.ingest.encoding import Options
from titanlite.tools.ingest.prepare import prepare

EOS = ByteTokenizer.eos_id
TEXTS = ["one", "", "a second document", "ü", "x" * 300, "the last"]


def write_indexed(prefix: Path, documents: list[list[list[int]]], dtype: str = "<u2", modes: bool = False) -> Path:
    """Write documents of sequences as IndexedDatasetBuilder of Megatron-core 0.16.1 does."""
    sequences = [np.array(sequence, dtype) for document in documents for sequence in document]
    lengths = np.array([len(sequence) for sequence in sequences], "<i4")
    places = np.cumsum([0, *lengths[:-1]], dtype="<i8") * np.dtype(dtype).itemsize if len(lengths) else lengths
    ends = np.cumsum([0, *map(len, documents)], dtype="<i8")
    code = {"<u2": 8, "<i4": 4}[dtype]
    prefix.parent.mkdir(parents=True, exist_ok=True)
    prefix.with_name(f"{prefix.name}.bin").write_bytes(b"".join(sequence.tobytes() for sequence in sequences))
    head = HEADER.pack(MAGIC, 1, code, len(sequences), len(ends)) + lengths.tobytes() + places.tobytes()
    more = np.zeros(len(sequences), "i1").tobytes() if modes else b""
    prefix.with_name(f"{prefix.name}.idx").write_bytes(head + ends.tobytes() + more)
    return prefix


def of_texts(texts: list[str]) -> list[list[list[int]]]:
    return [[[*text.encode(), EOS]] for text in texts]


def opened(path: object, **options: object) -> JoinedTokens | MegatronTokens:
    data = Data.model_validate({"add_bos": False, **options})
    paths = path if isinstance(path, list) else [path]
    return open_tokens([*map(str, paths)], data=data, tokenizer=ByteTokenizer(), cache_folder=Path())  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize("dtype", ["<u2", "<i4"])
def test_sequences_are_those_of_the_same_text_prepared_here(dtype: str, tmp_path: Path) -> None:
    text = [text for text in TEXTS if text]
    prefix = write_indexed(tmp_path / "corpus_text_document", of_texts(text), dtype, modes=dtype == "<i4")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": part}) + "\n" for part in text))
    options = {"tokenizer": ByteTokenizer(), "options": Options(bos=False), "workers": 1}
    own = prepare([str(tmp_path / "a.jsonl")], tmp_path / "own", report=lambda line: None, **options)
    for name in (prefix, f"{prefix}.bin", f"{prefix}.idx", tmp_path / "*_document.*"):
        store = opened(name)
        assert (len(store), store.index["documents"]) == (len(own), len(text))
        assert store.read(0, len(store)).tolist() == own.read(0, len(own)).tolist()
        assert store.document_starts(0, len(store)).tolist() == own.document_starts(0, len(own)).tolist()
        assert store.document_starts(5, 30).tolist() == own.document_starts(5, 30).tolist()
        assert not store.counts_bytes
    for reader in ("stream", "best_fit"):
        pair = []
        for store, plans in ((opened(prefix), tmp_path / "plans"), (own, tmp_path / "own_plans")):
            best, cut = BestFit(store, seq_len=16, plan_folder=plans), Stream(store, seq_len=16, document_mask=True)
            sequences = best if reader == "best_fit" else cut
            pair.append([[np.asarray(part).tolist() for part in sequences.read(i)] for i in range(len(sequences))])
        assert pair[0] == pair[1]


def test_documents_of_several_sequences_and_several_files(tmp_path: Path) -> None:
    first = write_indexed(tmp_path / "in" / "b.c_document", [[[1, 2], [3]], [[4]], [[5], [6], [7, 8]]])
    write_indexed(tmp_path / "in" / "a_document", [[[9]], []])
    store = opened(first, add_eos=False)
    assert store.read(0, 8).tolist() == [*range(1, 9)]
    assert store.document_starts(0, 8).tolist() == [0, 3, 4]
    whole = opened(tmp_path / "in", add_eos=False)
    assert whole.read(0, 9).tolist() == [9, *range(1, 9)]
    assert whole.document_starts(0, 9).tolist() == [0, 1, 4, 5]
    assert not whole.counts_bytes
    (tmp_path / "in" / "a.jsonl").write_text("{}\n")
    assert prepared.prepared_tokens([f"{tmp_path}/in"]) == [], "text beside them is meant"
    again = opened([f"{tmp_path}/in/a_document.bin", first], add_eos=False)
    assert again.fingerprint == whole.fingerprint


def test_a_changed_file_has_another_fingerprint_and_a_wrong_one_is_named(tmp_path: Path) -> None:
    prefix = write_indexed(tmp_path / "corpus", of_texts(["one", "two"]))
    before = opened(prefix).fingerprint
    write_indexed(prefix, of_texts(["one", "owt"]))
    assert opened(prefix).fingerprint != before
    with pytest.raises(UserError, match=r"^data\.add_eos: .*corpus\b.*eos = true"):
        opened(prefix, add_eos=False)
    with pytest.raises(UserError, match=r"^data\.add_bos: .*corpus\b.*bos = false"):
        opened(prefix, add_bos=True)
    idx, data = (prefix.with_name(f"corpus.{suffix}") for suffix in ("idx", "bin"))
    whole = {file: file.read_bytes() for file in (idx, data)}
    for file, content in ((idx, whole[idx][:-1]), (data, whole[data][:-2]), (data, whole[data] + b"\0\0")):
        file.write_bytes(content)
        with pytest.raises(UserError, match=rf"^data\.path: .*{file.name}\b.* bytes"):
            opened(prefix)
        file.write_bytes(whole[file])
    idx.write_bytes(HEADER.pack(MAGIC, 1, 7, 0, 1))
    with pytest.raises(UserError, match=r"dtype 7"):
        opened(prefix)
    write_indexed(prefix, [[[7, 258, EOS]]])
    with pytest.raises(UserError) as caught:
        opened(prefix)
    assert mentions(str(caught.value), "258", prefix)
    write_indexed(prefix, [[[7, -1]]], "<i4")
    with pytest.raises(UserError, match="-1"):
        opened(prefix, add_eos=False)
    data.unlink()
    with pytest.raises(UserError, match=r"corpus\.bin"):
        opened(prefix)


def test_they_are_a_source_like_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_indexed(tmp_path / "a", of_texts(TEXTS[2:]))
    config = tmp_path / "run.toml"
    config.write_text(f'[data]\nadd_bos = false\n[[data.sources]]\npath = "{tmp_path}/a"\nname = "theirs"\n')
    data = load(config).data
    [source] = open_sources(data, data, tokenizer=ByteTokenizer(), seq_len=16, cache_folder=tmp_path)
    assert source.name == "theirs"
    assert not source.counts_bytes, "the text is not there"
    assert source.read(0).tokens.tolist() == [*b"a second documen"]
    assert prepared.prepared_tokens([f"{tmp_path}/a.bin"]) == [f"{tmp_path}/a"]
    assert cli.run(["data", "inspect", f"{tmp_path}/a", "--sample", "1"]) == 2
    assert "--tokenizer" in capsys.readouterr().err
    assert cli.run(["data", "inspect", f"{tmp_path}/a", "--tokenizer", "bytes", "--sample", "4"]) == 0
    printed = capsys.readouterr().out
    assert all(words in printed for words in ("a second document", "the last", "documents end with eos"))
