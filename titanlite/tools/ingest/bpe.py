"""Train a byte-level BPE, and write it as the tokenizer.json of Hugging Face. It splits text as Llama 3 does."""

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from titanlite.data.pieces import pieces
from titanlite.data.tokenizer import LLAMA3_SPECIAL_TOKENS, LLAMA3_SPLIT, need_tokenizers
from titanlite.runtime.errors import UserError
from titanlite.runtime.files import check_out
from titanlite.tools.arguments import Count, Inputs
from titanlite.tools.ingest.documents import read_texts
from titanlite.tools.ingest.inputs import local_folder

if TYPE_CHECKING:
    from tokenizers import Tokenizer as FastTokenizer

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
    train_bpe(read_texts([*inputs], text_field=text_field), vocab_size=vocab_size, out=folder)
    print(f"{folder}: {vocab_size:,} tokens")


def train_bpe(texts: Iterable[str], *, vocab_size: int, out: Path) -> None:
    """Write the folder `out` with tokenizer.json and tokenizer_config.json, both or nothing.

    The same texts, in any order, give the same files. The memory that is taken grows with the different words in the
    texts, not with their length: they are shown to the trainer in the pieces in which they would be encoded.

    Args:
        vocab_size: of everything: the 256 bytes, the merged tokens, and the 256 special tokens of Llama 3.1 after them.

    Raises:
        UserError: vocab_size is less than 512, or more than the texts give; `out` exists; tokenizers is not installed.
    """
    need_tokenizers("titanlite data tokenizer")
    if vocab_size < LEAST:
        raise UserError(f"a vocabulary has at least {LEAST} tokens: 256 bytes and {LEAST - 256} special tokens")
    check_out(out)
    tokenizer = _train((piece for text in texts for piece in pieces(text)), vocab_size - len(LLAMA3_SPECIAL_TOKENS))
    if (found := tokenizer.get_vocab_size()) < vocab_size:
        raise UserError(
            f"the text gives a vocabulary of {found:,} tokens, not {vocab_size:,}: ask for less, or give more text"
        )
    bos, eos, *_ = LLAMA3_SPECIAL_TOKENS
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": bos, "eos_token": eos}
    about |= {"clean_up_tokenization_spaces": False}  # the clean-up would change decoded text
    staging = out.with_name(f".{out.name}.partial-{os.getpid()}")
    staging.mkdir(parents=True)
    try:
        tokenizer.save(str(staging / "tokenizer.json"))
        (staging / "tokenizer_config.json").write_text(json.dumps(about, indent=2) + "\n")
        staging.rename(out)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _train(texts: Iterable[str], count: int) -> "FastTokenizer":
    """Return a tokenizer of at most `count` tokens, the bytes first, and the special tokens."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=count,
        min_frequency=SEEN_TWICE,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in LLAMA3_SPECIAL_TOKENS])
    return tokenizer
