"""Tokens of other programs are read in place, with the documents that their own readers give.

tests/data/tokens was written by the programs themselves: tests/engines/corpora.py."""

import gzip
import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.engines.corpora import TOKENS, llm_c
from tests.support.helpers import TinyRun, mentions
from tests.support.object_stores import Flaky
from titanlite.config.load import load
from titanlite.data import prepared
from titanlite.data.foreign import MEGATRON, MEGATRON_MAGIC
from titanlite.data.packing import BestFit, Stream
from titanlite.data.sources import open_sources, open_tokens
from titanlite.data.tokenizer import ByteTokenizer, Tokenizer
from titanlite.data.tokens import TokenStore
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
    head = MEGATRON.pack(MEGATRON_MAGIC, 1, code, len(sequences), len(ends)) + lengths.tobytes() + places.tobytes()
    more = np.zeros(len(sequences), "i1").tobytes() if modes else b""
    prefix.with_name(f"{prefix.name}.idx").write_bytes(head + ends.tobytes() + more)
    return prefix


def of_texts(texts: list[str]) -> list[list[list[int]]]:
    return [[[*text.encode(), EOS]] for text in texts]


def opened(path: object, cache: Path = Path(), tokenizer: Tokenizer | None = None, **options: object) -> TokenStore:
    data = Data.model_validate({"add_bos": False, **options})
    paths = path if isinstance(path, list) else [path]
    return open_tokens([*map(str, paths)], data=data, tokenizer=tokenizer or ByteTokenizer(), cache_folder=cache)


def documents_of(store: TokenStore) -> list[list[int]]:
    starts = store.document_starts(0, len(store))
    assert starts.tolist() == [at for i in range(len(store)) for at in store.document_starts(i, 1).tolist()]
    return [part.tolist() for part in np.split(store.read(0, len(store)), starts[1:])]


class Wide(ByteTokenizer):
    """A vocabulary whose tokens take 4 bytes."""

    vocab_size = 100_000
    fingerprint = "wide"


@pytest.mark.parametrize("dtype", ["<u2", "<i4"])
def test_sequences_are_those_of_the_same_text_prepared_here(dtype: str, tmp_path: Path) -> None:
    text = [text for text in TEXTS if text]
    prefix = write_indexed(tmp_path / "corpus_text_document", of_texts(text), dtype, modes=dtype == "<i4")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": part}) + "\n" for part in text))
    options = {"tokenizer": ByteTokenizer(), "options": Options(bos=False), "workers": 1}
    own = prepare([str(tmp_path / "a.jsonl")], tmp_path / "own", report=lambda line: None, **options)
    for name in (prefix, f"{prefix}.bin", f"{prefix}.idx", tmp_path / "*_document.*"):
        store = opened(name)
        assert len(store) == len(own)
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
    idx.write_bytes(MEGATRON.pack(MEGATRON_MAGIC, 1, 7, 0, 1))
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


RECORDED = Path(__file__).parents[2] / "data" / "tokens"
FOLDERS = {"megatron": None, "datatrove": None, "numpy": None, "olmo": "olmo", "nanogpt": "nanogpt"}


@pytest.mark.parametrize("name", FOLDERS)
def test_documents_are_those_that_the_program_wrote(name: str, tmp_path: Path) -> None:
    form = FOLDERS[name]
    store = opened(RECORDED / name, tmp_path, format=form)
    assert documents_of(store) == TOKENS
    assert documents_of(pickle.loads(pickle.dumps(store))) == TOKENS, "as worker processes read them"
    assert (store.index["bos"], store.index["eos"]) == (False, True)
    for seq_len in (7, 16):
        best = BestFit(store, seq_len=seq_len, plan_folder=tmp_path)
        assert sum(int((best.read(i).labels >= 0).sum()) for i in range(len(best))) <= len(store) - len(TOKENS)
    if name == "datatrove":
        assert store.read_mask(0, len(store)).tolist() == [i > 0 for ids in TOKENS for i in range(len(ids))]
    file = next(path for path in sorted((RECORDED / name).iterdir()) if path.suffix in (".bin", ".ds", ".npy"))
    assert opened(file, tmp_path, format=form).fingerprint == store.fingerprint
    if form:
        shutil.copytree(RECORDED / name, tmp_path / "more")
        (tmp_path / "more" / "README.md").write_text("words")
        with pytest.raises(UserError, match=r"^data\.path: .*README\.md"):
            opened(tmp_path / "more", tmp_path, format=form)
        assert documents_of(opened(tmp_path / "more" / f"*{file.suffix}", tmp_path, format=form)) == TOKENS
        with pytest.raises(UserError, match=r"^data\.format: "):
            opened(file, tmp_path)
        with pytest.raises(UserError, match=r"^data\.format: "):
            prepared.prepared_tokens([str(RECORDED / name)])


def test_marks_that_begin_documents_across_files(tmp_path: Path) -> None:
    llm_c(tmp_path)
    as_gpt2 = type("Gpt2", (ByteTokenizer,), {"bos_id": EOS})()
    store = opened(tmp_path, tokenizer=as_gpt2, add_bos=True, add_eos=False)
    assert documents_of(store) == [[EOS, *ids[:-1]] for ids in TOKENS]
    for flag, wrong in (("add_eos", True), ("add_bos", False)):
        with pytest.raises(UserError, match=rf"^data\.{flag}: "):
            opened(tmp_path, tokenizer=as_gpt2, add_bos=wrong, add_eos=wrong)
    by_end = opened(tmp_path, tokenizer=as_gpt2, add_bos=False, add_eos=True)
    assert by_end.document_starts(0, 20).tolist() == [0, 1, 5]
    assert by_end.fingerprint != store.fingerprint
    file = tmp_path / "fineweb_train_000001.bin"
    file.write_bytes(file.read_bytes() + b"ab")
    with pytest.raises(UserError, match=r"000001\.bin .* bytes"):
        opened(tmp_path, tokenizer=as_gpt2, add_bos=True, add_eos=False)


def test_documents_between_both_marks(tmp_path: Path) -> None:
    ids = [256, 1, EOS, 2, EOS, 256, 3, EOS, 256, 4]  # as OLMo-core: an end counts only before a beginning
    (tmp_path / "a.npy").write_bytes(np.array(ids, "<u2").tobytes())
    store = opened(tmp_path / "a.npy", format="olmo", add_bos=True)
    assert store.document_starts(0, 10).tolist() == [0, 5, 8]
    assert opened([f"{tmp_path}/a.npy"], format="olmo", add_bos=True).document_starts(1, 9).tolist() == [5, 8]


def test_boundaries_are_those_of_the_metadata_where_a_document_has_no_end(tmp_path: Path) -> None:
    (folder := tmp_path / "in").mkdir()
    np.array([1, EOS, 2, 3, 4, EOS], "<u2").tofile(folder / "token_ids_part_0.npy")
    np.array([1, 1, 0, 1, 1, 1], "?").tofile(folder / "labels_mask_part_0.npy")
    metadata = folder / "token_ids_part_0.csv.gz"
    metadata.write_bytes(gzip.compress(b'0,2,"a, b",x\n2,3\n3,6\n'))
    store = opened(folder, tmp_path / "cache", format="olmo")
    assert store.document_starts(0, 6).tolist() == [0, 2, 3]
    assert store.read_mask(0, 6).tolist() == [True, True, False, True, True, True]
    metadata.write_bytes(gzip.compress(b"0,2\n2,3\n"))
    with pytest.raises(UserError, match=r"csv\.gz .*6 tokens"):
        opened(folder, tmp_path / "cache", format="olmo").document_starts(0, 6)
    (folder / "labels_mask_part_0.npy").write_bytes(b"1")
    with pytest.raises(UserError, match="labels_mask_part_0"):
        opened(folder, tmp_path / "cache", format="olmo")


@pytest.mark.parametrize(("suffix", "form"), [(".bin", "nanogpt"), (".npy", "olmo"), (".ds", "datatrove")])
def test_the_width_of_tokens_is_found_and_a_wrong_one_is_named(suffix: str, form: str, tmp_path: Path) -> None:
    file = tmp_path / f"a{suffix}"
    ids = np.tile([*b"some text", EOS], 100)
    for tokenizer in (Wide(), ByteTokenizer()):
        for dtype in ("<u2", "<u4"):
            file.write_bytes(ids.astype(dtype).tobytes())
            store = opened(file, tokenizer=tokenizer, format=form)
            assert store.read(0, len(store)).tolist() == ids.tolist()
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(UserError, match=r"^data\.path: .* cut"):
        opened(file, format=form)
    file.write_bytes(b"")
    with pytest.raises(UserError, match="no tokens"):
        opened(file, format=form)
    (tmp_path / "b.bin").write_bytes(ids.astype("<u4").tobytes())
    write_indexed(tmp_path / "c", [[ids.tolist()]], "<i4")
    wide, narrow = (np.array(ids, dtype).tobytes() for dtype in ("<u4", "<u2"))
    for name, stated, content, words in (("w", "<u2", wide, "4 bytes"), ("n", "<u4", narrow, "2 bytes")):
        with open(tmp_path / f"{name}.npy", "wb") as out:
            np.save(out, np.frombuffer(content, stated))
        with pytest.raises(UserError, match=words):
            opened(tmp_path / f"{name}.npy")


def test_what_is_no_list_of_tokens_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((2, 3), dtype=np.uint16))
    np.save(tmp_path / "b.npy", np.zeros(3))
    for name in ("a.npy", "b.npy"):
        with pytest.raises(UserError, match=rf"{name} .* array of shape"):
            opened(tmp_path / name)
    write_indexed(tmp_path / "c", of_texts(["an image"]), modes=True)
    index = tmp_path / "c.idx"
    index.write_bytes(index.read_bytes()[:-1] + b"\1")
    with pytest.raises(UserError, match="images"):
        opened(tmp_path / "c")
    shutil.copytree(RECORDED / "datatrove", tmp_path / "d")
    tokens = tmp_path / "d" / "00000_unshuffled.ds"
    tokens.write_bytes(tokens.read_bytes()[:-2])
    with pytest.raises(UserError, match=r"\.ds .* 694 bytes"):
        opened(tokens)
    (tmp_path / "e.npy").write_bytes(np.array([1, 300, EOS], "<u2").tobytes())
    with pytest.raises(UserError, match="300, beyond the vocabulary of 258"):
        opened(tmp_path / "e.npy", format="olmo")
    (tmp_path / "f.npy").write_bytes(np.array([1, 2], "<u2").tobytes())
    with pytest.raises(UserError, match=r"^data\.add_eos: .* eos = false"):
        opened(tmp_path / "f.npy", format="olmo")


def test_a_changed_file_among_others_has_another_fingerprint(tmp_path: Path) -> None:
    own = tmp_path / "own"
    (tmp_path / "a.txt").write_text("own text")
    prepare([f"{tmp_path}/a.txt"], own, tokenizer=ByteTokenizer(), options=Options(bos=False), report=lambda line: None)
    shutil.copytree(RECORDED / "numpy", tmp_path / "n")
    paths = [own, RECORDED / "megatron" / "corpus_text_document", tmp_path / "n"]
    before = opened(paths)
    assert documents_of(before) == [[*b"own text", EOS], *TOKENS, *TOKENS]
    np.save(tmp_path / "n" / "saved.npy", np.concatenate([*TOKENS[:-1], [*b"a1b2c3d4", EOS]]).astype(np.uint16))
    assert opened(paths).fingerprint != before.fingerprint


def test_tokens_at_a_url_are_copied(tmp_path: Path) -> None:
    Flaky.register()
    Flaky.chance, Flaky._force = 0, False
    fs = Flaky()
    for name in ("megatron", "olmo", "datatrove"):
        for path in (RECORDED / name).iterdir():
            fs.pipe_file(f"/bucket/{name}/{path.name}", path.read_bytes())
    fs.pipe_file("/bucket/megatron/other.txt", b"text")
    urls = {"megatron/corpus_text_document": None, "megatron/corpus_text_document.bin": None, "datatrove": None,
            "olmo/*.npy": "olmo", "datatrove/00000_unshuffled.ds": None}  # fmt: skip
    try:
        for url, form in urls.items():
            assert documents_of(opened(f"flaky://bucket/{url}", tmp_path, format=form)) == TOKENS, url
        before = opened("flaky://bucket/olmo/*.npy", tmp_path, format="olmo").fingerprint
        fs.pipe_file("/bucket/olmo/part-0-00000.npy", np.concatenate(TOKENS[::-1]).astype("<u2").tobytes())
        fs.rm("/bucket/olmo/part-0-00000.csv.gz")
        after = opened("flaky://bucket/olmo/*.npy", tmp_path, format="olmo")
        assert documents_of(after) == TOKENS[::-1]
        assert after.fingerprint != before
        with pytest.raises(UserError, match="no such file"):
            opened("flaky://bucket/nothing", tmp_path)
    finally:
        Flaky.store.clear()


@pytest.mark.parametrize("form", ["megatron", "olmo", "nanogpt"])
def test_an_export_holds_the_same_documents(form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = [{"text": bytes(ids[:-1]).decode()} for ids in TOKENS]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    options = {"tokenizer": ByteTokenizer(), "options": Options(bos=False), "workers": 1}
    own = prepare([str(tmp_path / "a.jsonl")], tmp_path / "own", report=lambda line: None, **options)
    words = ["data", "export", str(own.folder), "--format", form, "--out", f"{tmp_path}/out/corpus"]
    assert cli.run(words) == 0
    store = opened(tmp_path / "out", tmp_path, format=form)
    assert documents_of(store) == documents_of(own) == TOKENS
    capsys.readouterr()
    assert cli.run(words) == 2
    assert "--out" in capsys.readouterr().err
    words = ["data", "inspect", f"{tmp_path}/out", "--format", form, "--tokenizer", "bytes", "--sample", "9"]
    assert cli.run(words) == 0
    assert "| a second document<eos>" in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.parametrize(("form", "suffix"), [("megatron", ""), ("nanogpt", ".bin")])
def test_a_run_learns_from_them_as_from_own_tokens(form: str, suffix: str, tiny: TinyRun) -> None:
    """The run on tokens of another program is stopped after two steps, and resumed."""

    def train(name: str, steps: int, *options: str) -> list[float]:
        command = ["train", "--config", str(tiny.toml), f"--job.name={name}", f"--training.steps={steps}", *options]
        assert cli.run(command) == 0
        return tiny.losses(name)

    expected = train("own", 4)
    [index] = (tiny.folder / "outputs/data_cache").rglob("index.json")
    out = tiny.folder / "theirs"
    assert cli.run(["data", "export", str(index.parent), "--format", form, "--out", str(out)]) == 0
    options = f"--data.path={out}{suffix}", f"--data.format={form}"
    train(form, 2, *options)
    assert train(form, 4, *options) == expected
