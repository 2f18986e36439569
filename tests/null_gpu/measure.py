"""Memory, launches, collectives and waits of one training step, on a GPU that computes nothing.

    python measure.py llama3_8b --training.global_batch_size=16 --training.local_batch_size=2 --compile.enable
    python measure.py llama3_70b --world=64 --top=20
    python measure.py CONFIG [--world=8] [--device=H100] [--steps=3] [--no-expandable] [--no-plan] [--top=N]
        [--waits] [--json] [--section.key=value ...]

The process is one of `world` ranks: NCCL's collectives return at once, so no other rank is needed. The config is a
shipped one, or a path. It is built by titanlite's own steps, but for initial values, and makes `steps` steps to warm up
and one that is counted. `plan` is the prediction for the same config, made in another process without a GPU.

    --rank=N         the stages of another rank than 0, of a pipeline
    --device=NAME    the device of the plan; the stand-in has its memory
    --no-expandable  PyTorch's own setting of the caching allocator, not titanlite's
    --top=N          the N most frequent kernels, and all other events
    --json           one line of JSON, for record.py
    --waits          a Python stack for each time the host waits for the device
"""

import argparse
import ctypes
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

GIB = 2**30


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("config")
    parser.add_argument("--world", type=int, default=8)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--device", default="H100")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--no-expandable", dest="expandable", action="store_false")
    parser.add_argument("--no-plan", dest="plan", action="store_false")
    parser.add_argument("--only-plan", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--top", type=int, default=0)
    parser.add_argument("--waits", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--name")
    options, overrides = parser.parse_known_args()
    if options.only_plan:
        print(json.dumps(predict(options.config, overrides, options.world, options.device, options.rank)))
        return
    rank = options.rank
    plan = start_plan(options.config, overrides, options.world, options.device, rank) if options.plan else None
    if options.expandable:
        from titanlite.runtime.allocator import use_expandable_segments

        use_expandable_segments(os.environ)
    found = measure(
        options.config, overrides, world_size=options.world, device_name=options.device, steps=options.steps,
        waits=options.waits, rank=rank,
    )  # fmt: skip
    found = {"name": options.name or " ".join([options.config, *overrides]), "expandable": options.expandable, **found}
    if plan:
        output, errors = plan.communicate()
        if plan.returncode:
            found["plan_error"] = errors.strip().splitlines()[-1]
        else:
            found["plan"] = json.loads(output.splitlines()[-1])
    if options.json:
        print(json.dumps(found))
    else:
        report(found, options.top)
    sys.stdout.flush()
    os._exit(0)


def start_plan(config: str, overrides: list[str], world_size: int, device: str, rank: int) -> subprocess.Popen[str]:
    words = [config, f"--world={world_size}", f"--device={device}", f"--rank={rank}", "--only-plan", *overrides]
    environ = {key: value for key, value in os.environ.items() if key not in ("LD_PRELOAD", "LD_LIBRARY_PATH")}
    return subprocess.Popen(
        [sys.executable, __file__, *words], env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def read_config(name: str, overrides: list[str], world_size: int) -> Any:
    import titanlite
    from titanlite.config.load import load

    path = Path(name) if name.endswith(".toml") else Path(titanlite.__file__).parent / f"train_configs/{name}.toml"
    return load(path, overrides, world_size=world_size)


def predict(name: str, overrides: list[str], world_size: int, device: str, rank: int) -> dict[str, float]:
    from titanlite.tools.plan.estimate import Layout, plan
    from titanlite.tools.plan.hardware import find_hardware

    made = plan(read_config(name, overrides, world_size), Layout(world_size, find_hardware(device), 8))
    for stage in made.stages:
        if stage.rank == rank:
            return {"allocated": stage.allocated / GIB, "reserved": stage.reserved / GIB}
    reserved = getattr(made, "reserved", None)
    return {"allocated": made.peak / GIB, **({"reserved": reserved / GIB} if isinstance(reserved, int | float) else {})}


def tell_sizes_of_parts() -> None:
    """Tell the stand-in how many ranks are in each process group that is split from another one."""
    import torch.distributed as dist
    import torch.distributed.distributed_c10d as c10d

    group_cls: Any = dist.ProcessGroup
    split, helper = group_cls.split_group, c10d._new_process_group_helper

    def of_split(self: Any, ranks: list[int], **options: Any) -> Any:
        os.environ["NULL_GPU_PART_RANKS"] = str(len(ranks))
        return split(self, ranks, **options)

    def of_group(size: int, *arguments: Any, **options: Any) -> Any:
        os.environ["NULL_GPU_PART_RANKS"] = str(size)
        return helper(size, *arguments, **options)

    group_cls.split_group, c10d._new_process_group_helper = of_split, of_group


def measure(
    name: str, overrides: list[str], *, world_size: int, device_name: str, steps: int, waits: bool, rank: int
) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    from titanlite.tools.plan.hardware import find_hardware

    os.environ.setdefault("NULL_GPU_BYTES", str(find_hardware(device_name).memory))
    # From 128 ranks on, NCCL wants ids of several of them, which are not there. A larger share leaves rank 0's alone.
    os.environ["TORCH_NCCL_RANKS_PER_ROOT"] = str(world_size)
    torch.set_num_threads(1)
    torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN's graphs are beyond the stand-in
    config = read_config(name, overrides, world_size)
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group("cuda:nccl", store=dist.HashStore(), rank=0, world_size=world_size, device_id=device)
    tell_sizes_of_parts()
    if rank:
        give_rank_0_the_stages_of(rank * config.parallelism.pipeline_parallel_degree // world_size)
    step = build_step(config, device, world_size)
    for _ in range(steps):
        step()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_stats(device)
    events = Events(stacks=waits)
    step()
    events.stop()
    stats = torch.cuda.memory_stats(device)
    return {
        "torch": torch.__version__.split("+")[0],
        "allocated": stats["allocated_bytes.all.peak"] / GIB,
        "reserved": stats["reserved_bytes.all.peak"] / GIB,
        "launches": events.total("kernel"),
        "collectives": events.of("collective"),
        "waits": events.of("wait"),
        "retries": stats["num_alloc_retries"],
        "retries_in_step": stats["num_alloc_retries"] - before["num_alloc_retries"],
        "allocations_in_step": events.of("allocate"),
        "events": {f"{what} {detail}": count for (what, detail), count in events.counts.most_common()},
    }


def give_rank_0_the_stages_of(place: int) -> None:
    """Let this process, rank 0, have the stages of another rank of the pipeline: NCCL would ask rank 0 for an id."""
    from titanlite.techniques.pipeline import passes, stages

    right = stages.rank_of_stage

    def shifted(stage: int, parallelism: Any) -> int:
        return (right(stage, parallelism) - place) % parallelism.pipeline_parallel_degree

    stages.rank_of_stage = passes.rank_of_stage = shifted


def build_step(config: Any, device: Any, world_size: int) -> Any:
    """Build this rank's model and optimizer; the result makes one step."""
    import torch

    import titanlite.step
    from titanlite.models.base import build_on_meta
    from titanlite.optim import build_optimizer
    from titanlite.parallelize import build_mesh, parallelize
    from titanlite.parallelize.materialize import allocate
    from titanlite.techniques import parts_of
    from titanlite.tools.plan.estimate import model_of

    spec = model_of(config)
    kernels = kernels_with_stated_counts(config)
    mesh = build_mesh(config.parallelism, world_size=world_size, device_type="cuda")
    model = build_on_meta(spec.model_cls, spec.args)
    parallelize(model, config, mesh=mesh, kernels=kernels)
    allocate(model, torch.device("cpu") if config.training.enable_cpu_offload else device, device)
    optimizer = build_optimizer(model, config.optimizer, seed=0)
    parts = parts_of(config, mesh)
    degrees = config.parallelism.degrees(world_size)
    size, accumulation = config.training.batch_split(degrees.data_parallel)
    tokens = torch.zeros(size, config.training.seq_len, dtype=torch.int64, device=device)
    batch: Any = {"tokens": tokens, "labels": tokens.clone()}
    if config.data.document_mask:
        batch["positions"] = torch.zeros_like(tokens)
        batch["documents"] = torch.zeros_like(tokens, dtype=torch.int32)
        batch["boundaries"] = torch.zeros(size + 1, dtype=torch.int32, device=device)
    batch = parts.batch(batch)
    scale_weights = parts.after_update(model)
    scale_weights()
    updates = parts.updates(model, optimizer, device)
    step: Any = titanlite.step.build_step(
        config, model, optimizer, mesh=mesh, kernels=kernels, parts=parts, updates=updates
    )
    if model.stages:
        step.is_alone = True  # nothing is received

    outer, taken = parts.outer(model) if parts.outer else None, torch.zeros((), device=device)
    if outer:
        outer.begin()

    def make_step() -> None:
        step([batch] * accumulation, leaves_updates=True)
        if outer:
            outer.update(config.outer.every, taken, step.finish_updates)
        scale_weights()

    return make_step


def kernels_with_stated_counts(config: Any) -> Any:
    """Return a GPU's kernels that wait for counts of tokens as in training, and then use those of the plan.

    The device has only zeros.
    """
    from titanlite.ops.kernels import Kernels
    from titanlite.tools.plan.gpu_kernels import FakeCounts

    class StatedCounts(FakeCounts):
        def read_counts(self, *tensors: Any, **sizes: int) -> tuple[list[int], list[int], int]:
            Kernels.read_counts(self, *tensors, **sizes)
            return super().read_counts(*tensors, **sizes)

    return StatedCounts(compiles=config.compile.enable, attention=config.training.attention_backend)


class Events:
    """Calls of the CUDA runtime, cuBLAS and NCCL from here to `stop`."""

    def __init__(self, *, stacks: bool) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        library = next(library for library in os.environ["LD_PRELOAD"].split(":") if "null_gpu" in library)
        self._library = ctypes.CDLL(library)
        self._callback = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(lambda _: traceback.print_stack())
        self._library.null_gpu_start(self._callback if stacks else None)

    def stop(self) -> None:
        with tempfile.NamedTemporaryFile("r") as file:
            assert not self._library.null_gpu_stop(file.name.encode())
            for line in file:
                what, detail, count, _ = line.rstrip("\n").split("\t")
                self.counts[what, detail] = int(count)

    def of(self, what: str) -> dict[str, int]:
        return {detail: count for (kind, detail), count in sorted(self.counts.items()) if kind == what}

    def total(self, what: str) -> int:
        return sum(self.of(what).values())


def report(found: dict[str, Any], top: int) -> None:
    plan = found.get("plan", {})
    predicted = f"{plan['allocated']:.2f}" if plan else found.get("plan_error", "-")
    if "reserved" in plan:
        predicted += f" / {plan['reserved']:.2f}"
    print(found["name"] + ("" if found["expandable"] else ", no expandable segments"))
    print(
        f"allocated {found['allocated']:.2f} GiB, reserved {found['reserved']:.2f}, plan {predicted}; "
        f"launches {found['launches']:,}, waits {sum(found['waits'].values())}, allocator retries {found['retries']} "
        f"({found['retries_in_step']} in the step)"
    )
    for title, counts in (
        ("collectives", found["collectives"]),
        ("waits", found["waits"]),
        ("allocations in the step", found["allocations_in_step"]),
    ):
        if counts:
            print(f"{title}: " + "; ".join(f"{count} x {kind}" for kind, count in counts.items()))
    for kind, count in [*found["events"].items()][:top]:
        print(f"{count:7} {kind[:150]}")


if __name__ == "__main__":
    main()
