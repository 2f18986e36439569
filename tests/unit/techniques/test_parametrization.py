"""Width and depth transfer: the rules, against references written out by hand, and what is refused."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.helpers import TinyRun, mentions
from tests.support.whole_runs import assert_equal, trained
from titanlite.checkpoint.resume import resume_settings
from titanlite.checks.preflight import preflight
from titanlite.loss import TokenLoss
from titanlite.models.base import Model, ModelArgs, Roles, build_on_meta
from titanlite.models.initial import Constant, InitialValues, Normal, Scaled
from titanlite.models.multi_token import look_ahead
from titanlite.models.registry import resolve_model
from titanlite.optim import build_optimizer
from titanlite.optim.groups import parameter_groups
from titanlite.optim.muon import Muon
from titanlite.parallelize.materialize import materialize
from titanlite.runtime.errors import ConfigError
from titanlite.runtime.process_group import Ranks
from titanlite.schema import Config
from titanlite.step import model_arguments
from titanlite.techniques import choose_trained, every_technique

# Twice the base width, three times the base depth
SIZE = ["dim=64", "n_layers=6", "n_heads=4", "n_kv_heads=2", "hidden_dim=96", "vocab_size=259", "max_seq_len=32"]
SHAPE = [f"--model.args.{name}" for name in SIZE]
RULES = {
    "mup": ["--optimizer.parametrization=mup", "--optimizer.base_width=32"],
    "completep": [
        "--optimizer.parametrization=completep", "--optimizer.base_width=32", "--optimizer.base_depth=2",
    ],
}  # fmt: skip
TIMES = {"mup": (2.0, 1.0), "completep": (2.0, 3.0)}
"""Width and depth of the model over those of the base, as far as each rule counts them."""


def meta_model(config: Config) -> Model:
    model = resolve_model(config.model.name, config.model.flavor, config.model.args, config.model.file).build()
    choose_trained(model, config)
    return model


def drawn(config: Config) -> Model:
    model = meta_model(config)
    materialize(model, device=torch.device("cpu"), dtype=torch.float32, seed=0)
    return model


def options_of(config: Config, model: Model) -> dict[str, tuple[float, float, float | None]]:
    """(lr, weight decay, eps) of each parameter of the last block and outside of blocks."""
    return {
        name.removeprefix("layers.5."): (group.lr, group.weight_decay, group.eps)
        for group in parameter_groups(config.optimizer, model)
        for name in group.parameters
        if name.startswith("layers.5.") or not name.startswith("layers.")
    }


OPTIONS = ["--optimizer.lr=0.12", "--optimizer.weight_decay=0.1", "--optimizer.eps=6e-8"]


@pytest.mark.parametrize(
    ("adjust", "hidden", "router"), [("match_rms_adamw", 2**-0.5, 0.5), ("original", 1.0, 2**-0.5)]
)
def test_options_of_muon_keep_the_spectral_rule(tiny: TinyRun, adjust: str, hidden: float, router: float) -> None:
    """Spectral norms of updates: as before where both dimensions grow, 1/sqrt(2) where only inputs do."""
    muon = ["--optimizer.name=Muon", f"--optimizer.args.adjust_lr_fn={adjust}"]
    experts = ["--model.name=qwen3_moe", "--model.args.n_experts=8", "--model.args.head_dim=16"]
    config = tiny.config(*SHAPE, *OPTIONS, *RULES["completep"], *muon, *experts)
    found = options_of(config, meta_model(config))
    for name in ("attention.wq.weight", "feed_forward.w1", "feed_forward.w3"):
        assert found[name] == pytest.approx((0.12 * hidden, 0.1 / hidden, None)), name
    for name in ("attention.wo.weight", "feed_forward.w2"):
        assert found[name] == pytest.approx((0.12 * hidden / 3, 0.1 * 3 / hidden, None)), name
    assert found["feed_forward.router"] == pytest.approx((0.12 * router, 0.1 / router, None))
    assert found["tok_embeddings.weight"] == pytest.approx((0.12, 0.1, 3e-8))
    assert found["head.output.weight"] == pytest.approx((0.06, 0.2, 6e-8))


def multiplied(factor: float) -> Callable[[nn.Module, Any, Tensor], Tensor]:
    return lambda module, inputs, output: output * factor


def reference(config: Config, plain: Model, m: float, depth: float) -> torch.optim.Optimizer:
    """Change a plain model in place, as the papers have it: with multipliers in the forward pass; return its optimizer.

    Its initial values become those of table 1 of CompleteP, with the constants of this model at its base size.
    """
    lr, decay, eps = config.optimizer.lr, config.optimizer.weight_decay, config.optimizer.eps
    plain.get_submodule("head.output").register_forward_hook(multiplied(1 / m))
    groups: dict[str, list[nn.Parameter]] = {}
    for name, parameter in plain.named_parameters():
        kind, is_further = name.split(".")[-2], name.startswith("layers.6.")  # which is one block at any depth
        if kind in ("wo", "w2"):
            times = multiplied(1 if is_further else 1 / depth)
            plain.get_submodule(name.removesuffix(".weight")).register_forward_hook(times)
            parameter.data *= (depth / m) ** 0.5  # that of 1/depth of the layers, of width / m
        elif kind in ("wq", "wk", "wv", "w1", "w3", "join"):
            parameter.data *= m**-0.5
        role = "norms" if "norm" in kind else "outside" if kind in ("tok_embeddings", "output") else "hidden"
        role = "final norm" if name.startswith("head.") and "norm" in kind else role
        groups.setdefault(f"further {role}" if is_further else role, []).append(parameter)
    further = [groups.get(f"further {role}", []) for role in ("hidden", "norms")]
    groups["final norm"] += further[1]
    adamw = [
        {"params": groups["outside"], "lr": lr, "weight_decay": decay, "eps": eps / m},
        {"params": groups["final norm"], "lr": lr, "weight_decay": 0.0, "eps": eps / m},
        {"params": groups["norms"], "lr": lr, "weight_decay": 0.0, "eps": eps / m / depth},
        {"params": groups["hidden"], "lr": lr / m, "weight_decay": decay * m, "eps": eps / m / depth},
        {"params": further[0], "lr": lr / m, "weight_decay": decay * m, "eps": eps / m},
    ]
    if config.optimizer.name == "AdamW":
        return torch.optim.AdamW(adamw, betas=(0.9, 0.95))
    muon = Muon(groups["hidden"] + further[0], lr=lr / m**0.5, weight_decay=decay * m**0.5, ns_dtype="float32")
    rest = torch.optim.AdamW(adamw[:3], betas=(0.9, 0.95))
    muon.register_step_post_hook(lambda *_: rest.step())
    return muon


def logits_while_training(model: Model, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    tokens = torch.randint(0, 259, (4, 33), generator=torch.Generator().manual_seed(3))
    batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}
    batch = look_ahead(batch) if len(model.layers) == 7 else batch
    found = []

    def mean(hidden: Tensor, _: Tensor, *, labels_BL: Tensor) -> TokenLoss:
        logits = model.get_submodule("head.output")(hidden)
        found.append(logits.detach())
        loss = F.cross_entropy(logits.flatten(0, 1), labels_BL.flatten())
        return TokenLoss(loss, loss.detach())

    inputs, arguments = model_arguments(batch, mean, {})
    for _ in range(5):
        model(inputs, **arguments).total.backward()
        optimizer.step()
        for parameter in model.parameters():
            parameter.grad = None
    return found


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["AdamW", "Muon"])
@pytest.mark.parametrize(("rule", "weight"), [("mup", 0), ("completep", 0), ("completep", 0.3)])
def test_training_equals_the_papers_with_multipliers(tiny: TinyRun, rule: str, weight: float, optimizer: str) -> None:
    """An eps as large as gradients, and a large weight decay, so that their factors count."""
    options = ["--optimizer.eps=1e-3", "--optimizer.weight_decay=3.0", f"--optimizer.name={optimizer}"]
    options += ["--optimizer.args.ns_dtype=float32"] if optimizer == "Muon" else []
    shape = [*SHAPE, f"--training.multi_token_weight={weight}"]
    config = tiny.config(*shape, *options, *RULES[rule])
    model, plain = drawn(config), drawn(tiny.config(*shape))
    standard = logits_while_training(drawn(tiny.config(*shape)), reference(config, drawn(tiny.config(*shape)), 1, 1))
    expected = logits_while_training(plain, reference(config, plain, *TIMES[rule]))
    found = logits_while_training(model, build_optimizer(model, config.optimizer, seed=0))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    assert (found[-1] - found[0]).std() > 0.1
    assert (found[-1] - standard[-1]).std() > 0.1


@pytest.mark.long
@pytest.mark.usefixtures("single_process_group")
def test_the_base_size_has_the_bits_of_a_plain_run(tiny: TinyRun) -> None:
    """Of matrices that Muon updates, and of others, which AdamW does."""
    options = ["--optimizer.name=Muon", "--optimizer.args.ns_dtype=float32", "--training.steps=4"]
    base = ["--optimizer.parametrization=completep", "--optimizer.base_width=42", "--optimizer.base_depth=1"]
    plain = trained(tiny.config(*options, "--job.name=plain"))
    assert_equal(trained(tiny.config(*options, *base, "--job.name=base")), plain)
    assert tiny.losses("base") == tiny.losses("plain")


def test_another_base_is_another_experiment(tiny: TinyRun) -> None:
    args = resolve_model("llama3", "debug", {}).args
    plain, mup = (resume_settings(tiny.config(*options), model_args=args, inputs={}) for options in ([], RULES["mup"]))
    assert mup == plain | {"optimizer.parametrization": "mup", "optimizer.base_width": 32}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--optimizer.parametrization=mup"], ["optimizer.base_width"]),
        (["--optimizer.base_width=32"], ["optimizer.base_width"]),
        (["--optimizer.parametrization=mup", "--optimizer.base_width=32", "--optimizer.base_depth=2"],
         ["optimizer.base_depth"]),
        (["--optimizer.parametrization=completep", "--optimizer.base_width=32"], ["optimizer.base_depth"]),
        ([*RULES["mup"], "--optimizer.base_width=40"], ["optimizer.base_width", 40, 32]),
        ([*RULES["mup"], "--optimizer.base_width=0"], ["optimizer.base_width"]),
        ([*RULES["mup"], "--model.args.tied_head=true"], ["model.args.tied_head", "tok_embeddings.weight"]),
        ([*RULES["mup"], "--optimizer.name=SGD"], ["optimizer.parametrization", "SGD", "AdamW"]),
        ([*RULES["mup"], '--optimizer.groups=[{match = ["*"], name = "Muon"}]'], ["optimizer.groups.0.name"]),
        ([*RULES["mup"], '--optimizer.groups=[{match=["tok*"], name="Muon"}, {match=["[!t]*"]}]'],
         ["optimizer.parametrization", "Muon", "tok_embeddings.weight"]),
        ([*RULES["mup"], "--lora.rank=2"], ["optimizer.parametrization", "lora.rank"]),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(tiny: TinyRun, options: list[str], words: list[Any]) -> None:
    with pytest.raises(ConfigError) as error:
        preflight(tiny.config(*SHAPE, *options), Ranks(0, 1, 0, 1), torch.device("cpu"))
    [problem] = error.value.problems if "groups.0" not in words[0] else error.value.problems[:1]
    assert mentions(f"{problem.key} {problem.message}", *words)
    assert "\n" not in problem.message


@dataclass(frozen=True, kw_only=True)
class OwnArgs(ModelArgs):
    vocab_size: int = 97
    max_seq_len: int = 32
    size: int = 64
    blocks: int = 6

    def resized(self, *, width: int, depth: int) -> "OwnArgs":
        return replace(self, size=width, blocks=depth)


class Own(Model):
    roles: ClassVar[Roles] = {"layers.*.1.*": "residual"}

    def __init__(self, args: OwnArgs) -> None:
        super().__init__(args)
        size = args.size
        self.embedding: nn.Module = nn.Embedding(args.vocab_size, size)
        blocks = (nn.Sequential(nn.Linear(size, 4 * size), nn.Linear(4 * size, size)) for _ in range(args.blocks))
        self.layers = nn.ModuleList(blocks)
        self.head = nn.Linear(size, args.vocab_size, bias=False)

    def forward(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError

    def init_weight(self, name: str, shape: torch.Size) -> InitialValues:
        return Normal(std=shape[-1] ** -0.5) if len(shape) > 1 else Constant(0.5)


class WithoutRoles(Own):
    roles: ClassVar[Roles] = {}


class WithMoreThanItsBase(Own):
    def __init__(self, args: OwnArgs) -> None:
        super().__init__(args)
        if args.blocks > 2:
            self.embedding.register_parameter("extra", nn.Parameter(torch.empty(8, args.size)))


class WithoutInput(Own):
    def __init__(self, args: OwnArgs) -> None:
        super().__init__(args)
        self.embedding = nn.Identity()


def test_a_model_of_ones_own_declares_its_branches(tiny: TinyRun) -> None:
    """Roles by pattern, also of biases; sizes by its own fields. Values of 1/sqrt(width) stay those of the rule."""
    config = tiny.config(*OPTIONS, *RULES["completep"])
    model = build_on_meta(Own, OwnArgs())
    choose_trained(model, config)
    expected = {
        "embedding.weight": (0.12, 0.1, 3e-8), "head.weight": (0.06, 0.2, 6e-8),
        "0.weight": (0.06, 0.2, 1e-8), "0.bias": (0.12, 0.0, 1e-8),
        "1.weight": (0.02, 0.6, 3e-8), "1.bias": (0.04, 0.0, 3e-8),
    }  # fmt: skip
    assert options_of(config, model) == {name: pytest.approx(values) for name, values in expected.items()}
    initial = {name: scaling.initial for name, scaling in model.scaling.items()}
    assert initial["layers.5.0.weight"] == Scaled(Normal(std=32**-0.5), 2**-0.5)
    assert initial["layers.5.1.weight"] == Scaled(Normal(std=128**-0.5), 2**-0.5 / 3)
    assert initial["embedding.weight"] == Normal(std=32**-0.5)
    for wrong, words in (
        (WithoutRoles, ["WithoutRoles.roles", "completep"]),
        (WithMoreThanItsBase, ["WithMoreThanItsBase", "embedding.extra"]),
        (WithoutInput, ["WithoutInput", "input"]),
    ):
        with pytest.raises(ConfigError) as error:
            choose_trained(build_on_meta(wrong, OwnArgs()), config)
        [problem] = error.value.problems
        assert mentions(problem.message, *words)


def test_inspect_shows_the_options_of_each_parameter(tiny: TinyRun) -> None:
    [technique] = [technique for technique in every_technique() if technique.option == "optimizer.parametrization"]
    config = tiny.config(*SHAPE, *OPTIONS, *RULES["completep"])
    model = meta_model(config)
    facts = technique.parameter_facts(model, config)
    found = facts[model.get_parameter("layers.5.feed_forward.w2.weight")]
    assert found == {"role": "residual", "initial_std": pytest.approx(0.01 / 3 / 2**0.5), "eps": pytest.approx(3e-8)}
    assert technique.parameter_facts(meta_model(tiny.config(*SHAPE)), tiny.config(*SHAPE)) == {}
