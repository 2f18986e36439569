"""Runs that earlier commits of titanlite have begun. Their archives hold the folder of a run of 4 steps on two ranks,
with the checkpoint of step 2 and the records of all steps."""

import json
import tarfile
from pathlib import Path

import pytest

from tests.support.helpers import train_on_this_rank
from titanlite.checkpoint import manifest as manifests
from titanlite.config.load import load
from titanlite.tools import cli

EARLIER = sorted(Path(__file__).parents[2].joinpath("data/earlier").glob("*.tar.gz"))
RUN = Path("outputs/tiny")


def losses() -> list[float]:
    return [json.loads(line)["loss"] for line in (RUN / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(params=EARLIER, ids=lambda path: path.name.partition(".")[0])
def earlier(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Make the folder of an earlier run the current one, and return the losses of its steps."""
    with tarfile.open(request.param) as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    return losses()


@pytest.mark.long
@pytest.mark.usefixtures("single_process_group")
@pytest.mark.parametrize("config", ["tiny.toml", RUN / "config.toml"])
def test_a_run_of_an_earlier_commit_resumes(config: Path, earlier: list[float]) -> None:
    """From the config as its user wrote it, and as that commit resolved it. CPUs may round differently."""
    assert len(earlier) == 4
    run = train_on_this_rank(load(config, [], world_size=1), 0, 1)
    assert run.position.progress.step == 2
    assert losses()[:2] == earlier[:2]
    assert losses()[2:] == pytest.approx(earlier[2:], rel=1e-5)


@pytest.mark.usefixtures("earlier")
@pytest.mark.parametrize("raised", [0, 1, 2])
def test_a_checkpoint_of_an_earlier_commit_is_verified(raised: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also once the format is raised, and no longer once it is raised again."""
    monkeypatch.setattr(manifests, "FORMAT", manifests.FORMAT + raised)
    assert cli.run(["checkpoint", "verify", str(RUN)]) == (2 if raised == 2 else 0)
