"""Train a byte-level BPE, and write it in both forms in use: tiktoken's ranks, and the tokenizer.json of Hugging Face.

Both give the same ids for every text. tiktoken always merges the leftmost of the neighbours whose joint bytes have the
lowest rank, whatever pair they are; tokenizer.json lists pairs. But a token can come of one pair only, in any word:
until something is merged across its ends, what is merged inside it depends on its own bytes alone. So merging the bytes
of each token finds its pair (`_merges`), and with these pairs both libraries do the same steps.
"""

import json
import os
import shutil
from base64 import b64encode
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from titanlite.data.pieces import pieces
from titanlite.data.tokenizer import LLAMA3_SPECIAL_TOKENS, LLAMA3_SPLIT, need_tokenizers
from titanlite.runtime.errors import UserError
from titanlite.tools.arguments import Count, Inputs
from titanlite.tools.ingest.documents import read_texts
from titanlite.tools.ingest.inputs import local_folder

if TYPE_CHECKING:
    from tokenizers import Tokenizer as FastTokenizer
    from tokenizers.models import Model

LEAST = 256 + len(LLAMA3_SPECIAL_TOKENS)
SEEN_TWICE = 2
"""A pair that stands in the text once teaches nothing."""


def train_tokenizer(inputs: Inputs, *, out: str, vocab_size: Count, text_field: str = "text") -> None:
    """Train a byte-level BPE tokenizer.

    Args:
        out (DIR): folder to write the tokenizer to
        vocab_size: number of tokens
        text_field (F): field with the text in JSON lines and tables

    Example:
        'corpus/*.jsonl' --out tokenizers/mine --vocab-size 32000
    """
    folder = local_folder(out)
    size = train_bpe(read_texts([*inputs], text_field=text_field), vocab_size=vocab_size, out=folder)
    print(f"{folder}: {vocab_size:,} tokens, trained on {size:,} bytes of text")


def train_bpe(texts: Iterable[str], *, vocab_size: int, out: Path) -> int:
    """Write the folder `out` with tokenizer.model, tokenizer.json and tokenizer_config.json, all of them or nothing.

    The same texts, in any order, give the same files. The memory that is taken grows with the different words in the
    texts, not with their length: they are shown to the trainer in the pieces in which they would be encoded.

    Args:
        vocab_size: of everything: the 256 bytes, the merged tokens, and the 256 special tokens of Llama 3.1 after them.

    Returns:
        How many bytes of text it was trained on.

    Raises:
        UserError: vocab_size is less than 512, or more than the texts give; `out` exists; tokenizers is not installed.
    """
    need_tokenizers("titanlite data tokenizer")
    if vocab_size < LEAST:
        raise UserError(f"a vocabulary has at least {LEAST} tokens: 256 bytes and {LEAST - 256} special tokens")
    _refuse_to_overwrite(out)
    counted = _Counted(texts)
    ranks = _train(counted, vocab_size - len(LLAMA3_SPECIAL_TOKENS))
    found = len(ranks) + len(LLAMA3_SPECIAL_TOKENS)
    if found < vocab_size:
        raise UserError(
            f"{counted.bytes:,} bytes of text give a vocabulary of {found:,} tokens, not {vocab_size:,}: ask for less, "
            "or give more text"
        )
    write_bpe(ranks, out)
    return counted.bytes


class _Counted:
    """The pieces of texts, counting bytes."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = texts
        self.bytes = 0

    def __iter__(self) -> Iterator[str]:
        for text in self.texts:
            for piece in pieces(text):
                self.bytes += len(piece.encode())
                yield piece


def _train(texts: Iterable[str], count: int) -> list[bytes]:
    """Return at most `count` tokens, in the order of their ranks; the bytes come first."""
    from tokenizers import models, trainers

    tokenizer = _empty(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=count, min_frequency=SEEN_TWICE, initial_alphabet=sorted(_byte_characters()), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    byte_of = {character: i for i, character in enumerate(_byte_characters())}
    vocab = tokenizer.get_vocab()
    return [bytes(byte_of[character] for character in token) for token in sorted(vocab, key=vocab.__getitem__)]


def _empty(model: "Model") -> "FastTokenizer":
    """A tokenizer that splits text as Llama 3 does, and writes bytes as GPT-2 does."""
    from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers

    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _byte_characters() -> list[str]:
    """Return the character that GPT-2 writes for each byte: itself where it is visible in Latin-1, else one from U+0100
    on."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(i if i in visible else next(others)) for i in range(256)]


def _merges(ranks: dict[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """The pair that each token comes of, in the order of the ranks. A token that merging never reaches has none: it is
    found only where it is a whole word (`ignore_merges`)."""
    for token in sorted(ranks, key=ranks.__getitem__):
        parts = [token[i : i + 1] for i in range(len(token))]
        while len(parts) > 2:
            joint = [ranks.get(left + right, len(ranks)) for left, right in pairwise(parts)]
            if (best := min(joint)) == len(ranks):
                break
            at = joint.index(best)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        if len(parts) == 2:
            yield parts[0], parts[1]


def write_bpe(ranks: list[bytes], out: Path) -> None:
    """Write both forms of a byte-level BPE, as `train_bpe` does.

    Args:
        ranks: the tokens, all bytes among them, in the order in which merging prefers them.

    Raises:
        UserError: `out` exists.
    """
    _refuse_to_overwrite(out)
    staging = out.with_name(f".{out.name}.partial-{os.getpid()}")
    staging.mkdir(parents=True)
    try:
        lines = [f"{b64encode(token).decode()} {rank}\n" for rank, token in enumerate(ranks)]
        (staging / "tokenizer.model").write_text("".join(lines))
        _as_fast(ranks).save(str(staging / "tokenizer.json"))
        bos, eos, *_ = LLAMA3_SPECIAL_TOKENS
        about = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": bos, "eos_token": eos}
        about |= {"clean_up_tokenization_spaces": False}  # changes decoded text
        (staging / "tokenizer_config.json").write_text(json.dumps(about, indent=2) + "\n")
        staging.rename(out)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _as_fast(ranks: list[bytes]) -> "FastTokenizer":
    from tokenizers import AddedToken, models

    characters = _byte_characters()

    def written(token: bytes) -> str:
        return "".join(characters[byte] for byte in token)

    order = {token: rank for rank, token in enumerate(ranks)}
    tokenizer = _empty(
        models.BPE(
            vocab={written(token): rank for token, rank in order.items()},
            merges=[(written(left), written(right)) for left, right in _merges(order)],
            ignore_merges=True,
        )
    )
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in LLAMA3_SPECIAL_TOKENS])
    return tokenizer


def _refuse_to_overwrite(out: Path) -> None:
    if os.path.lexists(out) and not (out.is_dir() and not any(out.iterdir())):
        raise UserError(f"{out} exists")
