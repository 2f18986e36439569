"""A run with a teacher: the same with every technique, and its teacher stays what it is."""

import gc
import json
import re
import shutil
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from tests.support.distillation import KINDS, Given, plain
from tests.support.helpers import TinyRun, one_process, run_in_turn, run_ranks, train_on_this_rank
from tests.support.layouts import built, degrees, one_step, trained, whole
from titanlite.batch import IGNORE
from titanlite.metrics.recorder import step_line
from titanlite.models.base import unique_parameters
from titanlite.ops.attention import document_arguments
from titanlite.runtime.errors import UserError
from titanlite.schema import Config
from titanlite.state import model_state, state_of
from titanlite.step import count_valid_tokens, no_observer
from titanlite.techniques.distill.source import fingerprint
from titanlite.tools import cli
from titanlite.tools.convert.source import load_model, open_model, open_source

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
    with one_process():
        trained(0, 1, tiny.config("--training.steps=4", f"--job.name={name}", *options))
    return f"--teacher.path={tiny.folder}/outputs/{name}"


@pytest.fixture(scope="module")
def with_teacher(tmp_path_factory: pytest.TempPathFactory) -> tuple[TinyRun, str]:
    """A folder of runs, and the option that names a teacher in it."""
    tiny = TinyRun(tmp_path_factory.mktemp("taught"))
    return tiny, make_teacher(tiny, "teacher")


def taught(rank: int, world_size: int, config: Config) -> None:
    """Train. The teacher keeps the bits of its checkpoint, is saved nowhere, and its forward pass counts."""
    run = train_on_this_rank(config, rank, world_size)
    teacher = run.train_step.targets.model
    assert teacher is not None
    stored = load_model(open_source(str(config.teacher.path)))
    theirs = model_state(stored)
    for module in teacher.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # to the shards that were read: what is kept for the next step is padded
    for name, tensor in model_state(teacher).items():
        assert torch.equal(whole(tensor).float(), theirs[name].float()), name
    assert not [name for name, p in teacher.named_parameters() if p.grad is not None or p.requires_grad]
    saved = {name for part in state_of(run.model, run.optimizer).values() for name in part}
    assert not [name for name in saved if "teacher" in name]
    assert len([*run.model.named_parameters()]) == len([name for name in saved if not name.startswith("state.")])
    added = run.metrics.flops_per_token(0, 1, False) - run.model.flops_per_token(config.training.seq_len)
    assert added == pytest.approx(stored.flops_per_token(config.training.seq_len) / 3)


@pytest.mark.nightly
def test_losses_are_equal_with_every_technique(tiny: TinyRun) -> None:
    """On other layouts: tests/matrix.py."""
    teacher = make_teacher(tiny, "teacher")
    tied = make_teacher(tiny, "tied-teacher", "--model.args.tied_head=true")
    options = {name: [*NARROW, *DISTILL, teacher, *extra] for name, extra in TECHNIQUES.items()}
    options["tied"] = [*NARROW, *DISTILL, tied, "--model.args.tied_head=true"]
    names = {(1, 1): ["plain", "offload", "tied", "AC"], (1, 2): [*options]}
    for world_size in (1, 2):
        configs = [
            tiny.config(
                *options[name], *degrees(*layout), f"--job.name={name}-{layout[0]}-{layout[1]}", world_size=world_size
            )
            for layout, some in names.items()
            if layout[0] * layout[1] == world_size
            for name in some
        ]
        run_in_turn(taught, world_size, configs)
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
def test_a_distilled_run_resumes_bit_for_bit_and_with_its_teacher_only(with_teacher: tuple[TinyRun, str]) -> None:
    tiny, teacher = with_teacher
    few, other = "--training.steps=2", f"--teacher.path={tiny.folder}/outputs/other"
    trained(0, 1, tiny.config("--job.name=other", few, "--debug.seed=1"))
    options = [*NARROW, *DISTILL, "--checkpoint.interval=2", "--training.steps=4"]
    for more in (["--job.name=whole"], ["--job.name=parts", few], ["--job.name=parts"]):
        trained(0, 1, tiny.config(*options, teacher, *more))
    for key in ("loss", "distill_loss", "grad_norm"):
        assert [record[key] for record in tiny.records("parts")] == [record[key] for record in tiny.records("whole")]
    more = ["--job.name=parts", "--training.steps=5"]
    with pytest.raises(UserError, match=r"teacher .*[0-9a-f]{16}.* [0-9a-f]{16}\n"):
        trained(0, 1, tiny.config(*options, other, *more))
    gc.collect()  # the lock of the run's folder goes with what the error held
    trained(0, 1, tiny.config(*options, other, *more, '--checkpoint.allow_changes=["teacher"]'))
    manifest = json.loads((tiny.folder / "outputs/parts/checkpoints/step-00000005/manifest.json").read_text())
    assert len(manifest["settings"]["teacher"]) == 16


@pytest.mark.parametrize("kind", [KINDS[0], *(pytest.param(kind, marks=pytest.mark.nightly) for kind in KINDS[1:])])
@pytest.mark.usefixtures("single_process_group")
def test_accumulated_gradients_are_those_of_the_plain_loss_of_the_whole_batch(
    with_teacher: tuple[TinyRun, str], kind: str
) -> None:
    """Micro-batches with different numbers of labels that count weigh by tokens."""
    tiny, teacher_path = with_teacher
    trained(0, 1, tiny.config(*NARROW, "--job.name=student", "--training.steps=2"))
    paths = [f"{tiny.folder}/outputs/{name}" for name in ("student", "teacher")]
    options = [*NARROW, *DISTILL, teacher_path, f"--distill.kind={kind}", "--training.local_batch_size=4"]
    config = tiny.config(*options, f"--checkpoint.initial_load_path={paths[0]}", f"--job.name={kind}")
    run = built(0, 1, config)
    assert run.accumulation == 2
    batches = list(islice(run.batches, 2))
    run.batches.close()
    batches[0]["labels"][:3, 5:] = IGNORE
    run.train_step.accumulate(batches, no_observer)
    student, teacher = (load_model(open_source(path)) for path in paths)
    tokens, labels = (torch.cat([batch[key] for batch in batches]) for key in ("tokens", "labels"))
    with torch.no_grad():
        theirs = teacher(tokens)
    one = torch.eye(theirs.shape[-1])
    loss, _ = plain(student(tokens), one, labels, Given(theirs, one), config.distill, 0.0)
    names, parameters = zip(*unique_parameters(student), strict=True)
    expected = torch.autograd.grad(loss / count_valid_tokens(batches, run.train_step.group), parameters)
    found = dict(unique_parameters(run.model))
    assert found.keys() == set(names)
    for name, gradient in zip(names, expected, strict=True):
        mine = found[name].grad
        assert mine is not None
        assert (whole(mine) - gradient).norm() < 1e-6 * gradient.norm(), name


@pytest.mark.usefixtures("single_process_group")
def test_neither_frozen_nor_the_teachers_bits_change(with_teacher: tuple[TinyRun, str]) -> None:
    tiny, teacher_path = with_teacher
    frozen = '--freeze.parameters=["tok_embeddings.*", "layers.0.*", "layers.1.attention.wq.weight"]'
    options = [*NARROW, *DISTILL, teacher_path, frozen, "--lr_scheduler.warmup_steps=0"]
    run = built(0, 1, tiny.config(*options, "--job.name=frozen", "--training.local_batch_size=4"))
    before = {name: whole(p) for name, p in unique_parameters(run.model)}
    for _ in range(2):
        assert float(one_step(run).added_loss) != 0
    run.batches.close()
    still = {name for name, p in unique_parameters(run.model) if torch.equal(whole(p), before[name])}
    first = {name for name in before if name.startswith("layers.0.")}
    assert still == first | {"tok_embeddings.weight", "layers.1.attention.wq.weight"}
    assert run.train_step.targets
    stored = model_state(load_model(open_source(f"{tiny.folder}/outputs/teacher")))
    for name, tensor in model_state(run.train_step.targets.model or run.model).items():
        assert np.array_equal(whole(tensor).float().numpy(), stored[name].float().numpy()), name


@pytest.mark.usefixtures("single_process_group")
def test_the_teacher_computes_what_its_model_does(with_teacher: tuple[TinyRun, str]) -> None:
    """Boundaries of documents reach the teacher, too."""
    tiny, teacher = with_teacher
    config = tiny.config(teacher, *NARROW, *DISTILL, "--data.document_mask=true", "--job.name=computes")
    run = built(0, 1, config)
    batch = next(run.batches)
    run.batches.close()
    assert run.train_step.targets
    output = run.train_step.targets(batch, no_observer)["teacher"]
    with output.teacher.head_weight() as weight, torch.no_grad():
        logits = output.hidden_BLD @ weight.t()
        expected = load_model(open_source(str(config.teacher.path)))(batch["tokens"], **document_arguments(batch))
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


@pytest.mark.usefixtures("single_process_group")
def test_a_damaged_teacher_is_refused(with_teacher: tuple[TinyRun, str]) -> None:
    tiny, _ = with_teacher
    damaged = shutil.copytree(tiny.folder / "outputs/teacher", tiny.folder / "outputs/damaged")
    [file] = (damaged / "checkpoints/step-00000004").glob("*.distcp")
    file.write_bytes(bytes(byte ^ 1 for byte in file.read_bytes()))
    with pytest.raises(UserError, match=r"^teacher\.path: \S*distcp"):
        trained(0, 1, tiny.config(f"--teacher.path={damaged}", "--job.name=refused", *NARROW, *DISTILL))


@pytest.mark.usefixtures("single_process_group")
def test_a_hugging_face_folder_is_a_teacher(with_teacher: tuple[TinyRun, str]) -> None:
    """Weights that another program wrote teach as the checkpoint that they were exported from."""
    tiny, teacher = with_teacher
    out = tiny.folder / "exported"
    assert cli.run(["checkpoint", "export", f"{tiny.folder}/outputs/teacher", "--out", str(out)]) == 0
    options = [*NARROW, *DISTILL, "--training.steps=2", "--checkpoint.enable=false"]
    for name, path in (("ours", teacher), ("theirs", f"--teacher.path={out}")):
        trained(0, 1, tiny.config(*options, path, f"--job.name={name}"))
    ours, theirs = ([record["distill_loss"] for record in tiny.records(name)] for name in ("ours", "theirs"))
    assert theirs == ours
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
