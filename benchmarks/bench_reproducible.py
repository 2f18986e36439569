"""What `debug.reproducible_layouts` costs: a step with it against the same step without.

    python benchmarks/bench_reproducible.py [--processes 2] [--sequences 1] [--parts 2] [--runs 3] [--section.key=value]

Model, batch and turns are those of bench_step.py. Three contenders take turns: the option, the same micro-batches
without it, and one micro-batch per process, which is as large as it can be. Prints medians, and the ratios
option / other of turns that follow each other. With `--parts`, the option computes sequences in parts
(`debug.reproducible_context_degree`).
"""

import argparse
import statistics
import tempfile

from bench_step import SAME, TURNS, Steps, alternate, titanlite_words
from record import add_record_option, ratios, record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--sequences", type=int, default=1, help="of a micro-batch")
    parser.add_argument("--parts", type=int, default=1, help="of a sequence")
    parser.add_argument("--runs", type=int, default=3)
    add_record_option(parser)
    arguments, options = parser.parse_known_args()
    same = [f"--training.local_batch_size={arguments.sequences}"]
    option = ["--debug.reproducible_layouts", f"--debug.reproducible_context_degree={arguments.parts}"]
    contenders = {"option": [*option, *same], "same": same, "largest": []}
    results: dict[str, list[Steps]] = {name: [] for name in contenders}
    with tempfile.TemporaryDirectory() as folder:
        words = {
            name: titanlite_words([f"--job.dump_folder={folder}", f"--job.name={name}", *SAME, *own, *options])
            for name, own in contenders.items()
        }
        for _ in range(arguments.runs):
            for name, measured in alternate(words, arguments.processes, TURNS).items():
                results[name].append(measured)
    for name, runs in results.items():
        times = [1000 * statistics.median(run.seconds) for run in runs]
        print(
            f"{name:<7} {statistics.median(times):7.1f} ms/step, {statistics.median(run.mib for run in runs):.0f} MiB"
        )
    how = " ".join([f"{arguments.processes} process(es)", f"micro-batches of {arguments.sequences}", *options])
    how += f", {arguments.parts} parts" if arguments.parts > 1 else ""
    for other, aim in (("same", "< 1.10"), ("largest", "")):
        both = [*zip(results["option"], results[other], strict=True)]
        for what, found in (
            ("time of a step", [statistics.median(ratios(ours.seconds, its.seconds)) for ours, its in both]),
            ("peak memory", [ours.mib / its.mib for ours, its in both]),
        ):
            spread = f"(runs {min(found):.3f} to {max(found):.3f})"
            print(f"option / {other}, {what}: {statistics.median(found):.3f} {spread}")
            name = f"reproducible_layouts / {other}, {what}, {how}"
            record(arguments.record, name=name, values=found, better="lower", aim=aim if "time" in what else "")


if __name__ == "__main__":
    main()
