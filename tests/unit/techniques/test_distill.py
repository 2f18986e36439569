"""The loss with a teacher against the plain formulas, what it holds in memory, and what a config of it refuses."""

import json
import shutil
from dataclasses import replace
from math import inf, log
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.distillation import KINDS, VOCABULARY, Given, inputs, plain
from tests.support.helpers import TinyRun, mentions, one_process, train_on_this_rank
from tests.support.operators import LargestTensor
from titanlite.checks.preflight import preflight
from titanlite.data.tokenizer import ByteTokenizer, load_tokenizer
from titanlite.loss import token_loss
from titanlite.models.frozen import ModelWeights
from titanlite.ops.cpu import CpuKernels
from titanlite.ops.divergence import divergence
from titanlite.runtime.errors import ConfigError, UserError
from titanlite.runtime.process_group import Ranks
from titanlite.schema import Distill
from titanlite.techniques.distill.divergence import distilled_loss
from titanlite.techniques.distill.source import different_tokens, open_teacher
from titanlite.tools.convert.source import open_model, open_source
from titanlite.tools.plan.gpu_kernels import GpuKernels


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("ratio", "temperature", "z_loss"), [(1.0, 1.0, 0.0), (0.7, 2.5, 0.0), (0.4, 0.5, 1e-2)])
@pytest.mark.parametrize("chunk", [7, 1000])
def test_gradients_are_those_of_the_formulas(
    kind: Any, ratio: float, temperature: float, z_loss: float, chunk: int
) -> None:
    hidden, weight, labels, teacher = inputs()
    distill = Distill(ratio=ratio, temperature=temperature, kind=kind)
    expected, distilled = plain(hidden, weight, labels, teacher, distill, z_loss)
    expected_gradients = torch.autograd.grad(0.1 * expected, [hidden, weight])
    kernels = CpuKernels(chunk_bytes=8 * VOCABULARY * chunk)
    found = distilled_loss(
        hidden, weight, labels_BL=labels, z_loss=z_loss, kernels=kernels, teacher=teacher, distill=distill
    )
    gradients = torch.autograd.grad(0.1 * found.total, [hidden, weight])
    assert found.total.item() == pytest.approx(expected.item(), rel=1e-6)
    assert float(found.metrics["distill_loss"]) == pytest.approx(float(distilled), rel=1e-6)
    own = token_loss(hidden, weight, labels_BL=labels).cross_entropy
    assert float(found.cross_entropy) == pytest.approx(float(own), rel=1e-6)
    for gradient, other in zip(gradients, expected_gradients, strict=True):
        assert (gradient - other).norm() < 1e-6 * other.norm()
    assert not gradients[0][0, :9].any(), "labels that do not count"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("further", [-40, 40])
def test_padding_that_one_of_both_lacks_is_cut(kind: Any, further: int) -> None:
    """Qwen2.5 7B has 152,064 tokens, and 3B 151,936 of the same tokenizer."""
    hidden, weight, labels, teacher = inputs()
    labels.clamp_(max=VOCABULARY - 41)
    of_teacher = torch.cat([teacher.weight_VD, 9 * torch.randn(40, teacher.weight_VD.shape[1])])[: VOCABULARY + further]
    teacher, distill = Given(teacher.hidden_BLD, of_teacher), Distill(ratio=0.7, temperature=2.0, kind=kind)
    expected, distilled = plain(hidden, weight, labels, teacher, distill, 0.0)
    kernels = CpuKernels(chunk_bytes=8 * VOCABULARY * 7)
    found = distilled_loss(hidden, weight, labels_BL=labels, kernels=kernels, teacher=teacher, distill=distill)
    assert float(found.metrics["distill_loss"]) == pytest.approx(float(distilled), rel=1e-6)
    gradients, others = (torch.autograd.grad(loss, [hidden, weight]) for loss in (found.total, expected))
    for gradient, other in zip(gradients, others, strict=True):
        assert (gradient - other).norm() < 1e-6 * other.norm()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_a_student_that_is_its_teacher_has_no_divergence_and_no_gradient(kind: Any, temperature: float) -> None:
    hidden, weight, labels, _ = inputs()
    teacher, distill = Given(hidden.detach(), weight.detach()), Distill(ratio=1.0, kind=kind, temperature=temperature)
    found = distilled_loss(hidden, weight, labels_BL=labels, teacher=teacher, distill=distill)
    assert abs(found.total.item()) <= 1e-7
    for gradient in torch.autograd.grad(found.total, [hidden, weight]):
        assert gradient.abs().max() <= 1e-7


@pytest.mark.parametrize(("kind", "value"), [("forward_kl", log(2)), ("reverse_kl", inf), ("js", 0.2157616)])
def test_a_token_that_the_teacher_excludes(kind: Any, value: float) -> None:
    """q = (1, 0, 0) and p = (1/2, 1/2, 0): 0 log 0 is 0, and KL(p, q) is infinite."""
    student, teacher = torch.tensor([[0.0, 0.0, -inf]]), torch.tensor([[0.0, -inf, -inf]])
    found = divergence(student, teacher, kind=kind, temperature=1.0, weight_C=torch.ones(1))
    assert found.value_C.item() == pytest.approx(value)
    if kind != "reverse_kl":
        assert found.d_logits_CV is not None
        slope = {"forward_kl": 0.5, "js": log(3) / 8}[kind]
        torch.testing.assert_close(found.d_logits_CV, torch.tensor([[-slope, slope, 0.0]]))
    same = divergence(teacher, teacher, kind=kind, temperature=1.0, weight_C=torch.ones(1))
    assert same.value_C.item() == 0
    assert same.d_logits_CV is not None
    assert not same.d_logits_CV.any()


def test_gradients_in_bfloat16_are_rounded_once() -> None:
    hidden, weight, labels, teacher = inputs(torch.bfloat16)
    distill = Distill(ratio=0.5)
    expected = torch.autograd.grad(plain(hidden, weight, labels, teacher, distill, 0.0)[0], [hidden, weight])
    for hardware_bfloat16 in (False, True):
        kernels = CpuKernels(hardware_bfloat16=hardware_bfloat16)
        found = distilled_loss(hidden, weight, labels_BL=labels, kernels=kernels, teacher=teacher, distill=distill)
        for gradient, other in zip(torch.autograd.grad(found.total, [hidden, weight]), expected, strict=True):
            assert gradient.dtype == torch.bfloat16
            assert (gradient - other).norm() < 2**-8 * other.norm()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.nightly)])
def test_the_compiled_divergence_is_the_same(kind: Any, backend: str) -> None:
    """Run the function of which the compiler makes a GPU's kernel, in one graph."""
    generator = torch.Generator().manual_seed(0)
    student, teacher = (4 * torch.randn(9, VOCABULARY, generator=generator) for _ in range(2))
    options: dict[str, Any] = {"kind": kind, "temperature": 1.5, "weight_C": torch.linspace(0, 1, 9)}
    expected = divergence(student, teacher.clone(), **options)
    found = torch.compile(divergence, fullgraph=True, dynamic=False, backend=backend)(student, teacher, **options)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert GpuKernels(compiles=True).divergence(torch.device("cpu")) is divergence, "a plan traces operators"


@pytest.mark.long
@pytest.mark.parametrize(("kind", "vocabulary"), [*((kind, 4_000) for kind in KINDS), ("js", 32_000)])
def test_logits_take_the_same_memory_whatever_the_vocabulary(kind: Any, vocabulary: int) -> None:
    """No operator makes more than a chunk of one model's logits: half of what the loss without a teacher holds."""
    kernels = CpuKernels(chunk_bytes=4 * 128_000)
    hidden, weight = torch.randn(1, 64, 8, requires_grad=True), torch.randn(vocabulary, 8, requires_grad=True)
    teacher = Given(torch.randn(1, 64, 12), torch.randn(vocabulary, 12))
    labels = torch.randint(0, vocabulary, (1, 64))
    with LargestTensor(but=[(vocabulary, 8), (vocabulary, 12)]) as seen:
        distill = Distill(ratio=0.5, kind=kind)
        found = distilled_loss(hidden, weight, labels_BL=labels, kernels=kernels, teacher=teacher, distill=distill)
        found.total.backward()
    assert seen.numel == 64_000
    chunks = 64 * vocabulary // 64_000
    assert seen.matmuls == 4 * chunks, "logits of both models, and two gradients"


# A whole run


def teacher_options(folder: Path, ratio: float = 0.5) -> list[str]:
    return [f"--teacher.path={folder}", f"--distill.ratio={ratio}"]


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> tuple[TinyRun, Path]:
    """A folder of runs, and the folder of one that is a teacher."""
    tiny = TinyRun(tmp_path_factory.mktemp("taught"))
    with one_process():
        train_on_this_rank(tiny.config("--job.name=teacher", "--training.steps=4"), 0, 1)
    return tiny, tiny.folder / "outputs" / "teacher"


ALONE, CPU = Ranks(0, 1, 0, 1), torch.device("cpu")


def refusal(tiny: TinyRun, *options: str) -> str:
    with pytest.raises(ConfigError) as error:
        preflight(tiny.config(*options), ALONE, CPU, open_model=open_model)
    return str(error.value)


@pytest.mark.long
def test_vocabularies_that_differ_are_refused(taught: tuple[TinyRun, Path]) -> None:
    tiny, folder = taught
    options = teacher_options(folder)
    where = folder / "checkpoints" / "step-00000004"
    source = open_source(str(folder))
    other = load_tokenizer("python-2k")
    config = tiny.config(*options)
    padded = source.spec._replace(args=replace(source.spec.args, vocab_size=384))
    assert open_teacher(config, student=padded, tokenizer=source.tokenizer, open_model=open_model)
    with pytest.raises(UserError) as unknown:  # without a tokenizer, nothing tells padding from tokens
        open_teacher(config, student=padded, tokenizer=None, open_model=open_model)
    assert mentions(str(unknown.value), where, 384, "model.args.vocab_size = 259")
    with pytest.raises(UserError) as error:
        open_teacher(config, student=source.spec, tokenizer=other, open_model=open_model)
    [line] = str(error.value).splitlines()
    assert mentions(line, where, "tokenizer", "258 tokens")
    assert source.tokenizer is not None
    assert different_tokens(source.tokenizer, ByteTokenizer()) == []


class Swapped(ByteTokenizer):
    """The bytes, of which two have each other's id."""

    fingerprint = "swapped"

    def decode(self, ids: np.ndarray) -> str:
        return super().decode(np.array([{65: 66, 66: 65}.get(int(i), int(i)) for i in ids]))


class Renamed(ByteTokenizer):
    fingerprint = "another file of the same tokens"


def test_tokens_that_differ_are_named() -> None:
    assert different_tokens(Swapped(), ByteTokenizer()) == ["65 is 'B', here 'A'", "66 is 'A', here 'B'"]
    assert different_tokens(Renamed(), ByteTokenizer()) == []


@pytest.mark.long
def test_a_teacher_too_large_for_the_machine_is_refused(taught: tuple[TinyRun, Path], tmp_path: Path) -> None:
    """The weights need not be there for the check: it reads shapes."""
    tiny, folder = taught

    def large(path: str, config: str | None, section: str) -> ModelWeights:
        source = open_model(path, config, section)
        args: Any = source.spec.args
        return source._replace(spec=source.spec._replace(args=replace(args, n_layers=3, dim=6144, hidden_dim=2**24)))

    with pytest.raises(ConfigError) as error:
        preflight(tiny.config(*teacher_options(folder)), ALONE, CPU, open_model=large)
    [line] = str(error.value).splitlines()
    assert " parameters and the 9" in line
    assert " of the teacher take 3," in line, "the weights in float32, as training.mixed_precision_param is"


def test_sequences_that_are_too_long_for_the_teacher_are_refused(taught: tuple[TinyRun, Path]) -> None:
    tiny, folder = taught
    options = [*teacher_options(folder), "--training.seq_len=10000", "--model.args.max_seq_len=10000"]
    [line] = refusal(tiny, *options).splitlines()
    assert mentions(line, 8192, "training.seq_len", 10000)


def test_a_teacher_that_is_not_there_is_refused(tiny: TinyRun, tmp_path: Path) -> None:
    assert mentions(refusal(tiny, *teacher_options(tmp_path / "none")), "teacher.path", tmp_path / "none")
    (tmp_path / "empty").mkdir()
    assert mentions(refusal(tiny, *teacher_options(tmp_path / "empty")), "teacher.path", tmp_path / "empty")


def test_a_config_can_describe_the_teacher(taught: tuple[TinyRun, Path]) -> None:
    tiny, folder = taught
    bare = shutil.copytree(folder / "checkpoints/step-00000004", tiny.folder / "bare" / "step-00000004")
    manifest = json.loads((bare / "manifest.json").read_text())
    del manifest["files"]["config.toml"], manifest["crc32"]
    (bare / "manifest.json").write_text(json.dumps(manifest))
    assert mentions(refusal(tiny, *teacher_options(bare)), "teacher.path", bare, "teacher.config")
    described = [*teacher_options(bare), f"--teacher.config={tiny.toml}"]
    inputs = preflight(tiny.config(*described), ALONE, CPU, open_model=open_model)
    assert inputs.targets
    assert inputs.targets.frozen.spec == open_source(str(folder)).spec
