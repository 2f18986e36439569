"""Arguments of `titanlite data`: turn text into tokens, inspect them, train tokenizers."""

import os
from argparse import Namespace
from functools import partial
from pathlib import Path

from titanlite.runtime.errors import UserError
from titanlite.runtime.files import why_not_writable
from titanlite.tools.arguments import Parser, non_negative_int, positive_int

INPUTS = """\
INPUT is a file of text or JSON lines (also .gz or .zst), a .parquet file, or a folder or glob of such files. It can
also be a dataset that Hugging Face's save_to_disk wrote, hf://NAME[:CONFIG][:SPLIT], or stdlib:// (stdlib://train,
stdlib://validation).
"""
TOKENIZER = "bytes, the name of a tokenizer that titanlite ships, or a path, as data.tokenizer"


def add_commands(titanlite: Parser) -> None:
    """Add `data prepare|inspect|tokenizer`."""
    group = titanlite.add_command("data", "prepare text, inspect token shards, train tokenizers")
    _add_prepare(group)
    _add_inspect(group)
    _add_tokenizer(group)


def _add_prepare(group: Parser) -> None:
    parser = group.add_command(
        "prepare",
        "turn text into token shards, which data.path can name",
        _prepare,
        details=INPUTS + "The same command resumes after an interruption.",
        example="data prepare 'corpus/*.jsonl' --out tokens/corpus --tokenizer llama3/tokenizer.model",
    )
    parser.add_argument("inputs", metavar="INPUT", nargs="+", help="text to read, see above")
    parser.add_argument("--out", metavar="DIR", required=True, help="folder to write token shards to")
    parser.add_argument("--tokenizer", metavar="T", required=True, help=TOKENIZER)
    parser.add_argument("--workers", metavar="N", type=positive_int, help="processes; default: the cores")
    parser.add_argument(
        "--text-field", metavar="F", help="field of JSON lines and tables to read; default: text, of chats messages"
    )
    parser.add_argument(
        "--on-error", choices=("stop", "skip"), default="stop", help="what to do with unreadable documents"
    )
    parser.add_argument("--no-bos", action="store_true", help="no beginning-of-document tokens")
    parser.add_argument("--no-eos", action="store_true", help="no end-of-document tokens")
    parser.add_argument(
        "--chat",
        action="store_true",
        help='documents are chats: JSON lines with a field "messages" of {"role": ..., "content": ...}, and maybe '
        '"tools". The chat template of the tokenizer renders them, and answers count in the loss',
    )
    parser.add_argument("--chat-template", metavar="FILE", help="template to use; default: that of the tokenizer")
    parser.add_argument(
        "--loss-on",
        choices=("assistant", "all"),
        help="tokens of chats that count in the loss; default: assistant, as the template marks it",
    )
    parser.add_argument("--shard-tokens", metavar="N", type=positive_int, help="tokens in a shard file")


def _prepare(options: Namespace) -> None:
    from titanlite.data.tokenizer import load_tokenizer
    from titanlite.tools.ingest.chat import chat_options
    from titanlite.tools.ingest.encoding import options_for
    from titanlite.tools.ingest.prepare import prepare
    from titanlite.tools.ingest.token_writer import SHARD_TOKENS

    if not options.chat and (options.chat_template or options.loss_on):
        raise UserError(f"--{'chat-template' if options.chat_template else 'loss-on'} is for chats: add --chat")
    tokenizer = load_tokenizer(options.tokenizer)
    template = Path(options.chat_template).expanduser() if options.chat_template else None
    chat = chat_options(tokenizer, template=template, loss_on=options.loss_on or "assistant") if options.chat else None
    prepare(
        options.inputs,
        _folder(options.out),
        tokenizer=tokenizer,
        options=options_for(
            tokenizer,
            chat=chat,
            text_field=options.text_field,
            bos=not options.no_bos,
            eos=not options.no_eos,
            shard_tokens=options.shard_tokens or SHARD_TOKENS,
        ),
        on_error=options.on_error,
        workers=options.workers,
        report=partial(print, flush=True),
    )


def _add_inspect(group: Parser) -> None:
    parser = group.add_command(
        "inspect",
        "print statistics and samples of token shards, and verify their checksums",
        _inspect,
        example="data inspect tokens/corpus --sample 3",
    )
    parser.add_argument("folder", metavar="DIR", help="folder that `data prepare` wrote")
    parser.add_argument(
        "--sample", metavar="N", type=non_negative_int, default=0, help="print N random documents; default: 0"
    )
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="seed of that choice; default: 0")
    parser.add_argument("--quick", action="store_true", help="do not verify checksums")
    parser.add_argument("--tokenizer", metavar="T", help="tokenizer that decodes samples; default: the one of the data")


def _inspect(options: Namespace) -> None:
    from titanlite.tools.ingest.inspect import inspect

    inspect(
        Path(options.folder).expanduser(),
        sample=options.sample,
        seed=options.seed,
        checksums=not options.quick,
        tokenizer_name=options.tokenizer,
    )


def _add_tokenizer(group: Parser) -> None:
    parser = group.add_command(
        "tokenizer",
        "train a byte-level BPE tokenizer",
        _tokenizer,
        details=INPUTS.rstrip(),
        example="data tokenizer 'corpus/*.jsonl' --out tokenizers/mine --vocab-size 32000",
    )
    parser.add_argument("inputs", metavar="INPUT", nargs="+", help="text to train on, see above")
    parser.add_argument("--out", metavar="DIR", required=True, help="folder to write the tokenizer to")
    parser.add_argument("--vocab-size", metavar="N", type=positive_int, required=True, help="number of tokens")
    parser.add_argument(
        "--text-field", metavar="F", default="text", help="field with the text in JSON lines and tables; default: text"
    )


def _tokenizer(options: Namespace) -> None:
    from titanlite.tools.ingest.bpe import train_bpe
    from titanlite.tools.ingest.documents import read_texts

    out = _folder(options.out)
    size = train_bpe(read_texts(options.inputs, text_field=options.text_field), vocab_size=options.vocab_size, out=out)
    print(f"{out}: {options.vocab_size:,} tokens, trained on {size:,} bytes of text")


def _folder(name: str) -> Path:
    if "://" in name:
        raise UserError(f"{name}: tokens are written to a local folder; name one, and copy it afterwards")
    if problem := why_not_writable(name):
        raise UserError(f"--out: {problem}")
    return Path(os.path.abspath(os.path.expanduser(name)))
