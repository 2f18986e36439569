"""Arguments of `titanlite parity` and `report`."""

from argparse import Namespace
from pathlib import Path

from titanlite.tools.arguments import Parser, positive_int

DETAILS = """\
Exit code 1 if a variant fails, or differs from its reference by more than it may.
With --where, compare the values of one step on two sides, A and B. It prints the first module and direction (forward,
gradient, update) whose values differ, and a table by block. A side is a layout (2x2, replicas x shards), options of the
config without dashes, both in quotes, the folder of a dump, or transformers. Exit code 1 if they differ."""

PICTURES = (".png", ".pdf", ".svg", ".jpg")
"""Endings of the files that --png writes."""


def add_commands(titanlite: Parser) -> None:
    """Add `parity` and `report`."""
    _add_report(titanlite)
    parser = titanlite.add_command(
        "parity",
        "train a config in every layout and compare losses step by step",
        lambda options: _run(parser, options),
        details=DETAILS,
        example=(
            "parity debug --steps 20 --processes 4\n"
            "parity debug --where 2x2 1x1\n"
            "parity debug --where '2x1 compile.enable=true' 1x1\n"
            "parity debug --where 1x1 transformers\n"
            "parity debug --dump dumps/before\n"
            "parity --where dumps/after dumps/before"
        ),
    )
    parser.add_config()
    parser.add_argument("--steps", metavar="N", type=positive_int, default=20, help="steps to train; default: 20")
    parser.add_argument(
        "--processes", metavar="N", type=positive_int, help="processes of sharded variants; default: one a GPU, else 4"
    )
    parser.add_argument(
        "--tolerance",
        metavar="X",
        type=float,
        help="largest relative difference; default: 1e-5; with --where, 5e-2 in bfloat16",
    )
    parser.add_argument("--only", metavar="TEXT", default="", help="only variants whose name contains TEXT")
    group = parser.add_argument_group("where values differ")
    group.add_argument("--where", metavar=("A", "B"), nargs=2, help="name the first module whose values differ in A")
    group.add_argument(
        "--dump", metavar="FOLDER", help="write the values of one step; torchrun starts it on several processes"
    )
    group.add_argument(
        "--step", metavar="N", type=positive_int, default=1, help="step of --where and --dump; default: 1"
    )


def _add_report(titanlite: Parser) -> None:
    parser = titanlite.add_command(
        "report",
        "write an HTML page about runs, or serve it while they train",
        lambda options: _report(parser, options),
        details="The page needs no network. Several runs are drawn in the same charts.",
        example="report outputs/debug\nreport outputs/first outputs/second --out compare.html --png compare.png\n"
        "report outputs/debug --watch",
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", help="folder of a run, such as outputs/debug")
    parser.add_argument(
        "--out", metavar="FILE", help="page to write; default: report.html in the folder of the first run"
    )
    parser.add_argument(
        "--png", metavar="FILE", help="also draw loss, gradient norm, learning rate and speed for papers"
    )
    parser.add_argument(
        "--watch", action="store_true", help="serve the page on this machine alone, and keep it current"
    )
    parser.add_argument("--port", metavar="N", type=int, default=8765, help="port of --watch; default: 8765; 0: any")


def _report(parser: Parser, options: Namespace) -> None:
    for flag in ("out", "png"):
        name = getattr(options, flag)
        if name and not Path(name).parent.is_dir():
            parser.error(f"--{flag} {name}: there is no folder {Path(name).parent}")
    if options.png and Path(options.png).suffix.lower() not in PICTURES:
        parser.error(f"--png {options.png}: name a file with one of {', '.join(PICTURES)}")
    from titanlite.tools.report.page import main

    main(
        [Path(run) for run in options.runs],
        out=Path(options.out) if options.out else None,
        png=Path(options.png) if options.png else None,
        watch=options.watch,
        port=options.port,
    )


def _run(parser: Parser, options: Namespace) -> None:
    if options.where and options.dump:
        parser.error("--where and --dump exclude each other")
    if options.where:
        from titanlite.tools.report.where_command import where

        where(options.config, options.overrides, options.where, step=options.step, tolerance=options.tolerance)
        return
    if not options.config:
        parser.error("no config: name a TOML file, or one that titanlite ships, for example titanlite parity debug")
    if options.dump:
        from titanlite.tools.report.where_command import dump

        dump(options.config, options.overrides, folder=Path(options.dump), step=options.step)
        return
    from titanlite.tools.report.parity import main

    main(
        options.config,
        options.overrides,
        steps=options.steps,
        processes=options.processes,
        tolerance=1e-5 if options.tolerance is None else options.tolerance,
        only=options.only,
    )
