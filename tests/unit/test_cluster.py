"""scripts/slurm.sh with programs in place of Slurm's, the Kubernetes manifest, the Dockerfile, and docs/cluster.md."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.helpers import mentions
from titanlite.config.load import load

ROOT = Path(__file__).parents[2]
SLURM = ROOT / "scripts" / "slurm.sh"
FAKES = {
    "python3": "#!/bin/bash\n",  # has titanlite installed, and is asked nothing else
    "srun": '#!/bin/bash\nprintf "%s\\n" "$@" >srun.txt\nenv >environment.txt\nexit "$CODE"\n',
    "scontrol": """#!/bin/bash
echo "$*" >>scontrol.txt
case $1 in
    show) printf 'node7\\nnode8\\n' ;;
    --oneliner) echo "JobId=$4 JobState=$STATE Reason=None" ;;
    requeue) exit "${REFUSED:-0}" ;;
esac
""",
}


def slurm(folder: Path, code: int, *words: str, state: str = "RUNNING", **environ: str) -> "tuple[int, str, list[str]]":
    """Run the script where srun ends with a code; return its exit code, its output, and the calls of scontrol."""
    for name, text in FAKES.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    (folder / "scontrol.txt").write_text("")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SLURM_")}
    environment |= {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_ID": "1234567", "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "node[7-8]", "SLURM_CPUS_PER_TASK": "64", "CODE": str(code), "STATE": state,
    }  # fmt: skip
    result = subprocess.run(
        ["bash", str(SLURM), *words], env=environment | environ, cwd=folder, capture_output=True, text=True, timeout=120
    )
    return result.returncode, result.stdout + result.stderr, (folder / "scontrol.txt").read_text().splitlines()


LATER = {"SECONDS": "100"}
"""The job has run for some time: bash counts from here."""


@pytest.mark.parametrize(
    ("code", "environ", "requeued", "words"),
    [
        (0, {}, False, ["done"]),
        (75, {}, True, ["checkpoint"]),
        (2, LATER, False, ["exit code 2"]),
        (3, LATER, False, ["exit code 3"]),
        (1, {}, False, ["exit code 1", "minute"]),
        (1, LATER, True, ["exit code 1"]),
        (1, {**LATER, "SLURM_RESTART_COUNT": "20"}, False, [20, "MAX_REQUEUES"]),
        (75, {"state": "COMPLETING"}, False, ["JobState=COMPLETING"]),
        (75, {"REFUSED": "1"}, True, ["error", "checkpoint"]),
    ],
)
def test_slurm_requeues_by_the_exit_code(
    tmp_path: Path, code: int, environ: dict[str, str], requeued: bool, words: list[object]
) -> None:
    ended, output, calls = slurm(tmp_path, code, **environ)
    assert ended == code
    assert mentions(output, *words)
    assert ("requeue 1234567" in calls) is requeued


def test_slurm_starts_one_task_a_node(tmp_path: Path) -> None:
    words = "--config", "my run.toml", "--training.steps=5"
    ended, output, _ = slurm(tmp_path, 0, *words, SLURM_RESTART_COUNT="2")
    assert ended == 0
    assert mentions(output, "job 1234567", "start 3", "2 nodes", "node7:24567")
    arguments = (tmp_path / "srun.txt").read_text().splitlines()
    assert arguments[-4:] == [f"{ROOT}/run_train.sh", *words]
    assert {"--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=64", "--kill-on-bad-exit=0"} <= {
        *arguments
    }
    environ = (tmp_path / "environment.txt").read_text().splitlines()
    assert {"NNODES=2", "RDZV_ENDPOINT=node7:24567"} <= {*environ}


def container() -> "tuple[dict[str, Any], dict[str, Any], dict[str, Any]]":
    """Return the JobSet, its Job and its container."""
    jobset = yaml.safe_load((ROOT / "scripts" / "kubernetes" / "jobset.yaml").read_text())
    [job] = jobset["spec"]["replicatedJobs"]
    [train] = job["template"]["spec"]["template"]["spec"]["containers"]
    return jobset, job, train


def test_the_manifest_starts_as_many_pods_as_it_names(tmp_path: Path) -> None:
    jobset, job, train = container()
    environ = {entry["name"]: entry.get("value") for entry in train["env"]}
    spec = job["template"]["spec"]
    assert spec["parallelism"] == spec["completions"] == int(environ["NNODES"])
    assert spec["completionMode"] == "Indexed"
    name = jobset["metadata"]["name"]
    assert environ["RDZV_ENDPOINT"] == f"{name}-{job['name']}-0-0.{name}:29500", "the first pod's name"
    [attempt] = [entry["valueFrom"] for entry in train["env"] if entry["name"] == "JOBSET_RESTART_ATTEMPT"]
    assert attempt["fieldRef"]["fieldPath"] == "metadata.labels['jobset.sigs.k8s.io/restart-attempt']"
    option, config, *overrides = train["args"]
    assert option == "--config"
    assert load(ROOT / "train_configs" / config, overrides).job.dump_folder == "/shared/outputs"
