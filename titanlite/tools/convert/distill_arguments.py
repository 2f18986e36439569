"""Arguments of `titanlite distill`."""

from argparse import Namespace

from titanlite.tools.arguments import Parser, positive_int

DETAILS = """\
Runs teacher.path over all of the training data once, and writes to the folder teacher.cache. For each token it keeps
the K most probable next tokens with the logarithms of their probabilities, and the probability of all others
together. Training with the same config reads them, and the teacher is not in memory. The same command resumes after an
interruption, and adds sources that the data has got since.
Several processes: torchrun --nproc_per_node N -m titanlite ...
"""


def add_commands(titanlite: Parser) -> None:
    """Add `distill cache`."""
    group = titanlite.add_command("distill", "write the output of a teacher for the training data")
    parser = group.add_command(
        "cache",
        "run the teacher once over the training data, and keep its most probable tokens",
        _cache,
        details=DETAILS.rstrip(),
        example="distill cache distill_example --teacher.cache=outputs/teacher_cache --top-k 64",
    )
    parser.add_config()
    parser.add_argument(
        "--top-k", metavar="K", type=positive_int, default=None, help="tokens to keep of each position; default: 64"
    )
    parser.add_argument(
        "--dtype",
        choices=["float16", "float32"],
        default="float16",
        help="of the logarithms of probabilities; default: float16",
    )
    parser.add_argument(
        "--batch-size", metavar="B", type=positive_int, default=4, help="sequences computed at once; default: 4"
    )


def _cache(options: Namespace) -> None:
    from titanlite.data.teacher_entries import TOP_K
    from titanlite.tools.convert.teacher_cache import main
    from titanlite.tools.ingest.prepare import prepare_text

    if not options.config:
        from titanlite.runtime.errors import UserError

        raise UserError("titanlite distill cache: name a config, with [teacher] and [distill]")
    main(
        options.config,
        options.overrides,
        top_k=options.top_k or TOP_K,
        dtype=options.dtype,
        batch_size=options.batch_size,
        prepare_text=prepare_text,
    )
