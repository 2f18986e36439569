"""[optimizer] and its groups: which class updates which parameters, what is refused, and classes of a user."""

import re
from pathlib import Path

import pytest
import tomli
import torch
from torch import nn

from tests.support.helpers import TinyRun, built, mentions, train_on_this_rank
from tests.support.layouts import whole
from titanlite.models.llama3 import Llama3
from titanlite.optim import build_optimizer
from titanlite.optim.checks import check_optimizer
from titanlite.optim.combined import optimizers_in
from titanlite.optim.groups import collapse_names, format_groups, parameter_groups
from titanlite.optim.state_size import state_bytes
from titanlite.runtime.errors import ConfigError, Problem
from titanlite.schema import Average, Optimizer
from titanlite.train import finish, train


def section(text: str) -> Optimizer:
    return Optimizer.model_validate(tomli.loads(text))


class Shapes(nn.Module):
    """Matrices in layers and outside, a stack of matrices, vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 5) for _ in range(3))
        self.layers[0].experts = nn.Parameter(torch.ones(2, 3, 4))


def planned(text: str) -> list[tuple[str, str, float, float, list[str]]]:
    groups = parameter_groups(section(text), Shapes())
    return [
        (group.label, group.name, group.lr, group.weight_decay, collapse_names(group.parameters)) for group in groups
    ]


WEIGHTS, BIASES, EXPERTS = "layers.*.weight x3", "layers.*.bias x3", "layers.0.experts"


def test_default_groups() -> None:
    assert planned("lr = 0.5") == [
        ("matrices", "AdamW", 0.5, 0.1, ["embedding.weight", WEIGHTS, EXPERTS]),
        ("vectors", "AdamW", 0.5, 0.0, [BIASES]),
    ]
    assert planned('name = "Muon"\nweight_decay = 0.2') == [
        ("matrices in layers", "Muon", 3e-4, 0.2, [WEIGHTS, EXPERTS]),
        ("other matrices", "AdamW", 3e-4, 0.2, ["embedding.weight"]),
        ("other vectors", "AdamW", 3e-4, 0.0, [BIASES]),
    ]


GROUPS = """
lr = 0.5
args.amsgrad = true
[[groups]]
match = ["layers.*"]
lr = 0.1
[[groups]]
match = ["emb*"]
weight_decay = 0.3
name = "SGD"
args.momentum = 0.9
"""


def test_groups_and_their_table() -> None:
    assert planned(GROUPS) == [
        ("groups.0: matrices", "AdamW", 0.1, 0.1, [WEIGHTS, EXPERTS]),
        ("groups.0: vectors", "AdamW", 0.1, 0.0, [BIASES]),
        ("groups.1", "SGD", 0.5, 0.3, ["embedding.weight"]),
    ]
    assert planned(GROUPS.replace("lr = 0.1", "weight_decay = 0.4"))[0] == (
        "groups.0", "AdamW", 0.5, 0.4, [WEIGHTS, BIASES, EXPERTS]
    )  # fmt: skip
    table = format_groups(parameter_groups(section(GROUPS), Shapes()))
    assert [re.split("  +", line) for line in table[1:]] == [
        ["groups.0: matrices", "AdamW", "0.1", "0.1", "4", "84", "layers.*.weight x3, layers.0.experts"],
        ["groups.0: vectors", "AdamW", "0.1", "0", "3", "15", "layers.*.bias x3"],
        ["groups.1", "SGD", "0.5", "0.3", "1", "36", "embedding.weight"],
    ]
    adamw, sgd = optimizers_in(build_optimizer(Shapes(), section(GROUPS), seed=0))
    first, second, third = [*adamw.param_groups, *sgd.param_groups]
    assert (first["lr"], first["weight_decay"], first["amsgrad"], first["fused"]) == (0.1, 0.1, True, True)
    assert (second["lr"], second["weight_decay"]) == (0.1, 0.0)
    assert (third["lr"], third["weight_decay"], third["momentum"]) == (0.5, 0.3, 0.9)


@pytest.mark.long
@pytest.mark.usefixtures("single_process_group")
def test_rates_of_groups_follow_the_schedule_in_proportion(tiny: TinyRun, capfd: pytest.CaptureFixture[str]) -> None:
    groups = '[{match = ["layers.*"], lr = 0.004}, {match = ["tok*"], lr = 0.0, name = "SGD"}, {match = ["head*"]}]'
    config = tiny.config(f"--optimizer.groups={groups}", "--lr_scheduler.decay_ratio=0.5", "--checkpoint.enable=false")
    run = built(0, 1, config)
    rates: list[list[float]] = []
    run.optimizer.register_step_pre_hook(lambda *_: rates.append([group["lr"] for group in run.optimizer.param_groups]))
    embedding = run.model.get_parameter("tok_embeddings.weight")
    first = whole(embedding)
    train(run)
    finish(run)
    base = [record["lr"] for record in tiny.records()]
    assert base == pytest.approx([0.005, 0.01, 0.01, 0.0075, 0.005, 0.0025])
    assert rates == [pytest.approx([0.4 * lr, 0.4 * lr, lr, lr, 0.0]) for lr in base]
    assert torch.equal(whole(embedding), first)


def problems(text: str, dtype: str = "float32") -> list[Problem]:
    return [*check_optimizer(section(text), Shapes(), dtype=dtype)]


def test_each_parameter_is_in_exactly_one_group() -> None:
    twice, unused = problems('groups = [{match = ["layers.*"]}, {match = ["*.weight"]}, {match = ["norm*"]}]')
    assert (twice.key, unused.key) == ("optimizer.groups", "optimizer.groups.2.match")
    assert mentions(twice.message, 0, 1, "layers.*.weight x3")
    assert mentions(unused.message, "embedding.weight", "layers.*.weight x3", "layers.*.bias x3", "layers.0.experts")
    left, vectors = problems('name = "Muon"\ngroups = [{match = ["layers.*"]}]')
    assert (left.key, vectors.key) == ("optimizer.groups", "optimizer.groups.0.name")
    assert mentions(left.message, "embedding.weight")
    assert mentions(vectors.message, "Muon", "layers.*.bias x3")
    with pytest.raises(ConfigError, match=r"optimizer\.groups: .*embedding\.weight"):
        build_optimizer(Shapes(), section('groups = [{match = ["layers.*"]}]'), seed=0)


@pytest.mark.parametrize(
    ("text", "key", "words"),
    [
        ('name = "adamw"', "name", ["'adamw'", "AdamW?", "ASGD", "Adadelta"]),
        ('name = "LBFGS"', "name", ["LBFGS"]),
        ('name = "torch.optim.Muon"', "name", ["Muon", "PyTorch"]),
        ('name = "SGD"\nargs = {fused = true, momentum = 0.9}', "args.fused", ["SGD"]),
        ('name = "collections.Counter"', "name", ["collections.Counter", "torch.optim.Optimizer"]),
        ('name = "SGD"\nargs.momentun = 0.9', "args.momentun", ["momentum?", "SGD", "momentum", "dampening"]),
        ("args.lr = 0.1", "args.lr", ["lr", "[optimizer]"]),
        ('name = "SGD"\nstate_dtype = "bfloat16"', "state_dtype", ["SGD"]),
        ('lr = 0.0\ngroups = [{match = ["*"], lr = 0.1}]', "groups.0.lr", []),
    ],
)
def test_problems(text: str, key: str, words: list[str]) -> None:
    [found] = problems(text)
    assert found.key == f"optimizer.{key}"
    assert mentions(found.message, *words)


def test_bfloat16_weights_need_an_optimizer_that_rounds() -> None:
    assert problems("", "bfloat16") == []
    for name in ("Muon", "torch.optim.SGD"):
        [found] = problems(f'name = "{name}"', "bfloat16")
        assert found.key == "optimizer.name"
        assert mentions(found.message, name, 'training.dtype = "float32"', "AdamW")
    [found] = problems("args.amsgrad = true", "bfloat16")
    assert found.key == "optimizer.args"
    assert mentions(found.message, "AdamW", "bfloat16")


def test_examples_of_the_guide_are_valid() -> None:
    examples = re.findall(r"```toml\n(.*?)```", Path("docs/optimizers.md").read_text(), re.DOTALL)
    assert len(examples) == 9
    with torch.device("meta"):
        model = Llama3(Llama3.flavors["debug"])  # pyright: ignore[reportArgumentType]
    for example in map(tomli.loads, examples):
        assert {*example} <= {"optimizer", "average", "outer", "model", "parallelism"}
        Average.model_validate(example.get("average", {}))
        optimizer = Optimizer.model_validate(example.get("optimizer", {}))
        assert check_optimizer(optimizer, model, dtype="float32") == []


OWN = """
import torch

class Signs(torch.optim.Optimizer):
    def __init__(self, params, lr=0.1, beta=0.5, odd=False):
        super().__init__(params, {"lr": lr, "beta": beta, "odd": odd, "count": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] += group["odd"]
            for p in group["params"]:
                state = self.state[p]
                state["steps"] = state.get("steps", 0) + 1
                state["scale"] = state.get("scale", 1.0) * group["beta"]
                p.sub_(p.grad.sign(), alpha=group["lr"] * state["scale"])
                if group["odd"]:
                    state["history"] = [1]
"""


@pytest.mark.long
@pytest.mark.usefixtures("single_process_group")
def test_a_user_class_trains_and_resumes(tiny: TinyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """The class keeps numbers, which are saved as tensors and loaded as numbers."""
    (tiny.folder / "my_optimizers.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tiny.folder))
    assert problems('name = "my_optimizers:Signs"\nargs.beta = 0.9') == []
    [found] = problems('name = "my_optimizers.Signs"\nargs.bet = 0.9')
    assert mentions(found.message, "beta?", "beta", "odd")
    for found, kept in zip(
        problems('name = "my_optimizers.Signs"\nargs.odd = true'), ("history", "count"), strict=True
    ):
        assert found.key == "optimizer.name"
        assert mentions(found.message, "my_optimizers.Signs", kept, "list")
    own = ["--optimizer.name=my_optimizers.Signs", "--optimizer.args.beta=0.7"]
    expected = train_on_this_rank(tiny.config("--job.name=whole", *own), 0, 1)
    train_on_this_rank(tiny.config("--training.steps=3", *own), 0, 1)
    resumed = train_on_this_rank(tiny.config(*own), 0, 1)
    assert tiny.losses() == tiny.losses("whole")
    for run in (expected, resumed):
        assert [*run.optimizer.state.values()] == [{"steps": 6, "scale": pytest.approx(0.7**6)}] * len(
            run.optimizer.state
        )
        assert all(type(state["steps"]) is int for state in run.optimizer.state.values())


def test_memory_of_states() -> None:
    """36 elements in the embedding, 84 in matrices of layers, 15 in vectors."""
    for text, expected in {
        "": 8 * 135,
        'state_dtype = "bfloat16"': 4 * 135,
        "args.amsgrad = true": 12 * 135,
        'name = "SGD"': 0,
        'name = "SGD"\nargs.momentum = 0.9': 4 * 135,
        'name = "Muon"': 4 * 84 + 8 * 51,
        'name = "examples/soap.py:SOAP"': 8 * 135,  # and preconditioners, whose shapes are others
    }.items():
        assert state_bytes(section(text), Shapes(), dtype="float32") == expected, text
