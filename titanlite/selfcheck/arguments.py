"""Options of `titanlite check` for the machines that a run is for."""

from argparse import ArgumentParser

DETAILS = """\
Prepared data is opened, and one step of the model is traced without memory and without a GPU, as titanlite plan does.
The number of processes is taken from the environment variable WORLD_SIZE; default: 1.

With --here, the config is checked as training does it when it starts: the memory and the disk of this machine must
suffice too, and no step is traced.

With --machines, the processes test what the run needs, in a minute or two. They test collectives and their bandwidths,
the checkpoint folder, clocks, disk, memory, versions and devices. Exit code 2 if a test fails. ./run_train.sh check
does it on all processes of a job."""


def add_tests(parser: ArgumentParser) -> None:
    """Add `--here` and `--machines` to a parser of `check`."""
    parser.add_argument("--here", action="store_true", help="the run starts here: judge this machine's memory and disk")
    parser.add_argument("--machines", action="store_true", help="test the machines too, on all processes of the job")
