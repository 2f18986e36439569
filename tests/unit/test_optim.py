"""AdamW with stochastic rounding against PyTorch's, parameter groups, checks of [optimizer], steps that are skipped."""

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import tomli
import torch
from torch import nn
from torch._functorch import config as functorch
from torch.optim._muon import _zeropower_via_newtonschulz
from torch.utils._python_dispatch import TorchDispatchMode

from tests.distributed.test_layouts import on_every_layout, trained, whole
from tests.helpers import TinyRun, run_ranks, train_on_this_rank
from titanlite.checkpoint.state import complete_optimizer_state
from titanlite.config.schema import Optimizer
from titanlite.ingest.prepare import prepare_text
from titanlite.models.llama3 import Llama3
from titanlite.optim import build_optimizer, check_optimizer, update
from titanlite.optim.combined import optimizers_in
from titanlite.optim.groups import collapse_names, format_groups, parameter_groups
from titanlite.optim.muon import Muon, newton_schulz
from titanlite.optim.registry import constructor_options
from titanlite.optim.rounding import SlicedAdamW, _hash, round_stochastically
from titanlite.optim.state_size import state_bytes
from titanlite.preflight import preflight
from titanlite.runtime.errors import ConfigError
from titanlite.runtime.process_group import Ranks
from titanlite.train import build, finish, train

STEPS = 5


def toy(dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(40, 30).to(dtype)


def gradients(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


@pytest.mark.parametrize("size", [2**24, 100])
def test_in_float32_it_is_adamw(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr("titanlite.optim.rounding.SLICE", size)
    ours, theirs = toy(), toy()
    options: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    first = SlicedAdamW(
        [{"params": [*ours.parameters()]}], dict(ours.named_parameters()), state_dtype=torch.float32, seed=0, **options
    )
    second = torch.optim.AdamW(theirs.parameters(), fused=True, **options)
    for step in range(STEPS):
        for model, optimizer in ((ours, first), (theirs, second)):
            gradients(model, step)
            optimizer.step()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        pairs = [(mine, other), *((first.state[mine][name], value) for name, value in second.state[other].items())]
        for one, two in pairs:  # at the ends of slices the kernel rounds otherwise
            assert torch.equal(one, two) if size > 1200 else torch.allclose(one, two, rtol=1e-6, atol=1e-9)


def test_bfloat16_follows_float32_on_average() -> None:
    """Each step is below half of bfloat16's resolution: rounded to nearest, nothing would ever move."""
    count, steps = 20_000, 200
    weight = nn.Parameter(torch.ones(count, 1, dtype=torch.bfloat16))
    optimizer = SlicedAdamW(
        [{"params": [weight]}], {"weight": weight}, state_dtype=torch.bfloat16, seed=0,
        lr=1e-4, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0,
    )  # fmt: skip
    for _ in range(steps):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert (torch.ones(1, dtype=torch.bfloat16) - torch.tensor(1e-4, dtype=torch.bfloat16)).item() == 1
    moved = 1 - weight.float().mean().item()
    assert moved == pytest.approx(steps * 1e-4, rel=0.02)
    state = optimizer.state[weight]
    assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.bfloat16
    assert state["exp_avg_sq"].float().mean().item() == pytest.approx(1 - 0.999**steps, rel=0.02)


def test_rounding_is_right_on_average_and_exact_where_it_can_be() -> None:
    bits = _hash(torch.tensor(7), torch.arange(100_000))
    for value in (1 + 2**-9, -3.3, 1e-30, 7.123e20):
        rounded = round_stochastically(torch.full((len(bits),), value), bits).double()
        assert len(rounded.unique()) == 2
        assert rounded.mean().item() == pytest.approx(value, rel=2e-5)
    exact = torch.tensor([0.0, 1.0, -2.5, float("inf"), float("nan")])
    assert round_stochastically(exact, bits[:5]).float().nan_to_num(5).tolist() == exact.nan_to_num(5).tolist()


def test_random_bits_depend_on_the_index_in_the_whole_tensor() -> None:
    whole = _hash(torch.tensor(3), torch.arange(1000))
    assert torch.equal(_hash(torch.tensor(3), torch.arange(400, 450)), whole[400:450])
    assert not torch.equal(_hash(torch.tensor(4), torch.arange(1000)), whole)
    for shift in (0, 16, 32):
        part = ((whole >> shift) & 0xFFFF).double() / 2**16
        assert part.mean().item() == pytest.approx(0.5, abs=0.03)
        assert part.std().item() == pytest.approx(12**-0.5, abs=0.02)


MATRIX_BY_MUON = '{match = ["weight"], name = "Muon"}'
BIAS_BY_SGD = '{match = ["bias"], name = "SGD", args.momentum = 0.9}'
OPTIMIZERS = {
    "fused": ("", [torch.optim.AdamW]),
    "rounding": ('state_dtype = "bfloat16"', [SlicedAdamW]),
    "plain": ('name = "SGD"\nargs.momentum = 0.9', [torch.optim.SGD]),
    "Muon and AdamW": (f'groups = [{MATRIX_BY_MUON}, {{match = ["bias"]}}]', [Muon, torch.optim.AdamW]),
    "Muon and SGD": (f"groups = [{MATRIX_BY_MUON}, {BIAS_BY_SGD}]", [Muon, torch.optim.SGD]),
}


def section(text: str) -> Optimizer:
    return Optimizer.model_validate(tomli.loads(text))


@pytest.mark.parametrize("case", OPTIMIZERS)
def test_a_skipped_step_changes_nothing(case: str) -> None:
    text, classes = OPTIMIZERS[case]
    model = toy(torch.bfloat16 if case == "rounding" else torch.float32)
    optimizer = build_optimizer(model, section(f"lr = 0.1\n{text}"), seed=0)
    assert [type(it) for it in optimizers_in(optimizer)] == classes

    def everything() -> list[torch.Tensor]:
        states = [value for parameter in model.parameters() for value in optimizer.state[parameter].values()]
        return [tensor.detach().clone() for tensor in [*model.parameters(), *states] if tensor is not None]

    for step, skip in enumerate([False, False, True, False]):
        gradients(model, step)
        if skip:
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad[0] = torch.nan
        before = everything()
        update(optimizer, skip=torch.tensor(skip))
        after = everything()
        if step:  # before the first there is no state
            equal = [torch.equal(old, new) for old, new in zip(before, after, strict=True)]
            assert all(equal) if skip else not any(equal)
    assert all(tensor.isfinite().all() for tensor in everything())


@pytest.mark.parametrize("shape", [(6, 20), (20, 6), (8, 8)])
def test_newton_schulz(shape: tuple[int, int]) -> None:
    """A polynomial of the singular values; in bfloat16 the bits are those of torch."""
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    coefficients = (3.4445, -4.7750, 2.0315)
    found = newton_schulz(matrix.clone(), coefficients=coefficients, steps=5, eps=1e-7)
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    values = values / values.square().sum().sqrt()
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    assert (found - left @ values.diag() @ right).abs().max() < 1e-5
    theirs = _zeropower_via_newtonschulz(matrix, coefficients, 5, 1e-7)
    assert torch.equal(newton_schulz(matrix.bfloat16(), coefficients=coefficients, steps=5, eps=1e-7), theirs)
    assert (found - theirs).abs().max() < 0.05


def test_defaults_of_muon_are_those_of_torch() -> None:
    ours, theirs = (inspect.signature(it).parameters for it in (Muon, torch.optim.Muon))
    assert {name for name, it in ours.items() if it.default != theirs.get(name, it).default} == {"adjust_lr_fn"}


class CountWaits(TorchDispatchMode):
    """Count how often the host asks for the value of a tensor."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("case", "expected"), [("fused", 0), ("Muon and AdamW", 0), ("Muon and SGD", 1), ("plain", 1)])
def test_an_update_waits_for_no_value_unless_it_must(case: str, expected: int) -> None:
    model = toy()
    optimizer = build_optimizer(model, section(OPTIMIZERS[case][0]), seed=0)
    gradients(model, 0)
    with CountWaits() as waits:
        update(optimizer, skip=torch.tensor(False))
    assert waits.count == expected


class Shapes(nn.Module):
    """Matrices in layers and outside, a stack of matrices, vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 5) for _ in range(3))
        self.layers[0].experts = nn.Parameter(torch.ones(2, 3, 4))


def planned(text: str) -> list[tuple[str, str, float, float, list[str]]]:
    groups = parameter_groups(section(text), dict(Shapes().named_parameters()))
    return [(it.label, it.name, it.lr, it.weight_decay, collapse_names(it.parameters)) for it in groups]


WEIGHTS, BIASES, EXPERTS = "layers.*.weight x3", "layers.*.bias x3", "layers.0.experts"


def test_an_update_that_compiles_itself_does_not_use_the_cache() -> None:
    """PyTorch's cache on disk confuses shards: see tests/unit/test_optim_8bit.py."""
    seen = []

    class Own(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            seen.append(functorch.enable_autograd_cache)

    before = functorch.enable_autograd_cache
    update(Own([nn.Parameter(torch.ones(2))]), skip=torch.tensor(False))
    assert seen == [False]
    assert functorch.enable_autograd_cache == before


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
    assert format_groups(parameter_groups(section(GROUPS), dict(Shapes().named_parameters()))) == [
        "group               optimizer   lr  weight decay  tensors  parameters  for example",
        "groups.0: matrices  AdamW      0.1           0.1        4          84  layers.*.weight x3, layers.0.experts",
        "groups.0: vectors   AdamW      0.1             0        3          15  layers.*.bias x3",
        "groups.1            SGD        0.5           0.3        1          36  embedding.weight",
    ]
    adamw, sgd = optimizers_in(build_optimizer(Shapes(), section(GROUPS), seed=0))
    first, second, third = [*adamw.param_groups, *sgd.param_groups]
    assert (first["lr"], first["weight_decay"], first["amsgrad"], first["fused"]) == (0.1, 0.1, True, True)
    assert (second["lr"], second["weight_decay"]) == (0.1, 0.0)
    assert (third["lr"], third["weight_decay"], third["momentum"]) == (0.5, 0.3, 0.9)


@pytest.mark.usefixtures("single_process_group")
def test_rates_of_groups_follow_the_schedule_in_proportion(tiny: TinyRun, capfd: pytest.CaptureFixture[str]) -> None:
    groups = '[{match = ["layers.*"], lr = 0.004}, {match = ["tok*"], lr = 0.0, name = "SGD"}, {match = ["head*"]}]'
    config = tiny.config(f"--optimizer.groups={groups}", "--lr_scheduler.decay_ratio=0.5", "--checkpoint.enable=false")
    ranks, device = Ranks(0, 1, 0, 1), torch.device("cpu")
    run = build(config, preflight(config, ranks, device), ranks=ranks, device=device, prepare_text=prepare_text)
    rates: list[list[float]] = []
    run.optimizer.register_step_pre_hook(lambda *_: rates.append([it["lr"] for it in run.optimizer.param_groups]))
    embedding = run.model.get_parameter("tok_embeddings.weight")
    first = whole(embedding)
    train(run)
    finish(run)
    base = [record["lr"] for record in tiny.records()]
    assert base == pytest.approx([0.005, 0.01, 0.01, 0.0075, 0.005, 0.0025])
    assert rates == [pytest.approx([0.4 * lr, 0.4 * lr, lr, lr, 0.0]) for lr in base]
    assert torch.equal(whole(embedding), first)


def problems(text: str, dtype: str = "float32") -> list[str]:
    return [str(problem) for problem in check_optimizer(section(text), Shapes(), dtype=dtype)]


def test_each_parameter_is_in_exactly_one_group() -> None:
    assert problems('groups = [{match = ["layers.*"]}, {match = ["*.weight"]}, {match = ["norm*"]}]') == [
        "optimizer.groups: groups 0 and 1 match the same: layers.*.weight x3",
        "optimizer.groups.2.match: matches no parameter; there are embedding.weight, layers.*.weight x3, "
        "layers.*.bias x3, layers.0.experts",
    ]
    found = problems('name = "Muon"\ngroups = [{match = ["layers.*"]}]')
    assert found == [
        "optimizer.groups: no group matches embedding.weight",
        "optimizer.groups.0.name: Muon is for matrices; give these a group with another optimizer: layers.*.bias x3",
    ]
    with pytest.raises(ConfigError, match="no group matches embedding"):
        build_optimizer(Shapes(), section('groups = [{match = ["layers.*"]}]'), seed=0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('name = "adamw"', "optimizer.name: unknown value 'adamw', did you mean AdamW? (known: ASGD, Adadelta, "),
        ('name = "LBFGS"', "optimizer.name: LBFGS computes the loss several times a step: choose another one"),
        ('name = "torch.optim.Rprop"', "optimizer.name: Rprop of PyTorch cannot update sharded parameters: choose "),
        ('name = "torch.optim.Muon"', "optimizer.name: Muon of PyTorch cannot update sharded parameters"),
        ('name = "Muon"\nargs.ns_coefficients = ["a", "b", "c"]', "optimizer.args: Muon: "),
        ('name = "SGD"\nargs = {fused = true, momentum = 0.9}', "optimizer.args.fused: PyTorch's fused SGD starts"),
        ('name = "no.such:Thing"', "optimizer.name: cannot import no.such: "),
        (
            'name = "collections.Counter"',
            "optimizer.name: collections.Counter is not a subclass of torch.optim.Optimizer",
        ),
        (
            'name = "SGD"\nargs.momentun = 0.9',
            "optimizer.args.momentun: unknown key 'momentun', did you mean momentum? (SGD takes momentum, dampening, ",
        ),
        ("args.lr = 0.1", "optimizer.args.lr: is set by lr of [optimizer]"),
        ("args.betas = [0.9, 0.9]", "optimizer.args.betas: is set by beta1 and beta2 of [optimizer]"),
        ('name = "SGD"\nargs.momentum = -1.0', "optimizer.args: SGD: Invalid momentum value: -1.0"),
        ('name = "Muon"\nargs.adjust_lr_fn = "rms"', "optimizer.args: Muon: adjust_lr_fn must be match_rms_adamw or "),
        ('name = "SGD"\nbeta2 = 0.99', "optimizer.beta2: is not for SGD"),
        ('name = "SGD"\nstate_dtype = "bfloat16"', "optimizer.state_dtype: is not for SGD"),
        (
            'groups = [{match = ["*"], args.foo = 1}]',
            "optimizer.groups.0.args.foo: unknown key 'foo' (AdamW takes amsgr",
        ),
        ('groups = [{match = ["*"], name = "Sgd"}]', "optimizer.groups.0.name: unknown value 'Sgd', did you mean SGD?"),
        ('lr = 0.0\ngroups = [{match = ["*"], lr = 0.1}]', "optimizer.groups.0.lr: is scheduled in proportion to "),
    ],
)
def test_problems(text: str, expected: str) -> None:
    [found] = problems(text)
    assert found.startswith(expected)


def test_bfloat16_weights_need_an_optimizer_that_rounds() -> None:
    assert problems("", "bfloat16") == []
    expected = 'would lose small updates of bfloat16 weights: set training.dtype = "float32", or use AdamW'
    for name in ("Muon", "torch.optim.SGD"):
        assert problems(f'name = "{name}"', "bfloat16") == [f"optimizer.name: {name} {expected}"]
    assert problems("args.amsgrad = true", "bfloat16") == [
        "optimizer.args: AdamW takes none where weights or moments are bfloat16"
    ]


def test_examples_of_the_guide_are_valid() -> None:
    examples = re.findall(r"```toml\n(.*?)```", Path("docs/optimizers.md").read_text(), re.DOTALL)
    assert len(examples) == 4
    with torch.device("meta"):
        model = Llama3(Llama3.flavors["debug"])  # pyright: ignore[reportArgumentType]
    for example in examples:
        optimizer = Optimizer.model_validate(tomli.loads(example)["optimizer"])
        assert check_optimizer(optimizer, model, dtype="float32") == []


def test_betas_are_given_to_classes_like_adam_only() -> None:
    text = "lr = 0.5\nbeta1 = 0.8\neps = 1e-5\n"
    assert constructor_options(torch.optim.NAdam, section(text), {"momentum_decay": 0.1}) == {
        "lr": 0.5, "weight_decay": 0.1, "betas": (0.8, 0.95), "eps": 1e-5, "momentum_decay": 0.1,
    }  # fmt: skip
    assert constructor_options(torch.optim.Adadelta, section(text), {}) == {"lr": 0.5, "weight_decay": 0.1}
    assert constructor_options(torch.optim.AdamW, section(""), {"fused": False})["fused"] is False


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


@pytest.mark.usefixtures("single_process_group")
def test_a_user_class_trains_and_resumes(tiny: TinyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """The class keeps numbers, which are saved as tensors and loaded as numbers."""
    (tiny.folder / "my_optimizers.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tiny.folder))
    assert problems('name = "my_optimizers:Signs"\nargs.beta = 0.9') == []
    assert problems('name = "my_optimizers.Signs"\nargs.bet = 0.9')[0].endswith(
        "did you mean beta? (Signs takes beta, odd)"
    )
    assert problems('name = "my_optimizers.Signs"\nargs.odd = true') == [
        f"optimizer.name: my_optimizers.Signs keeps {what} as list: only tensors and numbers of a parameter are saved"
        for what in ("history", "count of a group")
    ]
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
    }.items():
        assert state_bytes(section(text), Shapes(), dtype="float32") == expected, text


LOW = ["--training.dtype=bfloat16", "--optimizer.state_dtype=bfloat16", "--training.mixed_precision_param=bfloat16"]


@pytest.mark.slow
def test_bfloat16_runs_are_equal_on_every_layout_and_after_a_resume(tiny: TinyRun) -> None:
    results = on_every_layout(trained, tiny, *LOW)
    reference = tiny.losses("run-1-1")
    assert reference[-1] < 4.5
    for replicate, shard in results:
        assert tiny.losses(f"run-{replicate}-{shard}") == pytest.approx(reference, rel=2e-3)
    [whole] = results[1, 1]
    run_ranks(trained, 1, tiny.config("--job.name=halves", "--training.steps=3", *LOW))
    [resumed] = run_ranks(trained, 1, tiny.config("--job.name=halves", *LOW))
    assert all((resumed[name] == value).all() for name, value in whole.items())


class StateFromStart(torch.optim.SGD):
    """SGD that has state before the first step."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["count"] = torch.zeros(())

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["count"] += 1
        super().step()


def test_states_that_are_there_from_the_start_are_kept_and_the_others_are_completed() -> None:
    model = toy()
    text = f'groups = [{{match = ["weight"]}}, {{match = ["bias"], name = "{__name__}.StateFromStart"}}]'
    optimizer = build_optimizer(model, section(text), seed=0)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    complete_optimizer_state(model, optimizer)
    assert {*optimizer.state[model.weight]} == {"step", "exp_avg", "exp_avg_sq"}
    assert {*optimizer.state[model.bias]} >= {"count"}
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    gradients(model, 0)
    update(optimizer, skip=torch.tensor(False))
    assert optimizer.state[model.bias]["count"] >= 1
