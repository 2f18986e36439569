"""Text -> tokens: all kinds of input give the same ones, nothing is lost silently, kills and workers change nothing."""

import gzip
import io
import json
import multiprocessing
import os
import platform
import re
import signal
import subprocess
import sys
import tarfile
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from uuid import uuid4

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.helpers import mentions
from tests.support.object_stores import Flaky
from tests.support.processes import processes_left, processes_with
from titanlite.data.pieces import PIECE_BYTES
from titanlite.data.sources import check_path, open_tokens
from titanlite.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from titanlite.data.tokens import INDEX, TokenStore
from titanlite.runtime.errors import RunError, UserError
from titanlite.schema import Data
from titanlite.tools import cli
from titanlite.tools.ingest import prepare as prepare_module
from titanlite.tools.ingest import reading as reading_module
from titanlite.tools.ingest.encoding import CHUNKS_AHEAD, Encoder, Options, encode_chunks
from titanlite.tools.ingest.formats import Part
from titanlite.tools.ingest.inputs import find_files
from titanlite.tools.ingest.prepare import prepare, prepare_text
from titanlite.tools.ingest.reading import Chunk

BOS, EOS = 256, 257
TEXTS = ["plain", "Ünïcödé: 日本語 👩‍👩‍👧‍👦", "two\nlines\r\n", "", "\ufeff\t\x07 " * 50, "last"]
TOKENS = [token for text in TEXTS if text for token in (BOS, *text.encode(), EOS)]


def as_lines(values: list[Any], field: str = "text") -> bytes:
    return "".join(json.dumps({"id": 1, field: value}) + "\n" for value in values).encode()


def write(path: Path, data: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def make(paths: list[Any] | Path | str, out: Path, **options: Any) -> TokenStore:
    """Prepare with bytes as tokens, silently."""
    paths = paths if isinstance(paths, list) else [paths]
    arguments = {name: options.pop(name) for name in ("on_error", "workers", "report") if name in options}
    arguments = {"workers": 1, "report": lambda line: None} | arguments
    return prepare(list(map(str, paths)), out, tokenizer=ByteTokenizer(), options=Options(**options), **arguments)


def open_cached(data: Data, cache_folder: Path) -> TokenStore:
    options: dict[str, Any] = {"tokenizer": ByteTokenizer(), "cache_folder": cache_folder}
    return open_tokens(data.path or [], data=data, prepare_text=prepare_text, **options)


def tokens_of(store: TokenStore) -> list[int]:
    return store.read(0, len(store)).tolist()


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# Kinds of input


def write_texts(folder: Path) -> Path:
    for number, text in enumerate(TEXTS):
        data = b"\xef\xbb\xbf" + text.encode()  # a byte order mark is not text
        if number % 2:
            write(folder / f"{number}.md", data)
        else:
            write(folder / f"{number}.txt.gz", gzip.compress(data))
    return folder


def write_parquet(path: Path) -> Path:
    pq.write_table(pa.table({"id": range(len(TEXTS)), "text": TEXTS}), path, row_group_size=4)
    return path


def write_dataset(path: Path) -> Path:
    import datasets  # takes more than a second, in one of several processes here

    rows = datasets.Dataset.from_dict({"text": ["not this", *TEXTS], "id": range(len(TEXTS) + 1)})
    rows.select(range(1, len(TEXTS) + 1)).save_to_disk(path, num_shards=2)
    return path


def compress_zstd(data: bytes) -> bytes:
    return pa.compress(data, "zstd", asbytes=True)


def write_lines(path: Path, pack: Callable[[bytes], bytes] = bytes) -> Path:
    lines = b"\xef\xbb\xbf\n" + as_lines(TEXTS).replace(b"\n", b"\r\n  \n").rstrip()
    return write(path, pack(lines[:100]) + pack(lines[100:]))  # several frames in a file


def write_arrow(path: Path, open_writer: Callable[..., Any]) -> Path:
    table = pa.table({"id": range(len(TEXTS)), "text": TEXTS})
    with open_writer(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=4)
    return path


def as_tar(members: list[tuple[str, bytes]]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return out.getvalue()


def tar_of_texts(texts: list[str]) -> bytes:
    """Samples as WebDataset has them: the text in .txt, with another one in .json, or in .json alone."""
    members: list[tuple[str, bytes]] = []
    for number, text in enumerate(texts):
        name = f"./part/{number:04}"
        members.append((f"{name}.seg.png", b"\0" * 700))
        if number % 2:
            members.append((f"{name}.json", json.dumps({"text": text}, indent=1).encode()))
        else:
            members += [(f"{name}.json", b'{"caption": 1}'), (f"{name}.txt", b"\xef\xbb\xbf" + text.encode())]
    return as_tar(members)


def mds_shard(rows: list[dict[str, bytes]], **encodings: str) -> bytes:
    """A shard as MDSWriter of MosaicML's streaming writes it. A column of int has 8 bytes, others their size before."""
    names = sorted(encodings)
    sizes = [8 if encodings[name] == "int" else None for name in names]
    about = {"column_encodings": [encodings[name] for name in names], "column_names": names, "column_sizes": sizes}
    head = json.dumps({**about, "format": "mds", "version": 2}, sort_keys=True).encode()
    samples = []
    for row in rows:
        free = [len(row[name]) for name, size in zip(names, sizes, strict=True) if size is None]
        samples.append(np.array(free, "<u4").tobytes() + b"".join(row[name] for name in names))
    places = 4 * (len(rows) + 2) + len(head) + np.cumsum([0, *map(len, samples)])
    return np.uint32(len(rows)).tobytes() + places.astype("<u4").tobytes() + head + b"".join(samples)


def mds_index(*files: str) -> str:
    shards = [{"column_names": [], "format": "mds", "raw_data": {"basename": file}} for file in files]
    return json.dumps({"shards": shards, "version": 2}, sort_keys=True)


def mds_of_texts(texts: list[str], encoding: str = "str") -> bytes:
    values = [json.dumps(text) if encoding == "json" else text for text in texts]
    rows = [{"id": b"\0" * 8, "image": b"\xff", "text": value.encode()} for value in values]
    return mds_shard(rows, id="int", image="bytes", text=encoding)


def write_mds(folder: Path, texts: list[str], encoding: str = "str") -> Path:
    folder.mkdir(parents=True)
    for number, part in enumerate((texts[:2], texts[2:])):
        data = mds_of_texts(part, encoding)
        (folder / f"shard.{number:05}.mds").write_bytes(data)
        (folder / f"shard.{number:05}.mds.zstd").write_bytes(compress_zstd(data))
    write(folder / "index.json", mds_index("shard.00000.mds", "shard.00001.mds"))
    return folder


OWN = """
def read(path, text_field):
    with open(path) as file:
        for line in file:
            yield bytes.fromhex(line).decode()

def rows(path, text_field):
    return ({text_field: text} if text else text for text in read(path, text_field))
"""


def write_own(folder: Path, texts: list[str], name: str = "read") -> str:
    """A format of a user, and the path by which their function reads it."""
    code = write(folder / f"own_{time.monotonic_ns()}.py", OWN)
    write(folder / "own" / "a.hex", "".join(text.encode().hex() + "\n" for text in texts))
    return f"reader://{code}:{name}?{folder}/own"


def at_url(scheme: str, files: dict[str, bytes]) -> str:
    """A place in memory:// or flaky:// with these files."""
    Flaky.register()
    fs = fsspec.filesystem(scheme)
    root = f"/corpus-{time.monotonic_ns()}"
    for name, data in files.items():
        while True:
            try:
                fs.pipe_file(f"{root}/{name}", data)
                break
            except ConnectionError:
                continue
    return f"{scheme}:/{root}"


def in_hub(folder: Path) -> str:
    """A file in a stand-in for Hugging Face's file system."""

    class Hub(MemoryFileSystem):
        protocol = "hf"

        @classmethod
        def _strip_protocol(cls, path: Any) -> Any:
            return super()._strip_protocol(path.removeprefix("hf:/"))

    fsspec.register_implementation("hf", Hub, clobber=True)
    name = f"datasets/me/mine-{time.monotonic_ns()}/data"
    Hub().pipe_file(f"/{name}/0.parquet", write_parquet(folder / "here.parquet").read_bytes())
    return f"hf://{name}/*.parquet"


INPUTS: dict[str, Callable[[Path], Path | str]] = {
    "folder of texts": lambda folder: write_texts(folder / "texts"),
    "lines": lambda folder: write_lines(folder / "a.JSONL"),
    "lines.gz": lambda folder: write_lines(folder / "a.jsonl.gz", gzip.compress),
    "lines.zst": lambda folder: write_lines(folder / "a.ndjson.zst", compress_zstd),
    "json in lines": lambda folder: write(folder / "a.json.gz", gzip.compress(as_lines(TEXTS))),
    "folder with json": lambda folder: write(folder / "sub" / "a.json", as_lines(TEXTS)).parent,
    "parquet": lambda folder: write_parquet(folder / "a.parquet"),
    "arrow file": lambda folder: write_arrow(folder / "a.arrow", pa.ipc.new_file),
    "tar": lambda folder: write(folder / "a.tar", tar_of_texts(TEXTS)),
    "folder with tar.gz": lambda folder: write(folder / "sub" / "a.tar.gz", gzip.compress(tar_of_texts(TEXTS))).parent,
    "mds": lambda folder: write_mds(folder / "mds", TEXTS),
    "mds of json": lambda folder: write_mds(folder / "mds", TEXTS, "json"),
    "mds at a url": lambda folder: at_url("memory", {"a.mds": mds_of_texts(TEXTS)}) + "/*.mds",
    "dataset": lambda folder: write_dataset(folder / "saved"),
    "folder with a dataset": lambda folder: write_dataset(folder / "above" / "saved").parent,
    "own texts": lambda folder: write_own(folder, TEXTS),
    "own rows": lambda folder: write_own(folder, TEXTS, "rows"),
    "lines at a url": lambda folder: at_url("memory", {"a.jsonl": as_lines(TEXTS)}) + "/a.jsonl",
    "tar at a url": lambda folder: at_url("memory", {"b/a.tar": tar_of_texts(TEXTS)}) + "/**/*.tar",
    "parquet in a hub": in_hub,
}


@pytest.mark.parametrize("kind", INPUTS)
def test_every_kind_of_input_gives_the_same_tokens(kind: str, tmp_path: Path) -> None:
    path = INPUTS[kind](tmp_path)
    size = len("".join(TEXTS).encode())
    files = {"folder of texts": len(TEXTS), "mds": 2, "mds of json": 2}.get(kind, 1)
    counts = {"documents": 5, "tokens": len(TOKENS), "bytes": size, "token_bytes": size}
    counts |= {"empty": 1, "errors": 0, "left_out": 0}
    for chunk_bytes in (2**20, 1):
        store = make(path, tmp_path / f"out-{chunk_bytes}", chunk_bytes=chunk_bytes)
        assert tokens_of(store) == TOKENS
        assert store.document_starts(0, len(store)).tolist() == [i for i, token in enumerate(TOKENS) if token == BOS]
        assert not store.has_mask
        assert store.index["inputs"] == [{"path": str(path), "files": files} | counts]
        assert (store.index["text_bytes"], store.index["empty"], store.index["errors"]) == (size, 1, 0)


@pytest.mark.parametrize("bos", [True, False])
def test_raw_text_in_a_config_gives_the_same_tokens(bos: bool, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl")
    data = Data(path=str(path), add_bos=bos)
    cached = open_cached(data, tmp_path / "cache")
    made = make(path, tmp_path / "made", bos=bos)
    again = open_tokens(str(made.folder), data=data, tokenizer=ByteTokenizer(), cache_folder=tmp_path / "no")
    assert tokens_of(cached) == tokens_of(again) == [token for token in TOKENS if bos or token != BOS]
    assert (again.folder, again.fingerprint) == (made.folder, cached.fingerprint)
    assert (cached.index["bos"], cached.index["eos"]) == (bos, True)
    assert not (tmp_path / "no").exists()


def test_a_dataset_of_a_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked: list[Any] = []

    def load_dataset(*names: str, split: str) -> Any:
        asked.append((*names, split))
        return datasets.Dataset.from_dict({"body": TEXTS})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    for number, name in enumerate(("me/mine", "me/mine:test", "me/mine:part:test[:10%]")):
        store = make([f"hf://{name}"], tmp_path / str(number), text_field="body", chunk_bytes=1)
        assert tokens_of(store) == TOKENS
    assert list(dict.fromkeys(asked)) == [("me/mine", "train"), ("me/mine", "test"), ("me/mine", "part", "test[:10%]")]
    monkeypatch.setattr(datasets, "load_dataset", lambda *names, split: 1 / 0)
    with pytest.raises(UserError, match=r"hf://me/none"):
        make(["hf://me/none"], tmp_path / "none")
    datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": ["a"]})}).save_to_disk(tmp_path / "dict")
    with pytest.raises(UserError, match=r"/dict .*/dict/train\b"):
        make(tmp_path / "dict", tmp_path / "none")
    assert tokens_of(make(tmp_path / "dict" / "train", tmp_path / "train")) == [BOS, 97, EOS]


@pytest.mark.long
@settings(max_examples=20, deadline=None)
@given(
    texts=st.lists(
        st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=30), min_size=1, max_size=12
    ),
    chunk_bytes=st.integers(1, 400),
    stops=st.lists(st.integers(0, 12), max_size=3),
)
def test_reading_resumes_anywhere(
    texts: list[str], chunk_bytes: int, stops: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The chunks after a position are those that came after it, whatever the size of chunks."""
    folder = tmp_path_factory.mktemp("texts")
    write(folder / "a.jsonl", as_lines(texts))
    write(folder / "b.jsonl.gz", gzip.compress(as_lines(texts)))
    pq.write_table(pa.table({"text": texts}), folder / "c.parquet", row_group_size=3)
    pyarrow.feather.write_feather(pa.table({"text": texts}), str(folder / "d.feather"), chunksize=3)
    write_mds(folder / "e", texts)
    own = write_own(tmp_path_factory.mktemp("own"), texts)
    remote = at_url("memory", {"a.jsonl": as_lines(texts)}) + "/*.jsonl"
    for number, text in enumerate(texts):
        write(folder / f"f{number:02}.txt", text)
    write(folder / "e.tar", tar_of_texts(texts))
    files = find_files([own, remote, str(folder)])
    chunks = list(reading_module.read_chunks(files, text_field="text", chunk_bytes=chunk_bytes))
    for stop in stops:
        if stop < len(chunks):
            rest = reading_module.read_chunks(
                files,
                text_field="text",
                chunk_bytes=chunk_bytes,
                position=json.loads(json.dumps(chunks[stop].position)),
            )
            assert list(rest) == chunks[stop + 1 :]
    assert chunks[-1].done == sum(file.size for file in files)
    encoder = Encoder(ByteTokenizer(), Options())
    made = [result.tokens for _, result in encode_chunks(iter(chunks), encoder, workers=1)]
    plain = [text.removeprefix("\ufeff") for text in texts]
    in_tar = [text if number % 2 else text.removeprefix("\ufeff") for number, text in enumerate(texts)]
    expected = [[BOS, *text.encode(), EOS] for text in [*texts * 7, *in_tar, *plain] if text]
    assert np.concatenate(made).tolist() == [token for document in expected for token in document]


def test_a_long_text_is_streamed_in_pieces(tmp_path: Path) -> None:
    text = "".join(chr(33 + i * i % 9000) for i in range(PIECE_BYTES))  # up to three bytes a character
    plain = write(tmp_path / "a.txt", "\ufeff" + text)
    packed = write(tmp_path / "b.txt.gz", gzip.compress(text.encode()))
    chunks = list(reading_module.read_chunks(find_files([str(plain)]), text_field="text", chunk_bytes=5000))
    assert len(chunks) > 2
    assert max(len(chunk.parts[0].data) for chunk in chunks) <= PIECE_BYTES
    assert [(part.begins, part.ends) for chunk in chunks for part in chunk.parts] == [
        (True, False), *[(False, False)] * (len(chunks) - 2), (False, True)
    ]  # fmt: skip
    for path in (plain, packed):
        store = make(path, tmp_path / path.stem, chunk_bytes=5000, shard_tokens=1)
        assert tokens_of(store) == [BOS, *text.encode(), EOS]
        assert store.index["documents"] == store.index["inputs"][0]["documents"] == 1
        assert len(store.index["shards"]) == len(chunks)
        assert store.index["text_bytes"] == len(text.encode())


def test_sources_are_walked_in_order(tmp_path: Path) -> None:
    root = tmp_path / "src"
    for name in ("b.py", "a/z.c", "a/.hidden", ".git/config", "a/__pycache__/x.pyc", "a-b", "c/d/e.txt"):
        write(root / name, name)
    write(root / "a" / "picture.png", b"\x89PNG\0\0")
    (root / "link.py").symlink_to(root / "b.py")
    (root / "c" / "circle").symlink_to(root)
    store = make(root, tmp_path / "out")
    names = ["a/z.c", "a-b", "b.py", "c/d/e.txt"]
    assert tokens_of(store) == [token for name in names for token in (BOS, *name.encode(), EOS)]
    assert store.index["left_out"] == store.index["inputs"][0]["left_out"] == 1
    globbed = make([root / "**" / "*.[ct]*", root / "b.py"], tmp_path / "globbed")
    assert [(tensor["files"], tensor["documents"], tensor["errors"]) for tensor in globbed.index["inputs"]] == [
        (2, 2, 0),
        (1, 1, 0),
    ]
    (root / "gone.txt").symlink_to("nowhere")
    with pytest.raises(UserError, match=r"gone\.txt: .*No such file"):
        make(root, tmp_path / "again")


def test_files_that_describe_others_are_no_documents(tmp_path: Path) -> None:
    root, text = tmp_path / "src", "a text"
    write_mds(root / "mds" / "0", [text])
    write_mds(root / "mds" / "1", [text])
    write(root / "mds" / "index.json", mds_index("0/shard.00000.mds", "1/shard.00000.mds"))
    for name in ("_SUCCESS", "_metadata", "dataset_info.json", "dataset_infos.json", "part/state.json"):
        write(root / "spark" / name, "{}")
    for name in ("a.ds", "a.ds.index", "a.ds.metadata", "a.ds.loss"):
        write(root / "datatrove" / name, "gpt2|2\n40\n")
    write(root / "web" / "_init.txt", text)
    write(root / "web" / "index.json", text)
    members = [
        ("__pre__/a.txt", b"no"),
        ("./__pre__/a.json", b"no"),
        ("__index__", b"no"),
        ("_a/__b/c.txt", text.encode()),
    ]
    write(root / "web" / "a.tar", as_tar(members))
    store = make(root, tmp_path / "out")
    assert tokens_of(store) == [BOS, *text.encode(), EOS] * 5
    chunks = {"chunks": [{"chunk_bytes": 9, "filename": "chunk-0-0.bin"}], "config": {}}
    write(root / "litdata" / "index.json", json.dumps(chunks))
    with pytest.raises(UserError, match=r"/litdata is a dataset of litdata.*nanogpt"):
        make(root, tmp_path / "again")
    write(root / "litdata" / "index.json", mds_index("shard.00000.mds"))
    write(root / "litdata" / "shard.00000.mds.br", "packed")
    with pytest.raises(UserError, match=r"shard\.00000\.mds\.br\b.*\.br\b.*\.zst"):
        make(root, tmp_path / "again")


@pytest.mark.parametrize("value", ["b'bytes'", "np.arange(3)", "[{'text': b'a', 'loss': True}]"])
def test_what_is_no_text_is_never_written_as_text(value: str, tmp_path: Path) -> None:
    """A reader of the user may yield any type, of which only the field with the text must be JSON."""
    code = "import datetime, numpy as np\ndef read(path, text_field):\n"
    code += (
        f"    yield {{'text': 'good', 'day': datetime.date.today(), 'image': b'x'}}\n    yield {{'text': {value}}}\n"
    )
    file = write(tmp_path / f"own_{time.monotonic_ns()}.py", code)
    write(tmp_path / "a.bin", "x")
    with pytest.raises(UserError, match=r"document 2: field 'text': (bytes|ndarray)"):
        make(f"reader://{file}:read?{tmp_path}/a.bin", tmp_path / "out")
    store = make(f"reader://{file}:read?{tmp_path}/a.bin", tmp_path / "out", on_error="skip")
    assert tokens_of(store) == [BOS, *b"good", EOS]


def test_the_standard_library(tmp_path: Path) -> None:
    every, train, validation = (
        [f.path for f in find_files([f"stdlib://{part}"])] for part in ("", "train", "validation")
    )
    names = {os.path.basename(path) for path in every}
    assert {"argparse.py", "json", "ast.py"} & names == {"argparse.py", "ast.py"}
    assert not [path for path in every if {"site-packages", "test"} & set(Path(path).parts)]
    assert sorted(train + validation) == sorted(every)
    assert validation == every[15::16]
    with pytest.raises(UserError, match=r"stdlib://tests .*stdlib://train\b.*stdlib://validation\b"):
        check_path("stdlib://tests", find_files)


def test_paths_that_name_nothing_or_twice(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", "a")
    write(tmp_path / "in" / ".hidden" / "x", "x")
    whole = write(tmp_path / "whole.json", '[\n{"text": "a"}]')
    for paths, message in (
        ([], "empty"),
        (str(tmp_path / "in"), r"/in\b"),
        (str(whole), r"whole\.json .*jq -c"),
        ("no/such", "no/such"),
        ([str(tmp_path / "*.md")], r"\*\.md"),
        ([str(tmp_path), str(tmp_path / "a.txt")], rf"a\.txt .*{tmp_path}\b.*{tmp_path}/a\.txt"),
        (["s3://bucket/tokens", "b"], "s3://bucket/tokens"),
        (["memory://none/a.txt"], "memory://none/a.txt"),
        (["memory://none/*.jsonl"], r"memory://none/\*\.jsonl"),
        (["nothing://bucket/a.jsonl"], "nothing"),
        (["reader://own_format.py:read"], r"reader://own_format\.py:read"),
    ):
        with pytest.raises(UserError, match=message):
            check_path(paths, find_files)
    whole.unlink()
    check_path("s3://bucket/tokens", find_files)
    tokens = make(tmp_path / "a.txt", tmp_path / "tokens").folder
    check_path(str(tokens), find_files)
    more = make(tmp_path / "a.txt", tmp_path / "more").folder
    with pytest.raises(UserError, match=r"/tokens .*\[\[data\.sources\]\]"):
        check_path([str(tokens), str(tmp_path / "a.txt")], find_files)
    check_path([str(tokens), str(more)], find_files)
    with pytest.raises(UserError, match="/tokens "):
        make(tokens, tmp_path / "again")
    assert tokens_of(make(tmp_path, tmp_path / "beside")) == [BOS, 97, EOS], "tokens below are not text"


def test_a_reader_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_own(tmp_path, ["one"])
    cached = open_cached(Data(path=path), tmp_path / "cache")
    assert tokens_of(cached) == [BOS, *b"one", EOS]
    code = Path(path.removeprefix("reader://").partition(":")[0])
    write(code, OWN.replace("decode()", "decode().upper()"))
    monkeypatch.delitem(sys.modules, code.stem)  # as in the next process
    assert tokens_of(open_cached(Data(path=path), tmp_path / "cache")) == [BOS, *b"ONE", EOS]
    for name, text, words in (
        (
            "fails",
            "def read(path, text_field):\n    yield 'a'\n    raise KeyError('dim')",
            ["document 2", "own_fails.py:3"],
        ),
        ("takes", "def read(path):\n    return []", ["own_takes.py", "text_field"]),
        ("lacks", "def read(path, text_field):\n    yield {'body': 'a'}", ["document 1", "'text'", "body"]),
        ("other", "def read(path, text_field):\n    yield 3", ["document 1", "'text'", "segments"]),
    ):
        write(tmp_path / f"own_{name}.py", text)
        with pytest.raises(UserError) as raised:
            make(path.replace(code.stem, f"own_{name}"), tmp_path / "none")
        assert mentions(str(raised.value), *words)


def test_formats_whose_package_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for kind, package in (("arrow file", "pyarrow"), ("dataset", "datasets")):
        with pytest.raises(UserError) as raised:
            make(INPUTS[kind](tmp_path), tmp_path / "out")
        assert mentions(str(raised.value), "pip", package)


# Bad input


BAD_LINES: list[tuple[bytes, list[str]]] = [
    (b'{"text": "cut', ["JSON", "char 9"]),
    (b"[1]", ["JSON object"]),
    (b'{"content": "a", "id": 1}', ["'text'", "content, id", "--text-field", "data.text_field"]),
    (b'{"text": null}', ["'text'", "segments"]),
    (b'{"text": "\xff"}', ["UTF-8", "byte 10"]),
    (b'{"text": "\\ud800"}', ["surrogate"]),
    (b'{"text": [{"text": "a"}]}', ["'text'", '"loss"']),
    (b"[" * 100_000, ["JSON", "recursion"]),
]


@pytest.mark.parametrize(("line", "words"), BAD_LINES, ids=range(len(BAD_LINES)))
def test_a_bad_line_stops_or_is_skipped(line: bytes, words: list[str], tmp_path: Path) -> None:
    lines = as_lines(TEXTS[:3]) + b"\n" + line + b"\n" + as_lines(TEXTS[3:])
    path = write(tmp_path / "a.jsonl", lines)
    with pytest.raises(UserError) as raised:
        make(path, tmp_path / "out")
    assert str(raised.value).startswith(f"{path}:5: ")
    assert mentions(str(raised.value), *words, "--on-error skip")
    assert not (tmp_path / "out").exists()
    store = make(path, tmp_path / "out", on_error="skip")
    assert tokens_of(store) == TOKENS
    assert store.index["errors"] == store.index["inputs"][0]["errors"] == 1
    [first] = store.index["first_errors"]
    assert first.startswith(f"{path}:5: ")
    assert mentions(first, *words)


def test_the_first_ten_errors_are_named_and_all_are_counted(tmp_path: Path) -> None:
    values = [f"text {i}" if i % 3 else 7 for i in range(90)]
    paths = [
        write(tmp_path / name, as_lines(values[:45]) + as_lines(values[45:], "other"))
        for name in ("a.jsonl", "b.jsonl")
    ]
    expected = [f"{paths[0]}:{1 + 3 * i}: field 'text' " for i in range(10)]
    for chunk_bytes in (2**20, 300):
        out = tmp_path / str(chunk_bytes)
        store = make(tmp_path / "*.jsonl", out, chunk_bytes=chunk_bytes, on_error="skip")
        assert all(map(str.startswith, store.index["first_errors"], expected))
        assert len(store.index["first_errors"]) == 10
        assert store.index["errors"] == 2 * (15 + 45)
        documents = [f"text {i}" for i in range(45) if i % 3] * 2
        assert tokens_of(store) == [token for text in documents for token in (BOS, *text.encode(), EOS)]


def _with_wrong_header() -> bytes:
    data = bytearray(as_tar([("a.txt", b"a"), ("b.txt", b"b"), ("c.txt", b"c")]))
    data[1024 + 150] ^= 1
    return bytes(data)


def damaged_inputs(folder: Path) -> list[tuple[Path, str, list[str]]]:
    """(file, what is reported of it, texts that are read all the same)."""
    texts = [f"{i} {'x' * 50}" for i in range(4000)]
    noise = np.random.default_rng(0).bytes(3000)
    lines = as_lines(texts[:2]) + b"".join(as_lines([noise[i : i + 30].hex()]) for i in range(0, 3000, 30))
    packed = gzip.compress(lines)
    whole = compress_zstd(lines)
    rows = pa.table({"text": [text.encode() for text in texts]}).cast(pa.schema([("text", pa.binary())]))
    bad_rows = pa.Array.from_buffers(
        pa.string(), 2, [None, pa.py_buffer(np.array([0, 1, 2], "<i4")), pa.py_buffer(b"a\xff")]
    )
    pq.write_table(pa.table({"text": bad_rows}), folder / "rows.parquet")
    pq.write_table(pa.table({"other": [1]}), folder / "other.parquet")
    pq.write_table(rows, folder / "cut.parquet")
    pyarrow.feather.write_feather(pa.table({"other": [1]}), str(folder / "other.arrow"))
    pyarrow.feather.write_feather(rows, str(folder / "cut.arrow"))
    for name in ("cut.parquet", "cut.arrow"):
        (folder / name).write_bytes((folder / name).read_bytes()[:-9])
    return [
        (write(folder / "latin.txt", b"a" * 90 + b"\xe4"), "not UTF-8: byte 90", []),
        (write(folder / "long.txt", "ä".encode() * 3000 + b"\xc3"), "not UTF-8: byte 6,000", []),
        (write(folder / "binary.txt", b"a\0b"), "binary: ", []),
        (write(folder / "a.parquet.gz", b"x"), "damaged: ", []),
        (write(folder / "cut.txt.gz", packed[:-9]), "damaged: ", []),
        (write(folder / "no.gz", b"no gzip"), "damaged: ", []),
        (write(folder / "cut.jsonl.zst", whole[:-3]), "damaged: ", ["?"]),
        (write(folder / "images.tar", as_tar([("a.png", b"x"), ("b.seg.PNG", b"")])), ".*png, seg.png", []),
        (write(folder / "no.tar", b"x" * 2000), "damaged: ", []),
        (write(folder / "cut.tar", as_tar([("a.txt", b"a"), ("b.txt", b"b" * 900)])[:2100]), "damaged: ", ["a"]),
        (write(folder / "between.tar", as_tar([("a.txt", b"a"), ("b.txt", b"b")])[:1024]), "damaged: ", ["a"]),
        (write(folder / "header.tar", _with_wrong_header()), "damaged: ", ["a"]),
        (write(folder / "cut.tar.gz", gzip.compress(as_tar([("a.txt", noise)]))[:-40]), "damaged: ", []),
        (write(folder / "latin.tar", as_tar([("a.txt", b"a\xe4"), ("b.txt", b"b")])), "", ["b"]),
        (write(folder / "lacks.tar", as_tar([("a.json", b'{"body": "a"}'), ("b.txt", b"b")])), "", ["b"]),
        (write(folder / "no.arrow", b"ARROW1"), "damaged: ", []),
        (write_arrow(folder / "stream.arrow", pa.ipc.new_stream), ".*to_parquet", []),
        (write(folder / "empty.feather", b""), ".*to_parquet", []),
        (folder / "other.arrow", "no field 'text': .*other.*data.text_field", []),
        (folder / "cut.arrow", "damaged: ", []),
        (folder / "rows.parquet", "not UTF-8: byte 0", ["a"]),
        (write(folder / "cut.mds", mds_of_texts(["a", "b"])[:-1]), "damaged: ", ["a"]),
        (write(folder / "no.mds", b"MDS"), "damaged: ", []),
        (write(folder / "cut.mds.zst", compress_zstd(mds_of_texts(["a", "b" * 999]))[:-3]), "damaged: ", ["?"]),
        (write(folder / "latin.mds", mds_shard([{"text": b"a\xe4"}], text="str")), "not UTF-8: byte 1", []),
        (write(folder / "bytes.mds", mds_shard([{"text": b"a"}], text="bytes")), ".*'text' .*bytes.*str.*json", []),
        (write(folder / "array.mds", mds_shard([{"text": b"a"}], text="ndarray:uint16")), ".*ndarray:uint16", []),
        (write(folder / "other.mds", mds_shard([{"body": b"a"}], body="str")), "no field 'text': .*body", []),
        (folder / "other.parquet", "no field 'text': .*other.*data.text_field", []),
        (folder / "cut.parquet", "damaged: ", []),
    ]


def test_damaged_files_stop_or_are_skipped(tmp_path: Path) -> None:
    """A text is read whole or not at all."""
    (tmp_path / "in").mkdir()
    good = write(tmp_path / "good.txt", "good")
    for number, (path, message, kept) in enumerate(damaged_inputs(tmp_path / "in")):
        for chunk_bytes in (2**20, 1000):
            out = tmp_path / f"{number}-{chunk_bytes}"
            where = rf"^{re.escape(str(path))}(:\d+|:\W(row|sample)\W[01]|:\W[ab].(txt|json))?:\W"
            with pytest.raises(UserError, match=where + message):
                make([path, good], out, chunk_bytes=chunk_bytes)
            store = make([path, good], out, chunk_bytes=chunk_bytes, on_error="skip")
            assert store.index["errors"] == 1, path
            tokens = tokens_of(store)
            assert tokens[-6:] == [BOS, *b"good", EOS]
            if kept != ["?"]:
                assert tokens[:-6] == [token for text in kept for token in (BOS, *text.encode(), EOS)], path


@pytest.mark.parametrize(("log", "name"), [(27, "a.jsonl"), (28, "a.jsonl"), (31, "a.txt"), (31, "a.json")])
def test_a_window_that_pyarrow_does_not_read_is_named(log: int, name: str, tmp_path: Path) -> None:
    """A frame of zstd as `--long=LOG` writes it: its window is stated, and one raw block follows."""
    data = as_lines(["text"])
    frame = b"\x28\xb5\x2f\xfd\0" + bytes([(log - 10) << 3]) + (len(data) << 3 | 1).to_bytes(3, "little") + data
    file = tmp_path / f"{name}.zst"
    file.write_bytes(frame)
    if log == 27:
        assert tokens_of(make(file, tmp_path / "out")) == [BOS, *b"text", EOS]
        return
    with pytest.raises(UserError) as caught:
        make(file, tmp_path / "out")
    assert mentions(str(caught.value), file, "window", "2^27", "--long=31")
    good = write(tmp_path / "good.txt", "good")
    if not name.endswith(".json"):
        assert tokens_of(make([file, good], tmp_path / "out", on_error="skip")) == [BOS, *b"good", EOS]


def test_a_truncated_file_keeps_its_whole_lines(tmp_path: Path) -> None:
    """Cut anywhere, what is there of whole lines is read, and the error names the line after."""
    lines = [as_lines([f"{i} {os.urandom(20).hex()}"]) for i in range(60)]
    packed = gzip.compress(b"".join(lines))
    for cut in range(30, len(packed), 97):
        path = write(tmp_path / "a.jsonl.gz", packed[:cut])
        there = zlib.decompressobj(wbits=31).decompress(packed[:cut]).count(b"\n")
        files = find_files([str(path)])
        for chunk_bytes in (100, 2**20):
            chunks = reading_module.read_chunks(files, text_field="text", chunk_bytes=chunk_bytes)
            encoder = Encoder(ByteTokenizer(), Options())
            results = [result for _, result in encode_chunks(chunks, encoder, workers=1)]
            assert sum(result.counts[0]["documents"] for result in results) == there
            errors = [error for result in results for error in result.errors]
            assert len(errors) == 1
            assert errors[0].startswith(f"{path}:{there + 1}: damaged: ")


def test_nothing_to_read_makes_no_folder(tmp_path: Path) -> None:
    write(tmp_path / "in" / "a.txt", "")
    write(tmp_path / "in" / "b.txt", b"a\0")
    with pytest.raises(UserError, match=r"\b1 empty.*\b1 binary"):
        make(tmp_path / "in", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir() if not path.name.endswith(".lock")] == ["in"]


def test_a_file_at_a_url_that_changes(tmp_path: Path) -> None:
    """Cached tokens of a URL are made again for another version of the file, also one of the same size."""
    place = at_url("memory", {"a.jsonl": as_lines(["one"])})
    data = Data(path=f"{place}/a.jsonl")
    cached = open_cached(data, tmp_path)
    assert open_cached(data, tmp_path).folder == cached.folder
    files = find_files([f"{place}/a.jsonl"])
    fsspec.filesystem("memory").pipe_file(f"{place}/a.jsonl", as_lines(["two"]))
    with pytest.raises(UserError, match=r"a\.jsonl "):
        list(reading_module.read_chunks(files, text_field="text", chunk_bytes=100))
    assert tokens_of(open_cached(data, tmp_path)) == [BOS, *b"two", EOS]


def test_a_store_that_fails_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the store is none of the file: nothing is skipped."""
    path = at_url("flaky", {"a.jsonl.gz": gzip.compress(as_lines(TEXTS))}) + "/a.jsonl.gz"
    monkeypatch.setattr(Flaky, "chance", 0.2)
    monkeypatch.setattr(Flaky, "_force", True)
    assert tokens_of(make(path, tmp_path / "out")) == TOKENS
    monkeypatch.setattr("titanlite.data.remote.PATIENCE", 0.1)
    monkeypatch.setattr(Flaky, "chance", 1.0)
    with pytest.raises(RunError, match=r"a\.jsonl\.gz"):
        make(path, tmp_path / "none", on_error="skip")


@pytest.mark.slow
def test_text_in_s3(s3: str, tmp_path: Path) -> None:
    fs = fsspec.filesystem("s3")
    fs.pipe_file(f"{s3}/text/b.jsonl", as_lines(TEXTS[3:]))
    fs.pipe_file(f"{s3}/text/a.parquet", write_parquet(tmp_path / "a.parquet").read_bytes())
    store = make([f"{s3}/text/*"], tmp_path / "out")
    assert tokens_of(store) == TOKENS + [token for text in TEXTS[3:] if text for token in (BOS, *text.encode(), EOS)]
    before = find_files([f"{s3}/text/b.jsonl"])
    assert [file[5:7] for file in before] == [file[5:7] for file in find_files([f"{s3}/text/*.jsonl"])]
    fs.pipe_file(f"{s3}/text/b.jsonl", as_lines(TEXTS[3:])[::-1])
    assert find_files([f"{s3}/text/b.jsonl"]) != before


# Segments


def test_segments_are_tokenized_one_by_one_and_masked(tmp_path: Path) -> None:
    chat = [
        {"text": "ask", "loss": False},
        {"text": "ö", "loss": True},
        {"text": "", "loss": False},
        {"text": "!", "loss": True},
    ]
    values = ["plain", chat, [], [{"text": "", "loss": True}], chat[::-1], chat[1:2]]
    write(tmp_path / "a.jsonl", as_lines(values))
    column = [value if isinstance(value, list) else [{"text": value, "loss": True}] for value in values]
    kind = pa.list_(pa.struct([("text", pa.string()), ("loss", pa.bool_())]))
    pq.write_table(pa.table({"text": pa.array(column, kind)}), tmp_path / "b.parquet", row_group_size=2)
    documents = [
        ([BOS, *b"plain", EOS], [1] * 7),
        ([BOS, *b"ask", *"ö".encode(), *b"!", EOS], [0, 0, 0, 0, 1, 1, 1, 1]),
        ([BOS, *b"!", *"ö".encode(), *b"ask", EOS], [1, 1, 1, 1, 0, 0, 0, 0]),
        ([BOS, *"ö".encode(), EOS], [1, 1, 1, 1]),
    ]
    for name in ("a.jsonl", "b.parquet"):
        for chunk_bytes in (2**20, 1):
            store = make(tmp_path / name, tmp_path / f"{name}-{chunk_bytes}", chunk_bytes=chunk_bytes)
            assert tokens_of(store) == [token for tokens, _ in documents for token in tokens]
            mask = [bool(flag) for _, flags in documents for flag in flags]
            assert store.read_mask(0, len(store)).tolist() == mask
            assert store.document_starts(0, len(store)).tolist() == [0, 7, 15, 23]
            assert store.index["empty"] == 2
    bare = make(tmp_path / "a.jsonl", tmp_path / "bare", bos=False, eos=False)
    assert tokens_of(bare) == [token for tokens, _ in documents for token in tokens[1:-1]]
    assert bare.has_mask


@pytest.mark.long
def test_json_columns_are_decoded(tmp_path: Path) -> None:
    """A column of type Json, as Hugging Face datasets writes it: a text has quotation marks there, and segments are a
    text."""
    import datasets

    segments = [{"text": "ask", "loss": False}, {"text": "ö", "loss": True}]
    features = datasets.Features({"text": datasets.Json(), "tools": datasets.Value("string")})
    values = ['say "hi"', segments, "", None, 7]
    rows = datasets.Dataset.from_list([{"text": value, "tools": "[]"} for value in values], features=features)
    rows.save_to_disk(str(tmp_path / "dataset"))
    rows.to_parquet(str(tmp_path / "rows.parquet"))
    pyarrow.feather.write_feather(rows.data.table, str(tmp_path / "rows.arrow"))
    for name in ("dataset", "rows.parquet", "rows.arrow"):
        store = make(tmp_path / name, tmp_path / f"{name}.tokens", on_error="skip")
        assert tokens_of(store) == [BOS, *b'say "hi"', EOS, BOS, *b"ask", *"ö".encode(), EOS]
        assert store.read_mask(0, len(store)).tolist() == [1] * 10 + [0] * 4 + [1] * 3
        assert (store.index["empty"], store.index["errors"]) == (1, 2)


def test_only_the_first_of_a_document_begins_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some tokenizers put a space before a text: not in the middle of one."""
    original, began = ByteTokenizer.encode, []

    def encode(tokenizer: ByteTokenizer, text: str, *, begins: bool = True) -> np.ndarray:
        began.append((text[:3], len(text), begins))
        return original(tokenizer, text)

    monkeypatch.setattr(ByteTokenizer, "encode", encode)
    write(tmp_path / "a.jsonl", as_lines(["one", [{"text": "two", "loss": True}, {"text": "end", "loss": True}]]))
    write(tmp_path / "b.txt", "b" * (PIECE_BYTES + 5))
    make([tmp_path / "a.jsonl", tmp_path / "b.txt"], tmp_path / "out", chunk_bytes=100)
    pieces = [("bbb", PIECE_BYTES, True), ("bbb", 5, False)]
    assert began == [("one", 3, True), ("two", 3, True), ("end", 3, False), *pieces]


def test_tokens_that_a_tokenizer_does_not_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a.txt", "a")
    monkeypatch.setattr(ByteTokenizer, "bos_id", None)
    with pytest.raises(UserError, match=r"data\.add_bos = false.*--no-bos"):
        make(tmp_path / "a.txt", tmp_path / "out")
    assert tokens_of(make(tmp_path / "a.txt", tmp_path / "out", bos=False)) == [97, EOS]
    with pytest.raises(UserError, match=r"data\.add_bos: .*/out\b.*false.*true"):
        open_tokens(str(tmp_path / "out"), data=Data(), tokenizer=ByteTokenizer(), cache_folder=tmp_path)


# Processes


def mixed_input(folder: Path) -> list[Path | str]:
    """Every kind, some of it bad; about 60 kB."""
    texts = [f"document {i} " + "abc " * (i % 40) for i in range(200)]
    chat = [[{"text": text, "loss": bool(i % 2)}, {"text": "end", "loss": True}] for i, text in enumerate(texts)]
    for i in range(20):
        write(folder / "texts" / f"{i:02}.txt", texts[i] * (i % 3))
    write(folder / "texts" / "x.png", b"\0")
    write(folder / "long.txt", "ö" * PIECE_BYTES)
    write(folder / "chat.jsonl.gz", gzip.compress(as_lines(chat[:50]) + b"bad\n" + as_lines(chat[50:])))
    write(folder / "plain.jsonl", as_lines([*texts, 3, *texts]))
    pq.write_table(pa.table({"text": texts}), folder / "rows.parquet", row_group_size=70)
    pyarrow.feather.write_feather(pa.table({"text": texts}), str(folder / "rows.arrow"), chunksize=70)
    write(folder / "samples.tar.gz", gzip.compress(tar_of_texts(texts)))
    names = ("texts", "long.txt", "chat.jsonl.gz", "plain.jsonl", "rows.parquet", "rows.arrow", "samples.tar.gz")
    return [*(folder / name for name in names), write_own(folder, texts)]


SMALL: dict[str, Any] = {"chunk_bytes": 1500, "shard_tokens": 9000, "on_error": "skip"}


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path | str], dict[str, bytes]]:
    """Return the paths of `mixed_input`, and the files that are made of it."""
    folder = tmp_path_factory.mktemp("mixed")
    paths = mixed_input(folder)
    return paths, contents(make(paths, folder / "whole", **SMALL).folder)


@pytest.mark.long
def test_workers_change_nothing(mixed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths, expected = mixed
    monkeypatch.setattr(prepare_module, "WORKER_BYTES", 1)
    assert contents(make(paths, tmp_path / "by-2", workers=2, **SMALL).folder) == expected
    index = json.loads(expected["index.json"])
    assert (index["errors"], index["empty"], index["left_out"], len(index["shards"])) == (2, 7, 1, 16)
    for name in ("documents", "tokens"):
        assert sum(entry[name] for entry in index["inputs"]) == index[name]
    with pytest.raises(UserError, match=r"chat\.jsonl\.gz:51: not JSON"):
        make(paths, tmp_path / "stopped", workers=2, **SMALL | {"on_error": "stop"})


SLOW = """
import json, signal, sys, time
from pathlib import Path
from titanlite.tools.ingest import token_writer as tokens
from titanlite.tools.ingest import prepare
from titanlite.tools.ingest.encoding import Options
from titanlite.data.tokenizer import load_tokenizer
prepare.WORKER_BYTES = 1
add = tokens.TokenWriter.add
def slow(self, *arguments, position):
    add(self, *arguments, position=position)
    # From the third shard on it waits to be killed, however late that comes.
    has_three = progress.exists() and len(json.loads(progress.read_text())["shards"]) >= 3
    time.sleep(60 if has_three else 0.05)
tokens.TokenWriter.add = slow
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job begins with none
paths, out, progress = json.loads(sys.argv[1])
progress = Path(progress)
how = {"options": Options(chunk_bytes=1500, shard_tokens=9000), "on_error": "skip", "workers": 2}
try:
    prepare.prepare(paths, Path(out), tokenizer=load_tokenizer("bytes"), **how)
except KeyboardInterrupt:
    sys.exit(130)
"""


def begin(paths: list[Path | str], out: Path, mark: str) -> "subprocess.Popen[bytes]":
    """Returns when three shards are there. Its processes have the mark in their environment."""
    progress = partial_folder(out) / "resume.json"
    arguments = json.dumps([list(map(str, paths)), str(out), str(progress)])
    environ = os.environ | {"MARK": mark}
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW, arguments], start_new_session=True, stderr=subprocess.PIPE, env=environ
    )
    deadline = time.monotonic() + 30
    while not progress.exists() or len(json.loads(progress.read_text())["shards"]) < 3:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return process


def partial_folder(out: Path) -> Path:
    return out.with_name(f".{out.name}.partial-{platform.node()}")


@pytest.mark.long
@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_prepare_resumes_and_leaves_nothing_behind(sign: signal.Signals, mixed: Any, tmp_path: Path) -> None:
    paths, expected = mixed
    out, mark = tmp_path / "killed", f"prepare-{uuid4()}"
    process = begin(paths, out, mark)
    assert len(processes_with(mark.encode())) > 2
    os.killpg(process.pid, sign) if sign == signal.SIGINT else process.kill()
    _, errors = process.communicate(timeout=20)
    if sign == signal.SIGINT:
        assert (process.returncode, errors) == (130, b"")
    assert not processes_left(mark.encode(), 60), "orphans; a busy machine needs its time"
    assert not out.exists()
    state = json.loads((partial_folder(out) / "resume.json").read_text())
    kept = [partial_folder(out) / f"{shard['name']}.tokens" for shard in state["shards"]]
    assert len(kept) >= 3
    written = [path.stat().st_mtime_ns for path in kept]
    reported: list[str] = []
    make(paths, out, **SMALL, report=reported.append)
    tokens = sum(shard["tokens"] for shard in state["shards"])
    assert mentions(reported[0], f"{tokens:,} tokens")
    assert contents(out) == expected
    assert [(out / path.name).stat().st_mtime_ns for path in kept] == written


def test_what_skipped_errors_does_not_resume_as_if_there_were_none(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", b"bad\n" + as_lines(["text"] * 10))
    make(path, tmp_path / "out", on_error="skip")
    with pytest.raises(UserError, match=r"a\.jsonl:1: not JSON"):
        make(path, tmp_path / "out")


@pytest.mark.long
def test_an_error_in_a_worker_is_the_error_of_the_command() -> None:
    text = Chunk([Part(0, "a.txt", "text", b"text")], [], 0)
    with pytest.raises(UserError, match=r"^text: no such token"):
        list(encode_chunks(iter([text]), Encoder(Failing(), Options()), workers=2))


class Failing(ByteTokenizer):
    def encode(self, text: str, *, begins: bool = True) -> np.ndarray:
        raise UserError(f"{text}: no such token")


def test_a_full_disk_is_an_error_and_the_next_start_resumes(
    mixed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths, expected = mixed
    add = prepare_module.TokenWriter.add

    def full(writer: Any, *arguments: Any, position: Any) -> None:
        if writer.tokens > 30_000:
            raise OSError(28, "No space left on device")
        add(writer, *arguments, position=position)

    with monkeypatch.context() as patch:
        patch.setattr(prepare_module.TokenWriter, "add", full)
        with pytest.raises(RunError, match=r"/out .*No space left"):
            make(paths, tmp_path / "out", **SMALL)
    reported: list[str] = []
    assert contents(make(paths, tmp_path / "out", **SMALL, report=reported.append).folder) == expected
    assert reported[0].startswith("resuming after ")


# Folders, the cache, the command


def test_a_folder_that_is_there_is_never_written_over(tmp_path: Path) -> None:
    path, reported = write(tmp_path / "a.txt", "one"), []
    make(path, tmp_path / "out")
    before = contents(tmp_path / "out")
    make(path, tmp_path / "out", report=reported.append)
    [line] = reported
    assert mentions(line, tmp_path / "out", "1 documents", "5 tokens")
    for change in ({"bos": False}, {"text_field": "b"}, {"shard_tokens": 3}):
        with pytest.raises(UserError, match=r"/out "):
            make(path, tmp_path / "out", **change)
    write(path, "two")
    with pytest.raises(UserError, match=r"/out "):
        make(path, tmp_path / "out")
    assert contents(tmp_path / "out") == before
    write(tmp_path / "mine" / "x", "x")
    with pytest.raises(UserError, match=r"/mine "):
        make(path, tmp_path / "mine")
    (tmp_path / "empty").mkdir()
    assert tokens_of(make(path, tmp_path / "empty")) == [BOS, *b"two", EOS]


@pytest.mark.long
def test_text_is_prepared_once_and_again_when_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, calls = write(tmp_path / "text" / "a.txt", "one").parent, []
    original = prepare_module._write
    monkeypatch.setattr(prepare_module, "_write", lambda task: (calls.append(task), original(task)))
    stores: list[TokenStore] = []

    def open_it() -> None:
        data = Data(path=[str(folder / "*.txt")])
        stores.append(open_cached(data, tmp_path / "cache"))

    threads = [threading.Thread(target=open_it) for _ in range(4)]  # the ranks of a node
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(stores) == 4
    assert len(calls) == 1
    [prepared] = (tmp_path / "cache").glob("*/index.json")
    left_over = partial_folder(prepared.parent)
    prepared.parent.rename(left_over)  # as if killed before the end
    open_it()
    assert len(calls) == 2
    assert not left_over.exists()
    write(folder / "a.txt", "longer")
    open_it()
    assert len(calls) == 3
    assert tokens_of(stores[-1]) == [BOS, *b"longer", EOS]
    frequencies = np.array(list(Counter(tokens_of(stores[-1])).values())) / 8
    assert stores[-1].index["unigram_entropy"] == pytest.approx(-(frequencies * np.log(frequencies)).sum())


def test_text_is_not_prepared_without_a_function_that_does(tmp_path: Path) -> None:
    path = str(write(tmp_path / "a.txt", "a"))
    with pytest.raises(UserError) as error:
        open_tokens(path, data=Data(), tokenizer=ByteTokenizer(), cache_folder=tmp_path)
    assert f"titanlite data prepare {path} --out DIR --tokenizer bytes" in str(error.value)
    check_path("no/such")  # nobody looks at text either
    with pytest.raises(UserError, match="no/such"):
        check_path("no/such", find_files)


def test_tokens_of_another_tokenizer_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make(write(tmp_path / "a.txt", "a"), tmp_path / "out").folder
    made_with = json.loads((folder / INDEX).read_text())["tokenizer"]
    assert made_with == {"fingerprint": "bytes", "vocab_size": 258, "name": "bytes"}
    other = load_tokenizer("python-2k")

    def refusal(tokenizer: Tokenizer) -> str:
        with pytest.raises(UserError) as error:
            open_tokens(str(folder), data=Data(), tokenizer=tokenizer, cache_folder=tmp_path)
        return str(error.value)

    assert 'set data.tokenizer = "bytes"' in refusal(other)
    with monkeypatch.context() as patch:
        patch.setattr(ByteTokenizer, "fingerprint", "another")
        assert "changed" in refusal(ByteTokenizer())
    index = json.loads((folder / INDEX).read_text())
    del index["tokenizer"]["name"]  # as older versions wrote it
    (folder / INDEX).write_text(json.dumps(index))
    assert mentions(refusal(other), 258)


def test_a_url_is_copied_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make(write(tmp_path / "a.txt", "a"), tmp_path / "out").folder
    localized: list[Any] = []
    monkeypatch.setattr("titanlite.data.remote.localize", lambda *a: (localized.append(a), folder)[1])
    store = open_tokens("s3://b/out", data=Data(), tokenizer=ByteTokenizer(), cache_folder=tmp_path)
    assert (localized, tokens_of(store)) == ([("s3://b/out", tmp_path)], [BOS, 97, EOS])


def test_the_command(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a.jsonl", as_lines(TEXTS, "body") + b"bad\n")
    write(tmp_path / "b.txt", "b")
    command = ["data", "prepare", "a.jsonl", "--out", "tok/", "b.txt", "--tokenizer=bytes", "--text-field", "body"]
    assert cli.run(command) == 2
    [line] = capfd.readouterr().err.splitlines()
    assert line.startswith("error: a.jsonl:7: not JSON: ")
    assert cli.run([*command, "--on-error", "skip", "--no-bos", "--workers", "1"]) == 0
    count = len(TOKENS) - 5 + 2
    assert f"6 documents, {count} tokens of {count - 6} bytes" in capfd.readouterr().out
    assert tokens_of(TokenStore(tmp_path / "tok")) == [*(token for token in TOKENS if token != BOS), 98, EOS]


def test_tokenizers_are_trained_and_tokens_inspected(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    texts = ["the cat and the dog ", "the end"] * 20
    write(tmp_path / "a.jsonl", as_lines(texts))
    assert cli.run(["data", "tokenizer", "a.jsonl", "--out", "made", "--vocab-size", "516"]) == 0
    assert capfd.readouterr().out == f"{tmp_path}/made: 516 tokens\n"
    assert cli.run(["data", "prepare", "a.jsonl", "--out", "tok", "--tokenizer", "made/tokenizer.json"]) == 0
    assert TokenStore(tmp_path / "tok").index["tokenizer"]["name"] == "made/tokenizer.json"
    capfd.readouterr()
    assert cli.run(["data", "inspect", "tok", "--sample", "40", "--quick"]) == 0
    shown = capfd.readouterr().out
    assert shown.count("the end") == 20
    assert cli.run(["data", "inspect", "tok"]) == 0
    assert mentions(capfd.readouterr().out.splitlines()[-1], "checksums", 2)
    write(tmp_path / "tok" / "00000.tokens", b"x" * (tmp_path / "tok" / "00000.tokens").stat().st_size)
    assert cli.run(["data", "inspect", "tok"]) == 2
    write(tmp_path / "b.jsonl", as_lines(texts) + b"bad\n")
    assert cli.run(["data", "tokenizer", "b.jsonl", "--out", "other", "--vocab-size", "516"]) == 2
    assert "error: b.jsonl:41: not JSON" in capfd.readouterr().err


def _flip(file: Path) -> None:
    file.write_bytes(bytes(byte ^ 1 for byte in file.read_bytes()))


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-2])


@pytest.mark.parametrize(
    ("damage", "name"),
    [(_flip, "00000.tokens"), (_cut, "00000.tokens"), (_cut, INDEX), (Path.unlink, "00000.documents")],
)
def test_a_damaged_cache_is_made_again(
    damage: Callable[[Path], None], name: str, tmp_path: Path, warnings: Callable[[], list[str]]
) -> None:
    data = Data(path=str(write(tmp_path / "a.txt", "some text " * 50)))
    first = open_cached(data, tmp_path / "c")
    whole = tokens_of(first)
    damage(first.folder / name)
    again = open_cached(data, tmp_path / "c")
    assert (again.folder, tokens_of(again)) == (first.folder, whole)
    assert (tmp_path / "c" / f"{first.folder.name}.damaged-1").is_dir()
    [warning] = warnings()
    assert mentions(warning, f"{first.folder.name}.damaged-1")


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_read(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text, file = tmp_path / "a.txt", tmp_path / "file"
    text.write_text("a")
    file.touch()
    for out, named in {"/proc/o": "/proc", f"{file}/below": file}.items():
        assert cli.run(["data", "prepare", str(text), "--out", out, "--tokenizer", "bytes"]) == 2
        assert re.match(rf"error: --out: {named} .*\n$", capfd.readouterr().err)


@pytest.mark.long
def test_a_worker_that_is_killed_while_it_waits_is_an_error() -> None:
    """A lock that the dead one holds would stop the other, which does not hear SIGTERM."""
    encoder = Encoder(load_tokenizer("bytes"), Options())
    others = set(multiprocessing.active_children())
    workers: list[BaseProcess] = []
    ended: list[bool] = []

    def chunks() -> Iterator[Chunk]:
        for number in range(2 * CHUNKS_AHEAD + 1):
            yield Chunk([], [], number)
        time.sleep(0.2)  # both workers wait
        workers.extend(set(multiprocessing.active_children()) - others)
        workers[0].kill()
        while True:  # the other worker does what there is until the death is seen
            yield Chunk([], [], 0)

    def encode() -> None:
        with pytest.raises(RunError, match="killed"):
            list(encode_chunks(chunks(), encoder, workers=2))
        ended.append(True)

    thread = threading.Thread(target=encode, daemon=True)
    thread.start()
    thread.join(60)
    assert ended
    assert not any(worker.is_alive() for worker in workers)


def test_tokens_in_arrays_of_mds_are_refused_with_the_way_to_convert_them(tmp_path: Path) -> None:
    rows = [{"tokens": np.array([1, 2], "<u2").tobytes()}]
    (tmp_path / "shard.00000.mds").write_bytes(mds_shard(rows, tokens="ndarray:uint16"))
    options = {"tokenizer": ByteTokenizer(), "options": Options(), "workers": 1, "report": lambda line: None}
    with pytest.raises(UserError, match=r"'tokens' as one \.bin .*nanogpt"):
        prepare([str(tmp_path)], tmp_path / "out", **options)
