"""scripts/slurm.sh with programs in place of Slurm's, the Kubernetes manifest, the Dockerfile, and docs/cluster.md.

`scontrol` answers what that of Slurm 22.05.8 has answered (tests/data/slurm); tests/engines runs the script on a real
Slurm.
"""

import os
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

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
    --oneliner) sed "s/ Restarts=0 / Restarts=${RESTARTS:-0} /" "$RECORDED" ;;
    requeue) exit "${REFUSED:-0}" ;;
esac
""",
}


def slurm(
    folder: Path, code: int, *words: str, recorded: str = "running", job: str = "21", **environ: str
) -> "tuple[int, str, list[str]]":
    """Run the script where srun ends with a code; return its exit code, its output, and the calls of scontrol."""
    for name, text in FAKES.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    (folder / "scontrol.txt").write_text("")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SLURM_")}
    environment |= {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_ID": job, "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "node[7-8]", "SLURM_CPUS_PER_TASK": "64", "CODE": str(code),
        "RECORDED": str(ROOT / "tests" / "data" / "slurm" / f"{recorded}.txt"),
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
        (75, {}, True, ["stopped", "requeued"]),
        (2, LATER, False, ["exit code 2"]),
        (3, LATER, False, ["exit code 3"]),
        (1, {}, False, ["exit code 1", "minute"]),
        (1, LATER, True, ["exit code 1"]),
        (1, {**LATER, "RESTARTS": "20"}, False, [20, "MAX_REQUEUES"]),
        (1, {**LATER, "SLURM_RESTART_COUNT": "20"}, True, ["start 1:"]),  # of the shell that submitted the job
        (138, {}, False, ["USR1", "TimeLimit=00:30:00", "exit code 138", "minute"]),
        (138, LATER, True, ["USR1", "TimeLimit=00:30:00"]),
        (138, {**LATER, "RESTARTS": "20"}, False, [20, "MAX_REQUEUES"]),
        (137, LATER, True, ["exit code 137"]),
        (75, {"recorded": "cancelled"}, False, ["JobState=COMPLETING"]),
        (75, {"REFUSED": "1"}, True, ["error", "stopped"]),
    ],
)
def test_slurm_requeues_by_the_exit_code(
    tmp_path: Path, code: int, environ: dict[str, str], requeued: bool, words: list[object]
) -> None:
    ended, output, calls = slurm(tmp_path, code, **environ)
    assert ended == (code if code < 128 else 1), "sacct shows 138 as 10:0"
    assert mentions(output, *words)
    assert ("requeue 21" in calls) is requeued


@pytest.mark.parametrize(("job", "task"), [("26", "1"), ("27", "0")])
def test_a_task_of_an_array_is_requeued_alone_and_has_a_run_of_its_own(tmp_path: Path, job: str, task: str) -> None:
    """The last task has the number of the array. Variables of another array come from the shell of sbatch."""
    stale = {"SLURM_ARRAY_JOB_ID": "99", "SLURM_ARRAY_TASK_ID": "7"}
    ended, output, calls = slurm(tmp_path, 75, "--job.name=try-%a", recorded="array", job=job, **stale)
    assert ended == 75
    assert [call for call in calls if call.startswith("requeue")] == [f"requeue 26_{task}"]
    assert mentions(output, f"job 26_{task}, start 1", "requeued")
    assert (tmp_path / "srun.txt").read_text().splitlines()[-1] == f"--job.name=try-{task}"


def test_slurm_starts_one_task_a_node(tmp_path: Path) -> None:
    words = "--config", "my run.toml", "--training.steps=5"
    ended, output, _ = slurm(tmp_path, 0, *words, RESTARTS="2")
    assert ended == 0
    assert mentions(output, "job 21", "start 3", "2 nodes", "node7:20021")
    arguments = (tmp_path / "srun.txt").read_text().splitlines()
    assert arguments[-4:] == [f"{ROOT}/run_train.sh", *words]
    assert {"--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=64", "--kill-on-bad-exit=0"} <= {
        *arguments
    }
    environ = (tmp_path / "environment.txt").read_text().splitlines()
    assert {"NNODES=2", "RDZV_ENDPOINT=node7:20021", "SLURM_RESTART_COUNT=2"} <= {*environ}


def container() -> "tuple[dict[str, Any], dict[str, Any], dict[str, Any]]":
    """Return the JobSet, its Job and its container."""
    jobset = yaml.safe_load((ROOT / "scripts" / "kubernetes" / "jobset.yaml").read_text())
    [job] = jobset["spec"]["replicatedJobs"]
    [train] = job["template"]["spec"]["template"]["spec"]["containers"]
    return jobset, job, train


def table(required: str = "", **fields: Any) -> dict[str, Any]:
    """Return the JSON schema of a table that has these fields only; one whose name is in `required` must be there."""
    return {"type": "object", "properties": fields, "required": required.split(), "additionalProperties": False}


TEXT, NUMBER, SWITCH, ANY = (
    {"type": "string"},
    {"type": "integer", "minimum": 0},
    {"type": "boolean"},
    {"type": "object"},
)
TEXTS = {"type": "array", "items": TEXT}
JOBSET = table(
    "apiVersion kind metadata spec",
    apiVersion={"const": "jobset.x-k8s.io/v1alpha2"},
    kind={"const": "JobSet"},
    metadata=table("name", name=TEXT, namespace=TEXT, labels=ANY, annotations=ANY),
    spec=table(
        "replicatedJobs",
        network=table(enableDNSHostnames=SWITCH, subdomain=TEXT, publishNotReadyAddresses=SWITCH),
        failurePolicy=table(
            maxRestarts=NUMBER,
            restartStrategy={"enum": ["Recreate", "BlockingRecreate", "InPlaceRestart"]},
            rules={
                "type": "array",
                "items": table(
                    "name action",
                    name={"type": "string", "pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"},
                    action={"enum": ["FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts", "RestartJob"]},
                    onJobFailureReasons=TEXTS,
                    onJobFailureMessagePatterns=TEXTS,
                    targetReplicatedJobs=TEXTS,
                ),
            },
        ),
        successPolicy=table("operator", operator={"enum": ["All", "Any"]}, targetReplicatedJobs=TEXTS),
        coordinator=table("replicatedJob", replicatedJob=TEXT, jobIndex=NUMBER, podIndex=NUMBER),
        suspend=SWITCH,
        ttlSecondsAfterFinished=NUMBER,
        replicatedJobs={
            "type": "array",
            "minItems": 1,
            "items": table(
                "name template",
                name=TEXT,
                groupName=TEXT,
                replicas=NUMBER,
                template=table(
                    "spec",
                    metadata=ANY,
                    spec=table(
                        "template",
                        parallelism=NUMBER,
                        completions=NUMBER,
                        completionMode={"enum": ["Indexed", "NonIndexed"]},
                        backoffLimit=NUMBER,
                        activeDeadlineSeconds=NUMBER,
                        podFailurePolicy=table(
                            "rules",
                            rules={
                                "type": "array",
                                "items": table(
                                    "action",
                                    action={"enum": ["FailJob", "FailIndex", "Ignore", "Count"]},
                                    onExitCodes=table(
                                        "operator values",
                                        containerName=TEXT,
                                        operator={"enum": ["In", "NotIn"]},
                                        values={"type": "array", "items": NUMBER},
                                    ),
                                    onPodConditions={"type": "array"},
                                ),
                            },
                        ),
                        template=table("spec", metadata=ANY, spec=ANY),
                    ),
                ),
            ),
        },
    ),
)
"""Fields of a JobSet (kubernetes-sigs/jobset, api/jobset/v1alpha2) and of a Job (batch/v1), as far as they are used."""
SKYPILOT = table(
    "resources run",
    name=TEXT,
    workdir=TEXT,
    num_nodes=NUMBER,
    setup=TEXT,
    run=TEXT,
    envs={"type": "object", "additionalProperties": {"type": ["string", "null"]}},
    secrets={"type": "object", "additionalProperties": {"type": ["string", "null"]}},
    file_mounts=ANY,
    volumes=ANY,
    resources=table(
        infra=TEXT,
        accelerators={"type": "string", "pattern": r"^[\w-]+(:\d+)?$"},
        cpus=TEXT,
        memory=TEXT,
        instance_type=TEXT,
        use_spot=SWITCH,
        disk_size=NUMBER,
        disk_tier=TEXT,
        network_tier=TEXT,
        image_id=TEXT,
        labels=ANY,
        job_recovery=table(
            strategy=TEXT,
            max_restarts_on_errors=NUMBER,
            recover_on_exit_codes={"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 255}},
        ),
    ),
)
"""Fields of a task of SkyPilot (docs.skypilot.co, reference/yaml-spec), as far as they are likely to be used."""


@pytest.mark.parametrize(("name", "schema"), [("kubernetes/jobset.yaml", JOBSET), ("skypilot.yaml", SKYPILOT)])
def test_launchers_have_the_fields_of_their_schema(name: str, schema: dict[str, Any]) -> None:
    validator = Draft202012Validator(schema)
    content = yaml.safe_load((ROOT / "scripts" / name).read_text())
    assert [error.message for error in validator.iter_errors(content)] == []
    for error in ({**content, "speck": {}}, {**content, "metadata": 1, "num_nodes": "2"}):
        assert not validator.is_valid(error)


def test_skypilot_runs_the_same_command_on_each_machine(tmp_path: Path) -> None:
    """Its texts run as SkyPilot runs them, with programs in place of those that install and train."""
    task = yaml.safe_load((ROOT / "scripts" / "skypilot.yaml").read_text())
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [75]
    for folder in ("scripts", "titanlite/bin", "bin"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "environment.sh", tmp_path / "scripts")
    (tmp_path / "titanlite" / "bin" / "activate").write_text("")
    show = '#!/bin/bash\nprintf "%s\\n" "$0" "$@" "$NNODES" "$RDZV_ENDPOINT"\n'
    for program in ("run_train.sh", "bin/uv", "titanlite/bin/python"):
        (tmp_path / program).write_text(show)
        (tmp_path / program).chmod(0o755)
    given = {"CONFIG": task["envs"]["CONFIG"], "CHECKPOINTS": "s3://bucket/run", "HOME": str(tmp_path)}
    machine = {
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
        "PATH": f"{tmp_path}/bin:/usr/bin:/bin",
    }

    def lines(text: str) -> list[str]:
        command = ["bash", "-euc", text]
        return subprocess.run(
            command, env=given | machine, cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout.splitlines()

    installed = lines(task["setup"])
    assert installed[1:5] == ["pip", "install", "--python", f"{tmp_path}/titanlite/bin/python"]
    extras = installed[installed.index("--editable") + 1].removeprefix(".[").removesuffix("]").split(",")
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {*extras} <= {*known}
    _, option, config, *overrides, nodes, endpoint = lines(task["run"])
    assert (option, nodes, endpoint) == ("--config", "2", "10.0.0.1:29500")
    assert load(ROOT / "train_configs" / config, overrides).checkpoint.folder == "s3://bucket/run"


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
