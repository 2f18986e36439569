"""Comparison of what all ranks must have in common at a start. Facts are made up."""

import json
from pathlib import Path

import torch

from tests.support.helpers import TinyRun, mentions
from titanlite.run.versions import differences, facts_of, source_digest
from titanlite.runtime.console import flat

CPU = torch.device("cpu")
ONE = {"torch": "2.13.0", "python": "3.11.7", "optimizer.lr": "0.01"}


def test_each_difference_is_one_line_with_rank_and_host() -> None:
    odd = ONE | {"torch": "2.12.0", "torchao": "0.18.0", "optimizer.lr": "0.02"}
    expected = [
        ("optimizer.lr = 0.02", "optimizer.lr = 0.01"),
        ("torch 2.12.0", "torch 2.13.0"),
        ("torchao 0.18.0", "no torchao"),
    ]
    found = differences([("host-a", ONE), ("host-a", ONE), ("host-b", ONE), ("host-b", odd)])
    for line, (odd_one, first) in zip(found, expected, strict=True):
        assert mentions(line, f"rank 3 on host-b has {odd_one}", f"rank 0 on host-a has {first}")


def test_places_of_a_host_may_differ(tiny: TinyRun) -> None:
    """The place of data, tokenizer and cache is each host's own; the folder of the run only without the checkpoints."""
    places = {
        "data": {"path": "HOST/tok", "tokenizer": "HOST/tokenizer.json", "cache_folder": "HOST/cache"},
        "validation": {"sources": [{"path": ["HOST/a", "HOST/b"], "name": "it"}]},
        "job": {"dump_folder": "HOST/out"},
        "checkpoint": {"folder": "/shared", "initial_load_path": "HOST/weights"},
    }

    def config_on(host: str, *left_out: str) -> dict[str, str]:
        tree = tiny.config().model_dump(mode="json")
        for name in places.keys() - {*left_out}:
            tree[name] |= json.loads(json.dumps(places[name]).replace("HOST", f"/{host}"))
        return facts_of(tree, CPU)

    assert config_on("a") == config_on("b")
    assert config_on("a")["checkpoint.folder"] == '"/shared"'
    assert config_on("a")["validation.sources.0.name"] == '"it"'
    found = [config_on(host, "checkpoint") for host in ("a", "b")]
    assert {key for key, value in found[0].items() if found[1][key] != value} == {"job.dump_folder"}


def test_keys_in_urls_are_not_gathered() -> None:
    assert flat({"checkpoint": {"folder": "s3://me:secret@host/run"}, "list": [1, [True]], "none": None}) == {
        "checkpoint.folder": '"s3://***@host/run"', "list.0": "1", "list.1.0": "true", "none": "null",
    }  # fmt: skip


def test_changed_code_is_another_version(tmp_path: Path) -> None:
    """The digest sees every file by name and content; of a model of the user's own, its file counts."""
    (tmp_path / "part").mkdir()
    file = tmp_path / "part/a.py"
    file.write_text("x = 1")
    digests = [source_digest(tmp_path)]
    file.write_text("x = 2")
    digests.append(source_digest(tmp_path))
    file.rename(tmp_path / "part/b.py")
    digests.append(source_digest(tmp_path))
    assert len(set(digests)) == 3
    (tmp_path / "notes.txt").write_text("no code")
    assert source_digest(tmp_path) == digests[-1]

    tree = {"model": {"file": str(tmp_path / "part/b.py")}, "training": {"loss": f"{tmp_path}/part/b.py:loss"}}
    before = facts_of(tree, CPU)
    (tmp_path / "part/b.py").write_text("x = 3")
    errors = differences([("a", before), ("a", facts_of(tree, CPU))])
    assert [line.split(" content of ")[1].split()[0] for line in errors] == ["model.file", "training.loss"]
