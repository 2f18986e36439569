"""A cache of a teacher that several processes write, and that runs of several layouts read."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.helpers import TinyRun, run_ranks
from tests.layouts import degrees, trained
from titanlite.techniques.distill.entries import entry_type

K = 20
SCRIPT = f"""
import sys
from titanlite.tools.convert.teacher_cache import write_cache
given = dict(top_k={K}, dtype="float32", batch_size=3, block_bytes=2**18)
write_cache(sys.argv[1], sys.argv[2:], **given)
"""
"""Write a cache in small files."""


def entries(cache: Path) -> np.ndarray:
    """Return the entries of all sequences of a cache with one source."""
    record = np.dtype([("entries", entry_type(259, K, "float32"), (32,)), ("checksum", "<u4")])
    return np.concatenate([np.fromfile(file, record)["entries"] for file in sorted(cache.glob("*/*.topk"))])


MOE = [
    "--model={name='qwen3_moe', flavor='debug', args={dim=32, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=16, "
    "hidden_dim=24, vocab_size=259}}",
]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("model", "layout"),
    [([], (1, 2)), ([], (1, 1, 2)), (MOE, (1, 2, 1, 1, 2))],
    ids=["shard", "context", "expert"],
)
def test_processes_share_the_work_and_layouts_read_the_same(
    tiny: TinyRun, model: list[str], layout: tuple[int, ...]
) -> None:
    """Written on the layout, and read on it."""
    run_ranks(trained, 1, tiny.config(*model, "--training.steps=2", "--job.name=teacher"))
    options = [f"--teacher.path={tiny.folder}/outputs/teacher", "--distill.ratio=0.6", "--training.local_batch_size=1"]
    options += [*model, "--optimizer.lr=3e-3"]
    layouts = {1: degrees(1, 1), 2: degrees(*layout)}
    script = tiny.folder / "write.py"
    script.write_text(SCRIPT)
    caches = [f"--teacher.cache={tiny.folder}/cache-{number}" for number in (1, 2)]
    for ranks in (1, 2):
        command = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", str(script)]
        words = [str(tiny.toml), *options, *layouts[ranks], caches[ranks - 1]]
        found = subprocess.run(
            [sys.executable, *command, *words], check=True, timeout=120, capture_output=True, text=True
        )
        assert re.findall(r"(\d+) files; (\d+) of ", found.stdout) == [("6", "6")]
    one, two = entries(tiny.folder / "cache-1"), entries(tiny.folder / "cache-2")
    assert one.shape == two.shape == (359, 32)
    np.testing.assert_array_equal(one["ids"][..., 0], two["ids"][..., 0])
    np.testing.assert_allclose(one["log_probs"], two["log_probs"], rtol=0, atol=1e-5)
    np.testing.assert_allclose(one["log_tail"], two["log_tail"], rtol=0, atol=1e-5)
    for ranks in (1, 2):
        config = tiny.config(*options, caches[0], *layouts[ranks], f"--job.name=of-{ranks}", world_size=ranks)
        run_ranks(trained, ranks, config)
    for key in ("loss", "distill_loss", "grad_norm"):
        alone, shared = ([record[key] for record in tiny.records(f"of-{ranks}")] for ranks in (1, 2))
        assert alone == pytest.approx(shared, rel=2e-5, abs=2e-6), key
