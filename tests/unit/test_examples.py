"""Examples run as they stand."""

import runpy
import sys
import zipfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar, cast

import numpy as np
import pytest
import torch
from torch import nn

import titanlite
from tests.support.helpers import TinyRun, train_on_this_rank
from titanlite.models.base import build_on_meta
from titanlite.models.llama3 import Llama3
from titanlite.models.registry import resolve_model
from titanlite.runtime.user_code import find_object

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.long
@pytest.mark.usefixtures("single_process_group")
def test_the_model_of_the_readme_trains(tiny: TinyRun) -> None:
    readme = (EXAMPLES.parent / "README.md").read_text()
    file = tiny.folder / "windowed.py"
    file.write_text(readme.partition("```python\n")[2].partition("```")[0])
    options = f"--model.file={file}", "--model.name=Windowed", "--training.steps=1", "--checkpoint.enable=false"
    run = train_on_this_rank(tiny.config(*options), 0, 1)
    assert [run.model.args.attention_of(layer).window for layer in range(4)] == [None, 64, None, 64]
    assert tiny.losses() == [pytest.approx(5.6, abs=0.5)]


@pytest.mark.long
def test_a_sweep_and_a_sweep_that_is_repeated(
    tiny: TinyRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny.toml.write_text(tiny.toml.read_text().replace("steps = 6", "steps = 2"))
    monkeypatch.setattr(sys, "argv", ["sweep.py", str(tiny.toml), "1e-3", "1e-2"])
    tables = []
    for _ in range(2):
        runpy.run_path(str(EXAMPLES / "sweep.py"), run_name="__main__")
        tables.append(capsys.readouterr().out.partition("      lr")[2].splitlines())
    rows = [line.split() for line in tables[0][1:]]
    assert [row[0] for row in rows] == ["1.0e-03", "1.0e-02"]
    assert [float(row[1]) for row in rows] == [
        pytest.approx(tiny.losses(name)[-1], abs=1e-4) for name in ("tiny-lr-0.001", "tiny-lr-0.01")
    ]
    assert tables[1][1:] == tables[0][1:]


class FakeAimRun:
    """aim.Run: one hash, or a new one; a step that comes again replaces itself."""

    runs: ClassVar[dict[str, dict[str, dict[int, float]]]] = {}

    def __init__(self, run_hash: str | None, *, experiment: str, capture_terminal_logs: bool) -> None:
        self.hash = run_hash or f"{experiment}-{len(self.runs)}"
        self.points = self.runs[self.hash] if run_hash else self.runs.setdefault(self.hash, {})

    def __setitem__(self, name: str, value: dict[str, Any]) -> None:
        assert (name, value["training"]["steps"]) == ("config", 6)

    def track(self, metrics: dict[str, float], *, step: int) -> None:
        for name, value in metrics.items():
            self.points.setdefault(name, {})[step] = value

    def close(self) -> None: ...


def test_the_logger_for_aim_has_one_run_for_each_run(tiny: TinyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aim", cast(ModuleType, SimpleNamespace(Run=FakeAimRun)))
    logger_cls = find_object(f"{EXAMPLES}/aim_logger.py:Aim")
    for name in ("a", "b", "a"):
        folder = tiny.folder / name
        folder.mkdir(exist_ok=True)
        (folder / "config.toml").write_text(titanlite.dump(tiny.config()))
        logger = logger_cls(folder, step=0)
        logger.log({"loss": 2.0}, step=1)
        logger.close()
    assert FakeAimRun.runs == {f"{name}-{number}": {"loss": {1: 2.0}} for number, name in enumerate("ab")}


def test_the_recipe_reads_the_source_of_packages(tmp_path: Path) -> None:
    """Its files are those of a wheel but tests and empty ones, and its tokens 20 for each parameter of the blocks."""
    texts = {"p/b.py": "b = 1\n", "p/a.py": "a = 1\n", "p/tests/t.py": "t = 1\n", "p/e.py": "\n", "p/x.txt": "x"}
    with zipfile.ZipFile(tmp_path / "p-1.0-py3-none-any.whl", "w") as wheel:
        for name, text in texts.items():
            wheel.writestr(name, text)
    fetch = runpy.run_path(str(EXAMPLES / "python_source" / "fetch.py"))
    assert fetch["texts_of"](tmp_path / "p-1.0-py3-none-any.whl") == [
        {"text": text, "path": f"p-1.0-py3-none-any/{name}"}
        for name, text in (("p/a.py", "a = 1\n"), ("p/b.py", "b = 1\n"))
    ]
    config = titanlite.load_config(
        str(EXAMPLES / "python_source" / "python_source.toml"),
        {"data.path": "stdlib://train", "validation.path": "stdlib://validation"},
    )
    _, args = resolve_model(config.model.name, config.model.flavor, {**config.model.args, "vocab_size": 256})
    model = build_on_meta(Llama3, args)
    assert config.training.tokens == 20 * sum(parameter.numel() for parameter in model.layers.parameters())


def soap_by_the_paper(weight: np.ndarray, gradients: list[np.ndarray], *, lr: float, decay: float) -> np.ndarray:
    """Weights after SOAP's steps (arXiv:2409.11321, algorithm 3), in float64; the first one only makes the bases."""
    beta1, beta2, eps, frequency = 0.95, 0.9, 1e-8, 3
    mean, square = np.zeros_like(weight), np.zeros_like(weight)
    left, right = ((1 - beta2) * product for product in (gradients[0] @ gradients[0].T, gradients[0].T @ gradients[0]))
    q_left, q_right = (np.linalg.eigh(factor)[1][:, ::-1] for factor in (left, right))
    for step, gradient in enumerate(gradients[1:], start=1):
        mean = beta1 * mean + (1 - beta1) * gradient
        square = beta2 * square + (1 - beta2) * (q_left.T @ gradient @ q_right) ** 2
        rotated = q_left.T @ (mean / (1 - beta1**step)) @ q_right
        update = q_left @ (rotated / (np.sqrt(square / (1 - beta2**step)) + eps)) @ q_right.T
        weight = weight - lr * decay * weight - lr * update
        left = beta2 * left + (1 - beta2) * gradient @ gradient.T
        right = beta2 * right + (1 - beta2) * gradient.T @ gradient
        if step % frequency == 0:
            q_left, q_right = np.linalg.qr(left @ q_left)[0], np.linalg.qr(right @ q_right)[0]
    return weight


def test_soap_is_that_of_the_paper() -> None:
    """A matrix, a stack of two matrices, and a vector, for which it is Adam in a basis that is the identity."""
    random = np.random.default_rng(0)
    shapes = [(6, 6), (2, 5, 5), (7,)]
    weights = [random.normal(size=shape) for shape in shapes]
    gradients = [[random.normal(size=shape) for _ in range(11)] for shape in shapes]
    parameters = [nn.Parameter(torch.tensor(weight, dtype=torch.float32)) for weight in weights]
    options = {"lr": 0.01, "betas": (0.95, 0.9), "weight_decay": 0.1, "frequency": 3}
    optimizer = find_object(f"{EXAMPLES}/soap.py:SOAP")(parameters, **options)
    for step in range(11):
        for parameter, several in zip(parameters, gradients, strict=True):
            parameter.grad = torch.tensor(several[step], dtype=torch.float32)
        optimizer.step()
    found = [parameter.detach().numpy() for parameter in parameters]

    def by_the_paper(weight: np.ndarray, several: list[np.ndarray]) -> np.ndarray:
        return soap_by_the_paper(weight, several, lr=0.01, decay=0.1)

    assert found[0] == pytest.approx(by_the_paper(weights[0], gradients[0]), abs=1e-5)
    for number in range(2):
        expected = by_the_paper(weights[1][number], [gradient[number] for gradient in gradients[1]])
        assert found[1][number] == pytest.approx(expected, abs=1e-5)
    vector = nn.Parameter(torch.tensor(weights[2], dtype=torch.float32))
    adam = torch.optim.AdamW([vector], lr=0.01, betas=(0.95, 0.9), weight_decay=0.1)
    for gradient in gradients[2][1:]:
        vector.grad = torch.tensor(gradient, dtype=torch.float32)
        adam.step()
    assert found[2] == pytest.approx(vector.detach().numpy(), abs=1e-6)
    with pytest.raises(ValueError, match="float32"):
        type(optimizer)([nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16))])
