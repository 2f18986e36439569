"""Arguments of `titanlite parity`."""

from argparse import Namespace

from titanlite.runtime.arguments import Parser, positive_int


def add_commands(titanlite: Parser) -> None:
    """Add `parity`."""
    parser = titanlite.add_command(
        "parity",
        "train a config in every layout and compare losses step by step",
        lambda options: _run(parser, options),
        details="Exit code 1 if a variant fails, or differs from its reference by more than it may.",
        example="parity debug --steps 20 --processes 4",
    )
    parser.add_config()
    parser.add_argument("--steps", metavar="N", type=positive_int, default=20, help="steps to train; default: 20")
    parser.add_argument(
        "--processes", metavar="N", type=positive_int, help="processes of sharded variants; default: one a GPU, else 4"
    )
    parser.add_argument(
        "--tolerance", metavar="X", type=float, default=1e-5, help="largest relative loss difference; default: 1e-5"
    )
    parser.add_argument("--only", metavar="TEXT", default="", help="only variants whose name contains TEXT")


def _run(parser: Parser, options: Namespace) -> None:
    if not options.config:
        parser.error("no config: name a TOML file, or one that titanlite ships, for example titanlite parity debug")
    from titanlite.report.parity import main

    main(
        options.config,
        options.overrides,
        steps=options.steps,
        processes=options.processes,
        tolerance=options.tolerance,
        only=options.only,
    )
