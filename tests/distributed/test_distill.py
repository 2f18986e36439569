"""A run with a teacher: the same on every layout and with every technique, and its teacher stays what it is."""

import gc
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from tests.helpers import TinyRun, run_in_turn, run_ranks, train_on_this_rank
from tests.layouts import built, degrees, trained, whole
from titanlite.checkpoint.state import model_state, state_of
from titanlite.metrics.recorder import step_line
from titanlite.observer import StepObserver
from titanlite.ops.attention import document_arguments
from titanlite.runtime.errors import UserError
from titanlite.schema import Config
from titanlite.techniques.distill.source import fingerprint
from titanlite.tools import cli
from titanlite.tools.convert.source import load_model, open_model, open_source

LAYOUTS = [(1, 1), (1, 2), (2, 2), (4, 1), (1, 4)]
NARROW = ["--model.args.dim=36", "--model.args.n_layers=2"]
DISTILL = ["--distill.ratio=0.6", "--distill.temperature=2.0", "--training.local_batch_size=1"]
"""Options that accumulate on every layout."""
TECHNIQUES = {
    "plain": [],
    "offload": ["--teacher.enable_cpu_offload", "--training.enable_cpu_offload"],
    "teacher offload": ["--teacher.enable_cpu_offload"],
    "AC": ["--activation_checkpoint.mode=full"],
    "compile": ["--compile.enable"],
    "tied": [],
    "in backward": ["--optimizer.in_backward", "--training.max_norm=0", "--training.local_batch_size=8"],
}


def make_teacher(tiny: TinyRun, name: str, *options: str) -> str:
    """Train a teacher for a few steps, and return the option that names it."""
    run_ranks(trained, 1, tiny.config("--training.steps=4", f"--job.name={name}", *options))
    return f"--teacher.path={tiny.folder}/outputs/{name}"


@pytest.fixture(scope="module")
def with_teacher(tmp_path_factory: pytest.TempPathFactory) -> tuple[TinyRun, str]:
    """A folder of runs, and the option that names a teacher in it."""
    tiny = TinyRun(tmp_path_factory.mktemp("taught"))
    return tiny, make_teacher(tiny, "teacher")


def taught(rank: int, world_size: int, config: Config) -> dict[str, Any]:
    """Train, and return whether the teacher's bits are those of its checkpoint, and what the checkpoint holds."""
    run = train_on_this_rank(config, rank, world_size)
    teacher = run.targets.model
    assert teacher is not None
    stored = load_model(open_source(str(config.teacher.path)))
    theirs = model_state(stored)
    for module in teacher.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # to the shards that were read: what is kept for the next step is padded
    return {
        "unchanged": {
            name: np.array_equal(whole(tensor).float().numpy(), theirs[name].float().numpy())
            for name, tensor in model_state(teacher).items()
        },
        "gradients": [name for name, p in teacher.named_parameters() if p.grad is not None or p.requires_grad],
        "saved": {name for part in state_of(run.model, run.optimizer).values() for name in part},
        "student": {name for name, _ in run.model.named_parameters()},
        "flops": run.metrics.flops_per_token(0, 1, False) - run.model.flops_per_token(config.training.seq_len),
        "flops of teacher": stored.flops_per_token(config.training.seq_len),
        "weights": {name: whole(p).float().numpy() for name, p in run.model.named_parameters()},
    }


@pytest.mark.nightly
def test_losses_are_equal_on_every_layout_and_with_every_technique(tiny: TinyRun) -> None:
    teacher = make_teacher(tiny, "teacher")
    tied = make_teacher(tiny, "tied-teacher", "--model.args.tied_head=true")
    options = {name: [*NARROW, *DISTILL, teacher, *extra] for name, extra in TECHNIQUES.items()}
    options["tied"] = [*NARROW, *DISTILL, tied, "--model.args.tied_head=true"]
    names = {layout: ["plain"] for layout in LAYOUTS}
    names[1, 1] += ["offload", "tied", "AC"]
    names[1, 2] += [*options.keys() - {"plain"}]
    for world_size in (1, 2, 4):
        cases = [(it, name) for it, some in names.items() if it[0] * it[1] == world_size for name in some]
        configs = [
            tiny.config(*options[name], *degrees(*it), f"--job.name={name}-{it[0]}-{it[1]}", world_size=world_size)
            for it, name in cases
        ]
        for (_, name), results in zip(cases, run_in_turn(taught, world_size, configs), strict=True):
            for found in results:
                assert all(found["unchanged"].values()), name
                assert found["gradients"] == [], name
                assert not [it for it in found["saved"] if "teacher" in it], name
                assert found["flops"] == pytest.approx(found["flops of teacher"] / 3), "its forward pass counts"
                assert len(found["student"]) == len([it for it in found["saved"] if not it.startswith("state.")])
    records = tiny.records("plain-1-1")
    for layout, some in names.items():
        for name in some:
            expected = tiny.records("tied-1-1") if name == "tied" else records
            other = tiny.records(f"{name}-{layout[0]}-{layout[1]}")
            for key in ("loss", "distill_loss", "added_loss"):
                values = [record[key] for record in expected][: 1 if name == "in backward" else None]  # it cannot clip
                found = [record[key] for record in other][: len(values)]
                assert found == pytest.approx(values, rel=2e-5, abs=2e-6), (layout, name, key)
    first = records[0]
    assert first["added_loss"] == pytest.approx(0.6 * (first["distill_loss"] - first["loss"]), rel=1e-5)
    assert f"distill {first['distill_loss']:.4f}" in step_line(first, steps=3)


@pytest.mark.usefixtures("single_process_group")
def test_a_distilled_run_resumes_bit_for_bit_and_with_its_teacher_only(tiny: TinyRun) -> None:
    few = "--training.steps=2"
    trained(0, 1, tiny.config("--job.name=teacher", few))
    trained(0, 1, tiny.config("--job.name=other", few, "--debug.seed=1"))
    teacher, other = (f"--teacher.path={tiny.folder}/outputs/{name}" for name in ("teacher", "other"))
    options = [*NARROW, *DISTILL, "--checkpoint.interval=2", "--training.steps=4"]
    for more in (["--job.name=whole"], ["--job.name=parts", few], ["--job.name=parts"]):
        trained(0, 1, tiny.config(*options, teacher, *more))
    for key in ("loss", "distill_loss", "grad_norm"):
        assert [it[key] for it in tiny.records("parts")] == [it[key] for it in tiny.records("whole")]
    more = ["--job.name=parts", "--training.steps=5"]
    with pytest.raises(UserError, match=r"teacher .*[0-9a-f]{16}.* [0-9a-f]{16}\n"):
        trained(0, 1, tiny.config(*options, other, *more))
    gc.collect()  # the lock of the run's folder goes with what the error held
    trained(0, 1, tiny.config(*options, other, *more, '--checkpoint.allow_changes=["teacher"]'))
    manifest = json.loads((tiny.folder / "outputs/parts/checkpoints/step-00000005/manifest.json").read_text())
    assert len(manifest["settings"]["teacher"]) == 16


def own_output(rank: int, world_size: int, config: Config) -> dict[str, Any]:
    """Return the teacher's logits of a batch by this run, and those of the model of its checkpoint."""
    run = built(rank, world_size, config)
    batch = next(run.batches)
    output = run.targets(batch, StepObserver())["teacher"]
    with output.teacher.head_weight() as weight:
        logits = output.hidden_BLD @ weight.t()
    stored = load_model(open_source(str(config.teacher.path)))
    with torch.no_grad():
        expected = stored(batch["tokens"], **document_arguments(batch))
    run.batches.close()
    return {"found": logits.numpy(), "expected": expected.numpy()}


def test_the_teacher_computes_what_its_model_does(with_teacher: tuple[TinyRun, str]) -> None:
    """Boundaries of documents reach the teacher, too."""
    tiny, teacher = with_teacher
    options = [teacher, *NARROW, *DISTILL, "--data.document_mask=true"]
    for found in run_ranks(own_output, 2, tiny.config(*options, world_size=2)):
        np.testing.assert_allclose(found["found"], found["expected"], rtol=0, atol=1e-5)


def test_a_damaged_teacher_is_refused(with_teacher: tuple[TinyRun, str]) -> None:
    tiny, _ = with_teacher
    damaged = shutil.copytree(tiny.folder / "outputs/teacher", tiny.folder / "outputs/damaged")
    [file] = (damaged / "checkpoints/step-00000004").glob("*.distcp")
    file.write_bytes(bytes(byte ^ 1 for byte in file.read_bytes()))
    with pytest.raises(Exception, match=r"UserError: teacher\.path: \S*distcp"):
        run_ranks(trained, 1, tiny.config(f"--teacher.path={damaged}", "--job.name=refused", *NARROW, *DISTILL))


def test_a_hugging_face_folder_is_a_teacher(with_teacher: tuple[TinyRun, str]) -> None:
    """Weights that another program wrote teach as the checkpoint that they were exported from."""
    tiny, teacher = with_teacher
    out = tiny.folder / "exported"
    assert cli.run(["checkpoint", "export", f"{tiny.folder}/outputs/teacher", "--out", str(out)]) == 0
    options = [*NARROW, *DISTILL, "--training.steps=2", "--checkpoint.enable=false"]
    run_ranks(trained, 1, tiny.config(*options, teacher, "--job.name=ours"))
    run_ranks(trained, 2, tiny.config(*options, f"--teacher.path={out}", "--job.name=theirs", world_size=2))
    one, two = ([record["distill_loss"] for record in tiny.records(name)] for name in ("ours", "theirs"))
    assert one == pytest.approx(two, rel=2e-5)
    before = fingerprint(open_model(str(out), None, "teacher"))
    copied = shutil.copytree(out, tiny.folder / "copied")
    assert fingerprint(open_model(str(copied), None, "teacher")) == before, "the same weights elsewhere, written later"
    [weights] = copied.glob("*.safetensors")
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert fingerprint(open_model(str(copied), None, "teacher")) != before


PAGE = Path("docs/distill.md").read_text()


def test_an_own_loss_is_given_the_teacher(with_teacher: tuple[TinyRun, str]) -> None:
    """The example of docs/distill.md, as it stands."""
    [source] = [text for text in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "def matched" in text]
    tiny, teacher = with_teacher
    (tiny.folder / "match_hidden.py").write_text(source)
    own = f"--training.loss={tiny.folder}/match_hidden.py:matched"
    for ranks in (1, 2):
        options = [teacher, own, f"--job.name=matched-{ranks}", "--training.local_batch_size=2"]
        options += ["--training.steps=3", "--checkpoint.enable=false"]
        run_ranks(trained, ranks, tiny.config(*options, world_size=ranks))
    one, two = ([record["hidden_distance"] for record in tiny.records(f"matched-{ranks}")] for ranks in (1, 2))
    assert one == pytest.approx(two, rel=2e-5)
    assert 0 < one[-1] < one[0]
    first = tiny.records("matched-1")[0]
    assert first["added_loss"] == pytest.approx(first["hidden_distance"], rel=1e-4)
