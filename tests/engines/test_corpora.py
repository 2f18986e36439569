"""Tokens that the real programs write, and what their own readers make of them. README.md says how to install them."""

from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from tests.engines.corpora import CORPORA, DOCUMENTS, EOS, TOKENS
from titanlite.data.packing import Stream
from titanlite.data.sources import open_tokens
from titanlite.data.tokenizer import ByteTokenizer
from titanlite.data.tokens import TokenStore
from titanlite.schema import Data
from titanlite.tools import cli

pytestmark = pytest.mark.engines


def skip_without(package: str) -> None:
    if find_spec(package) is None:  # an import would need all that the package depends on
        pytest.skip(f"needs {package}")


def opened(path: Path, **options: object) -> TokenStore:
    data = Data.model_validate({"add_bos": False, **options})
    return open_tokens(str(path), data=data, tokenizer=ByteTokenizer(), cache_folder=path.parent / ".cache")


def documents_of(store: TokenStore) -> list[list[int]]:
    starts = store.document_starts(0, len(store))
    return [part.tolist() for part in np.split(store.read(0, len(store)), starts[1:])]


@pytest.mark.parametrize("name", [name for name in CORPORA if name not in ("nanogpt", "llm_c")])
def test_recorded_files_are_those_that_the_program_writes(name: str, tmp_path: Path) -> None:
    recorded = Path(__file__).parents[1] / "data" / "tokens" / name
    skip_without({"olmo": "dolma"}.get(name, name))
    CORPORA[name](tmp_path)
    written = {path.name: path.read_bytes() for path in tmp_path.iterdir() if not path.name.endswith(".gz")}
    assert written == {path.name: path.read_bytes() for path in recorded.iterdir() if not path.name.endswith(".gz")}


def test_megatron_reads_the_same_documents(tmp_path: Path) -> None:
    module = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    CORPORA["megatron"](tmp_path)
    theirs = module.IndexedDataset(str(tmp_path / "corpus_text_document"))
    bounds = theirs.document_indices.tolist()
    documents = [np.concatenate([theirs[i] for i in range(*pair)]).tolist() for pair in pairwise(bounds)]
    assert documents == documents_of(opened(tmp_path / "corpus_text_document")) == TOKENS
    assert cli.run(["data", "export", f"{tmp_path}/corpus_text_document", "--tokenizer", "bytes", "--format",
                    "megatron", "--out", f"{tmp_path}/again"]) == 0  # fmt: skip
    again = module.IndexedDataset(str(tmp_path / "again"))
    assert [again[i].tolist() for i in range(len(again))] == TOKENS


def test_datatrove_reads_the_same_sequences_and_positions(tmp_path: Path) -> None:
    module = pytest.importorskip("datatrove.utils.dataset")
    CORPORA["datatrove"](tmp_path)
    file = tmp_path / "00000_unshuffled.ds"
    store = opened(file)
    assert documents_of(store) == TOKENS
    assert store.read_mask(0, len(store)).tolist() == [i > 0 for ids in TOKENS for i in range(len(ids))]
    theirs = module.DatatroveFileDataset(str(file), seq_len=15, token_size=2, return_positions=True)
    ours = Stream(store, seq_len=16, document_mask=True)
    for number in range(min(len(theirs), len(ours))):
        sequence = ours.read(number)
        assert theirs[number]["input_ids"].tolist() == sequence.tokens.tolist()
        starts = np.flatnonzero(theirs[number]["positions"].numpy() == 0)
        assert starts.tolist() == sequence.starts.tolist()


def test_olmo_core_finds_the_same_documents(tmp_path: Path) -> None:
    skip_without("dolma")
    module = pytest.importorskip("olmo_core.data.utils")
    CORPORA["olmo"](tmp_path)
    file = tmp_path / "part-0-00000.npy"
    stated = list(module.iter_document_indices(file, use_array_if_local=False, dtype=np.uint16))
    store = opened(file, format="olmo")
    assert store.document_starts(0, len(store)).tolist() == [start for start, _ in stated]
    (tmp_path / "part-0-00000.csv.gz").rename(tmp_path / "elsewhere")
    by_eos = list(module.iter_document_indices(file, eos_token_id=EOS, dtype=np.uint16))
    store = opened(file, format="olmo")
    assert store.document_starts(0, len(store)).tolist() == [start for start, _ in by_eos]
    assert documents_of(store) == TOKENS
    for form in ("olmo", "nanogpt"):
        words = ["data", "export", str(file), "--source-format", "olmo", "--tokenizer", "bytes", "--format", form]
        assert cli.run([*words, "--out", f"{tmp_path}/again"]) == 0
    stated = list(module.iter_document_indices(tmp_path / "again.npy", use_array_if_local=False, dtype=np.uint16))
    assert [end - start for start, end in stated] == [len(ids) for ids in TOKENS]
    assert np.memmap(tmp_path / "again.bin", dtype=np.uint16).tolist() == np.concatenate(TOKENS).tolist()
    assert len(DOCUMENTS) == len(stated)
