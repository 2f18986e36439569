"""Arguments of `titanlite evaluate`."""

from argparse import Namespace

from titanlite.tools.arguments import Parser, non_negative_int, positive_int
from titanlite.tools.convert.arguments import CHECKPOINT, add_source

DETAILS = """\
The loss is in nats a token, and bits per byte compares models with different tokenizers. Sequence length, packing,
document mask and dtype are those of the run, so that the values are those of its validation. Text is tokenized into a
cache on first use.
"""
EXAMPLE = """\
evaluate outputs/debug --data stdlib:// --data mine='texts/*.jsonl'
evaluate outputs/debug --json"""


def add_commands(titanlite: Parser) -> None:
    """Add `evaluate`."""
    parser = titanlite.add_command(
        "evaluate",
        "measure the loss of a checkpoint on any data",
        _run,
        details=DETAILS.rstrip(),
        example=EXAMPLE,
    )
    add_source(parser, about=f"{CHECKPOINT}, or a Hugging Face folder")
    parser.add_argument(
        "--data",
        metavar="[NAME=]PATH",
        action="append",
        default=[],
        help="a source, as data.path: text or prepared tokens; repeat it for more; default: the run's [validation]",
    )
    parser.add_argument(
        "--text-field", metavar="NAME", default=None, help="field of a record that has the text; default: the run's"
    )
    parser.add_argument(
        "--sequences",
        metavar="N",
        type=non_negative_int,
        default=None,
        help="sequences of each source, always the same ones; 0 takes all; default: validation.sequences (256)",
    )
    parser.add_argument(
        "--seq-len", metavar="L", type=positive_int, default=None, help="tokens of a sequence; default: the run's"
    )
    parser.add_argument(
        "--batch-size", metavar="B", type=positive_int, default=4, help="sequences computed at once; default: 4"
    )
    parser.add_argument(
        "--dtype", choices=["bfloat16", "float32"], default=None, help="of weights and matmuls; default: the run's"
    )
    parser.add_argument(
        "--cache-folder", metavar="DIR", default=None, help="for the tokens made of text; default: the run's"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def _run(options: Namespace) -> None:
    from titanlite.tools.convert.evaluate import main
    from titanlite.tools.ingest.prepare import prepare_text

    names = "config", "model_file", "tokenizer", "data", "text_field", "sequences", "seq_len", "batch_size", "dtype"
    names = *names, "cache_folder"
    chosen = {name: getattr(options, name) for name in names}
    main(options.path, **chosen, as_json=options.json, prepare_text=prepare_text)
