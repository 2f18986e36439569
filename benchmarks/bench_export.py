"""Memory and time of exporting a checkpoint to Hugging Face's format.

    python benchmarks/bench_export.py [--shard 200MB] [--dtype bfloat16] [--record FILE]

A model of 2.2 GB (554 million parameters in float32) is saved once. Then a process of its own exports it, as the
command does, and reports the memory before the export and the peak of resident memory. The difference is compared with
the largest file that was written.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from record import add_record_option, record

from titanlite.checkpoint.load import resume_settings
from titanlite.checkpoint.manager import CheckpointManager, Progress
from titanlite.config.load import load
from titanlite.models.registry import resolve_model
from titanlite.parallelize import build_mesh
from titanlite.parallelize.materialize import materialize
from titanlite.schema import dump
from titanlite.storage.storage import open_storage

TOML = """
[model.args]
dim = 2048
n_layers = {layers}
n_heads = 16
n_kv_heads = 4
hidden_dim = 8192
vocab_size = 16384
[data]
tokenizer = "bytes"
[optimizer]
name = "SGD"
"""
MIB = 2**20


def save(folder: Path, layers: int) -> None:
    """Save the model with random weights."""
    toml = folder / "large.toml"
    toml.write_text(TOML.format(layers=layers))
    config = load(toml)
    spec = resolve_model(None, None, config.model.args)
    model = spec.build()
    cpu = torch.device("cpu")
    materialize(model, device=cpu, offload=False, dtype=torch.float32, seed=0)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    manager = CheckpointManager(
        config.checkpoint, storage=open_storage(str(folder / "checkpoints"), owner="bench"), model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        mesh=build_mesh(config.parallelism, world_size=1, device_type="cpu"), device=cpu,
        settings=resume_settings(config, model_args=spec.args, data={}), whole_config=dump(config),
    )  # fmt: skip
    manager.save(Progress(1, 8), last=True)
    manager.finish()
    dist.destroy_process_group()


def resident(key: str) -> int:
    """Return a line of /proc/self/status, in bytes: VmRSS now, VmHWM at the peak."""
    status = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith(f"{key}:"))) * 1024


def export(folder: Path, shard: str, dtype: str | None) -> None:
    """Export in this process, and print the measurements as JSON."""
    from titanlite.parallelize import DTYPES
    from titanlite.tools.convert.export import export_folder
    from titanlite.tools.convert.safetensors_file import parse_size
    from titanlite.tools.convert.source import open_source
    from titanlite.tools.convert.target import open_target

    source = open_source(str(folder))
    before, started = resident("VmRSS"), time.perf_counter()
    out = folder / f"hf-{dtype}"
    done = export_folder(
        source, open_target(str(out)), dtype=DTYPES[dtype] if dtype else None, max_shard_bytes=parse_size(shard)
    )
    largest = max(path.stat().st_size for path in out.glob("*.safetensors"))
    seconds = time.perf_counter() - started
    numbers = {"before": before, "peak": resident("VmHWM"), "largest": largest, "seconds": seconds}
    print(json.dumps({**numbers, "bytes": done.bytes, "files": done.files}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shard", default="200MB")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"])
    parser.add_argument("--step", choices=["save", "export"], help="what the processes of this benchmark do")
    parser.add_argument("--folder", type=Path)
    add_record_option(parser)
    options = parser.parse_args()
    if options.step == "save":
        return save(options.folder, options.layers)
    if options.step == "export":
        return export(options.folder, options.shard, options.dtype)
    with tempfile.TemporaryDirectory() as temporary:
        words = [
            sys.executable,
            __file__,
            "--folder",
            temporary,
            "--shard",
            options.shard,
            "--layers",
            str(options.layers),
        ]
        words += ["--dtype", options.dtype] if options.dtype else []
        subprocess.run([*words, "--step", "save"], check=True)
        output = subprocess.run([*words, "--step", "export"], check=True, capture_output=True, text=True).stdout
        found = json.loads(output.splitlines()[-1])
    more = found["peak"] - found["before"]
    ratio = more / found["largest"]
    print(
        f"{found['bytes'] / MIB:,.0f} MiB in {found['files']} files, the largest {found['largest'] / MIB:,.0f} MiB: "
        f"{more / MIB:,.0f} MiB beyond the {found['before'] / MIB:,.0f} MiB of Python and torch, {ratio:.2f} of the "
        f"largest file; {found['seconds']:.1f} s"
    )
    name = f"export: memory beyond torch's / largest file, {options.shard} files, {options.dtype or 'float32'}"
    record(options.record, name=name, value=ratio, better="lower", aim="< 1.5")
    return None


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
