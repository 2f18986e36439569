"""The guides say what is so: their commands are run here as they stand."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SMALL = "--training.steps=2 --training.seq_len=64 --training.global_batch_size=4 --metrics.enable_tensorboard=false"


def commands(guide: str, heading: str) -> list[str]:
    """The lines of the first block of shell under a heading."""
    text = (ROOT / "docs" / guide).read_text().partition(f"## {heading}\n")[2]
    block = re.search(r"```sh\n(.*?)```", text, re.DOTALL)
    assert block, f"no commands under {heading}"
    return block[1].strip().splitlines()


def test_own_data_in_two_commands(tmp_path: Path) -> None:
    prepare, train = commands("data.md", "Your own data in two commands")
    (tmp_path / "mydir").mkdir()
    for name in ("a", "b"):
        lines = [json.dumps({"text": f"def {name}_{i}(x):\n    return x + {i}\n"}) for i in range(300)]
        (tmp_path / "mydir" / f"{name}.jsonl").write_text("\n".join(lines))
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    assert train.startswith("./run_train.sh ")
    for command in (prepare, f"{ROOT}/{train} {SMALL}"):
        result = subprocess.run(
            ["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
        )
        assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    index = json.loads((tmp_path / "tok" / "index.json").read_text())
    assert index["documents"] == 600
    records = (tmp_path / "outputs" / "debug" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(record)["step"] for record in records] == [1, 2]
