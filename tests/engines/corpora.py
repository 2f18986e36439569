# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownMemberType=false
"""Write the documents of `DOCUMENTS` with the programs whose tokens titanlite reads.

    python -m tests.engines.corpora tests/data/tokens      renew the recorded files that CI reads

nanoGPT, modded-nanogpt and llm.c are no packages: their files are written as their scripts write them.
"""

import sys
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path

import numpy as np

EOS = 257
DOCUMENTS = ["one", "a second document", "ü", "x" * 300, "in\ntwo lines", "the last"]
TOKENS = [[*text.encode(), EOS] for text in DOCUMENTS]


def megatron(folder: Path) -> None:
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(folder / "corpus_text_document.bin"), dtype=np.uint16)
    for ids in TOKENS:
        builder.add_document(torch.tensor(ids), [2, len(ids) - 2])  # a document of two sequences
    builder.finalize(str(folder / "corpus_text_document.idx"))


def datatrove(folder: Path) -> None:
    from datatrove.pipeline.tokens.tokenizer import TokenizedFile

    options = {"tokenizer_name_or_path": "bytes", "save_final_metadata": True, "save_loss_metadata": True}
    file = TokenizedFile(str(folder), "00000_unshuffled.ds", **options)
    for ids in TOKENS:
        file.write(ids, np.arange(len(ids)) > 0)  # the first token does not count in the loss
    file.close()


def olmo(folder: Path) -> None:
    """With dolma, of which only the writer is imported: the rest needs fasttext, nltk and others."""
    for name in ("dolma", "dolma.core", "dolma.tokenizer"):
        if name not in sys.modules:
            spec = ModuleSpec(name, None, is_package=True)
            spec.submodule_search_locations = [
                str(path) for place in sys.path if (path := Path(place, *name.split("."))).is_dir()
            ]
            sys.modules[name] = module_from_spec(spec)
    from dolma.tokenizer.data_types import TokenizerOutput
    from dolma.tokenizer.memmap_writer import MemmapWriter

    with MemmapWriter(str(folder / "part-0-00000.npy"), np.dtype("uint16"), max_tokens=10_000) as writer:
        outputs = [TokenizerOutput.from_tokens(str(i), "a.jsonl", i, ids) for i, ids in enumerate(TOKENS)]
        assert not writer.write_many(outputs)


def numpy(folder: Path) -> None:
    np.save(folder / "saved.npy", np.concatenate(TOKENS).astype(np.uint16))


def nanogpt(folder: Path) -> None:
    """As data/openwebtext/prepare.py of nanoGPT."""
    np.concatenate(TOKENS).astype(np.uint16).tofile(folder / "train.bin")


def llm_c(folder: Path) -> None:
    """As write_datafile of dev/data/data_common.py of llm.c, and modded-nanogpt: the mark is before each document, and
    a document goes on in the next file."""
    stream = np.concatenate([[EOS, *ids[:-1]] for ids in TOKENS]).astype(np.uint16)
    for number, part in enumerate((stream[:30], stream[30:])):
        header = np.zeros(256, dtype=np.int32)
        header[:3] = 20240520, 1, len(part)
        with open(folder / f"fineweb_train_{number:06d}.bin", "wb") as file:
            file.write(header.tobytes())
            file.write(part.tobytes())


CORPORA = {writer.__name__: writer for writer in (megatron, datatrove, olmo, numpy, nanogpt, llm_c)}


if __name__ == "__main__":
    for name, write in CORPORA.items():
        (folder := Path(sys.argv[1], name)).mkdir(parents=True, exist_ok=True)
        write(folder)
