"""Arguments of `titanlite profile`."""

from argparse import Namespace

from titanlite.tools.arguments import Parser, non_negative_int, positive_int


def add_commands(titanlite: Parser) -> None:
    """Add `profile`."""
    parser = titanlite.add_command(
        "profile",
        "print where the time of a profiled step went, beside the plan",
        _run,
        details=(
            "Read a trace that training with --profiling.enable_profiling wrote: compute, collectives and how much of\n"
            "them is hidden, idle gaps, operators. docs/see_the_run.md explains each line."
        ),
        example="profile outputs/debug\nprofile outputs/llama3_8b --step 200 --rank 7 --gpu H100",
    )
    parser.add_argument("folder", metavar="RUN", help="folder of the run")
    parser.add_argument("--step", metavar="N", type=positive_int, help="last step of the window; default: the newest")
    parser.add_argument("--rank", metavar="R", type=non_negative_int, default=0, help="rank; default: 0")
    parser.add_argument(
        "--gpu",
        metavar="NAME|FILE.toml",
        help="hardware of the plan, as for titanlite plan; default: that of the trace",
    )
    parser.add_argument(
        "--gpus-per-node", metavar="N", type=positive_int, help="for the plan; default: the GPUs that the rank saw"
    )
    parser.add_argument(
        "--config",
        metavar="CONFIG",
        help="config of the run, for the plan of one whose own names code; default: its own",
    )
    parser.add_argument("--no-plan", action="store_true", help="print what was measured only, which is faster")
    parser.add_argument("--top", metavar="N", type=positive_int, default=10, help="operators to print; default: 10")
    parser.add_argument("--json", action="store_true", help="print JSON, in seconds of the whole window")


def _run(options: Namespace) -> None:
    from titanlite.tools.report.profile_command import main

    main(
        options.folder,
        step=options.step,
        rank=options.rank,
        config=options.config,
        gpu=options.gpu,
        gpus_per_node=options.gpus_per_node,
        with_plan=not options.no_plan,
        top=options.top,
        as_json=options.json,
    )
