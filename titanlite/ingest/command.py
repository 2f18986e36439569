"""What `titanlite data` does: make tokens of text, look at them, train tokenizers. Imports no torch."""

import os
from argparse import ArgumentParser, ArgumentTypeError
from functools import partial
from pathlib import Path
from typing import NoReturn

from titanlite.runtime.errors import UserError
from titanlite.runtime.nearest import did_you_mean


def main(arguments: list[str]) -> None:
    """`titanlite data NAME ...`, where NAME is one of the three below."""
    name, *rest = arguments
    parser = ArgumentParser(add_help=False, allow_abbrev=False)

    def refuse(message: str) -> NoReturn:
        wrong = message.partition("unrecognized arguments: ")[2].split("=")[0].split(" ")[0]
        hint = did_you_mean(wrong, parser._option_string_actions)
        raise UserError(f"titanlite data {name}: {message}{hint}")

    parser.error = refuse
    {"prepare": _prepare, "inspect": _inspect, "tokenizer": _tokenizer}[name](parser, rest)


def _prepare(parser: ArgumentParser, arguments: list[str]) -> None:
    parser.add_argument("inputs", metavar="INPUT", nargs="+")
    parser.add_argument("--out", metavar="DIR", required=True)
    parser.add_argument("--tokenizer", metavar="T", required=True)
    parser.add_argument("--workers", metavar="N", type=_count)
    parser.add_argument("--text-field", metavar="F", default="text")
    parser.add_argument("--on-error", choices=("stop", "skip"), default="stop")
    parser.add_argument("--no-bos", action="store_true")
    parser.add_argument("--no-eos", action="store_true")
    parser.add_argument("--shard-tokens", metavar="N", type=_count)
    options = parser.parse_intermixed_args(arguments)
    from titanlite.data.tokenizer import load_tokenizer
    from titanlite.data.tokens import SHARD_TOKENS
    from titanlite.ingest.encoding import Options
    from titanlite.ingest.prepare import prepare

    prepare(
        options.inputs,
        _folder(options.out),
        tokenizer=load_tokenizer(options.tokenizer),
        options=Options(
            text_field=options.text_field,
            bos=not options.no_bos,
            eos=not options.no_eos,
            shard_tokens=options.shard_tokens or SHARD_TOKENS,
        ),
        on_error=options.on_error,
        workers=options.workers,
        say=partial(print, flush=True),
    )


def _inspect(parser: ArgumentParser, arguments: list[str]) -> None:
    parser.add_argument("folder", metavar="DIR")
    parser.add_argument("--sample", metavar="N", type=int, default=0)
    parser.add_argument("--seed", metavar="N", type=int, default=0)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--tokenizer", metavar="T")
    options = parser.parse_args(arguments)
    from titanlite.ingest.inspect import inspect

    inspect(
        Path(options.folder).expanduser(),
        sample=options.sample,
        seed=options.seed,
        checksums=not options.quick,
        tokenizer_name=options.tokenizer,
    )


def _tokenizer(parser: ArgumentParser, arguments: list[str]) -> None:
    parser.add_argument("inputs", metavar="INPUT", nargs="+")
    parser.add_argument("--out", metavar="DIR", required=True)
    parser.add_argument("--vocab-size", metavar="N", type=_count, required=True)
    parser.add_argument("--text-field", metavar="F", default="text")
    options = parser.parse_intermixed_args(arguments)
    from titanlite.ingest.bpe import train_bpe
    from titanlite.ingest.documents import read_texts

    out = _folder(options.out)
    size = train_bpe(read_texts(options.inputs, text_field=options.text_field), vocab_size=options.vocab_size, out=out)
    print(f"{out}: {options.vocab_size:,} tokens, trained on {size:,} bytes of text")


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"expected a number of at least 1, got {text!r}")
    return int(text)


def _folder(name: str) -> Path:
    if "://" in name:
        raise UserError(f"{name}: tokens are written to a local folder, which can be copied then")
    return Path(os.path.abspath(os.path.expanduser(name)))
