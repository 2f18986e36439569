"""Arguments of `titanlite plan` and `titanlite calibrate`."""

import os
from argparse import ArgumentTypeError, Namespace
from contextlib import suppress
from math import inf
from pathlib import Path

from titanlite.tools.arguments import Parser, positive_int


def add_commands(titanlite: Parser) -> None:
    """Add `plan` and `calibrate`."""
    parser = titanlite.add_command(
        "plan",
        "predict memory, communication and step time of a config, without a GPU",
        lambda options: _run(parser, options),
        details=(
            "--search finds the fastest layout that fits, --memory-budget-gib the least recomputation, and --suggest\n"
            "options that need less memory."
        ),
        example=(
            "plan llama3_8b --world-size 64 --gpu H100\n"
            "plan my.toml --world-size 64 --gpu H100 --search --apply best.toml\n"
            "plan my.toml --world-size 8 --gpu H100 --memory-budget-gib 70 --apply within_70.toml"
        ),
    )
    parser.add_config()
    parser.add_argument("--world-size", metavar="N", type=positive_int, help="processes (GPUs); required")
    parser.add_argument(
        "--gpu",
        metavar="NAME|FILE.toml",
        help="device, for example H100; cpu for this machine; or a TOML file that describes one (docs/plan.md)",
    )
    parser.add_argument(
        "--gpus-per-node", metavar="N", type=positive_int, default=8, help="devices in each node; default: 8"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--search", action="store_true", help="search for the fastest layout that fits")
    parser.add_argument("--suggest", action="store_true", help="find options that need less memory")
    parser.add_argument(
        "--memory-budget-gib",
        metavar="GIB",
        type=_gib,
        help="choose the recompute policy of each block, so that reserved memory and the CUDA context fit",
    )
    parser.add_argument(
        "--global-batch-size", metavar="B", type=positive_int, help="short for --training.global_batch_size=B"
    )
    parser.add_argument(
        "--apply", metavar="OUT.toml", help="with --search or --memory-budget-gib: write the config with the result"
    )
    calibrate = titanlite.add_command(
        "calibrate",
        "measure this machine's GPU into a file for plan --gpu",
        lambda options: _calibrate(calibrate, options),
        details=(
            "Measure a matmul, attention, a copy, and with several processes their links, for some seconds. A machine\n"
            "without a GPU measures its CPU. Nothing else should run."
        ),
        example=("calibrate h100.toml\nplan llama3_8b --world-size 64 --gpu h100.toml"),
    )
    calibrate.add_argument("out", metavar="OUT.toml", help="file to write; it must not exist")


def _calibrate(parser: Parser, options: Namespace) -> None:
    out = Path(options.out)
    if out.exists():
        parser.error(f"{out} exists; name a new file")
    if not out.parent.is_dir():
        parser.error(f"{out}: there is no folder {out.parent}")
    from titanlite.runtime.process_group import read_ranks
    from titanlite.tools.plan.calibrate import main

    main(out, read_ranks(os.environ))


def _run(parser: Parser, options: Namespace) -> None:
    missing = [] if options.config else ["a config (my.toml, llama3_8b)"]
    missing += [] if options.world_size else ["--world-size N"]
    missing += [] if options.gpu else ["--gpu NAME or FILE.toml"]
    if missing:
        parser.error(f"missing: {', '.join(missing)}; see titanlite plan --help")
    if bool(options.search) + bool(options.memory_budget_gib) + options.suggest > 1:
        parser.error("--search, --memory-budget-gib and --suggest exclude each other")
    if options.apply and not (options.search or options.memory_budget_gib):
        parser.error("--apply writes the result of --search or --memory-budget-gib: add one of them")
    if options.apply and Path(options.apply).exists():
        parser.error(f"--apply: {options.apply} exists; name a new file")
    if options.global_batch_size is not None:
        options.overrides.append(f"--training.global_batch_size={options.global_batch_size}")
    from titanlite.tools.plan.command import main

    main(options.config, options)


def _gib(text: str) -> float:
    with suppress(ValueError):
        if 0 < float(text) < inf:
            return float(text)
    raise ArgumentTypeError(f"expected a number above 0, got {text!r}")
