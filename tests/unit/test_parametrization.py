"""Width and depth transfer: the rules, against references written out by hand, and what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers import TinyRun, built, mentions
from tests.whole_runs import assert_equal, trained
from titanlite.models.base import Model
from titanlite.models.initial import Normal, Scaled
from titanlite.models.registry import resolve_model
from titanlite.optim import build_optimizer
from titanlite.optim.groups import parameter_groups
from titanlite.optim.muon import Muon
from titanlite.parallelize.materialize import materialize
from titanlite.runtime.errors import ConfigError, UserError
from titanlite.schema import Config
from titanlite.techniques import choose_trained, every_technique

# Twice the base width, three times the base depth
SIZE = ["dim=64", "n_layers=6", "n_heads=4", "n_kv_heads=2", "hidden_dim=96", "vocab_size=259", "max_seq_len=32"]
SHAPE = [f"--model.args.{it}" for it in SIZE]
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
HIDDEN = [f"attention.{it}.weight" for it in ("wq", "wk", "wv")] + [f"feed_forward.w{it}.weight" for it in "13"]
RESIDUAL = ["attention.wo.weight", "feed_forward.w2.weight"]
BLOCK_NORMS = ["attention_norm.weight", "ffn_norm.weight"]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("mup", {"tok_embeddings.weight": (0.12, 0.1, 3e-8), "head.output.weight": (0.06, 0.2, 6e-8),
                 "head.norm.weight": (0.12, 0.0, 3e-8), **dict.fromkeys(BLOCK_NORMS, (0.12, 0.0, 3e-8)),
                 **dict.fromkeys(HIDDEN, (0.06, 0.2, 3e-8)), **dict.fromkeys(RESIDUAL, (0.06, 0.2, 3e-8))}),
        ("completep", {"tok_embeddings.weight": (0.12, 0.1, 3e-8), "head.output.weight": (0.06, 0.2, 6e-8),
                       "head.norm.weight": (0.12, 0.0, 3e-8), **dict.fromkeys(BLOCK_NORMS, (0.12, 0.0, 1e-8)),
                       **dict.fromkeys(HIDDEN, (0.06, 0.2, 1e-8)), **dict.fromkeys(RESIDUAL, (0.02, 0.6, 3e-8))}),
    ],
)  # fmt: skip
def test_options_of_adamw_are_those_of_the_tables(tiny: TinyRun, rule: str, expected: dict[str, Any]) -> None:
    config = tiny.config(*SHAPE, *OPTIONS, *RULES[rule])
    found = options_of(config, meta_model(config))
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name] == pytest.approx(values, rel=1e-12), name
    assert len(parameter_groups(config.optimizer, meta_model(config))) == {"mup": 4, "completep": 6}[rule]


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


@pytest.mark.long
@pytest.mark.parametrize(("rule", "residual"), [("mup", 0.02 / 12**0.5), ("completep", 0.02 / 4**0.5 / 3)])
def test_initial_values(tiny: TinyRun, rule: str, residual: float) -> None:
    """Hidden matrices have the base's values / sqrt(2), the head half of them, residual branches 1/3 in addition."""
    expected = {"tok_embeddings.weight": 1.0, "head.output.weight": 0.01, "head.norm.weight": 0.0}
    expected |= dict.fromkeys(HIDDEN, 0.02 / 2**0.5) | dict.fromkeys(RESIDUAL, residual / 2**0.5)
    config = tiny.config(*SHAPE, *RULES[rule])
    parameters = dict(drawn(config).named_parameters())
    for name, std in expected.items():
        parameter = parameters[name] if name in parameters else parameters[f"layers.5.{name}"]
        assert parameter.std().item() == pytest.approx(std, rel=0.04), name
    assert parameters["head.norm.weight"].eq(1).all()


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
        kind = name.split(".")[-2]
        if kind in ("wo", "w2"):
            plain.get_submodule(name.removesuffix(".weight")).register_forward_hook(multiplied(1 / depth))
            parameter.data *= (depth / m) ** 0.5  # that of 1/depth of the layers, of width / m
        elif kind in ("wq", "wk", "wv", "w1", "w3"):
            parameter.data *= m**-0.5
        role = "norms" if "norm" in kind else "outside" if kind in ("tok_embeddings", "output") else "hidden"
        role = "final norm" if name == "head.norm.weight" else role
        groups.setdefault(role, []).append(parameter)
    adamw = [
        {"params": groups["outside"], "lr": lr, "weight_decay": decay, "eps": eps / m},
        {"params": groups["final norm"], "lr": lr, "weight_decay": 0.0, "eps": eps / m},
        {"params": groups["norms"], "lr": lr, "weight_decay": 0.0, "eps": eps / m / depth},
        {"params": groups["hidden"], "lr": lr / m, "weight_decay": decay * m, "eps": eps / m / depth},
    ]
    if config.optimizer.name == "AdamW":
        return torch.optim.AdamW(adamw, betas=(0.9, 0.95))
    muon = Muon(groups["hidden"], lr=lr / m**0.5, weight_decay=decay * m**0.5, ns_dtype="float32")
    rest = torch.optim.AdamW(adamw[:3], betas=(0.9, 0.95))
    muon.register_step_post_hook(lambda *_: rest.step())
    return muon


def logits_while_training(model: Model, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    tokens = torch.randint(0, 259, (4, 33), generator=torch.Generator().manual_seed(3))
    found = []
    for _ in range(5):
        logits = model(tokens[:, :-1])
        found.append(logits.detach())
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        for parameter in model.parameters():
            parameter.grad = None
    return found


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["AdamW", "Muon"])
@pytest.mark.parametrize("rule", ["mup", "completep"])
def test_training_equals_the_papers_with_multipliers(tiny: TinyRun, rule: str, optimizer: str) -> None:
    """An eps as large as gradients, and a large weight decay, so that their factors count."""
    options = ["--optimizer.eps=1e-3", "--optimizer.weight_decay=3.0", f"--optimizer.name={optimizer}"]
    options += ["--optimizer.args.ns_dtype=float32"] if optimizer == "Muon" else []
    config = tiny.config(*SHAPE, *options, *RULES[rule])
    model, plain = drawn(config), drawn(tiny.config(*SHAPE))
    standard = logits_while_training(drawn(tiny.config(*SHAPE)), reference(config, drawn(tiny.config(*SHAPE)), 1, 1))
    expected = logits_while_training(plain, reference(config, plain, *TIMES[rule]))
    found = logits_while_training(model, build_optimizer(model, config.optimizer, seed=0))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    assert (found[-1] - found[0]).std() > 0.1
    assert (found[-1] - standard[-1]).std() > 0.1


@pytest.mark.long
@pytest.mark.usefixtures("single_process_group")
@pytest.mark.parametrize("optimizer", ["AdamW", "Muon"])
def test_the_base_size_has_the_bits_of_a_plain_run(tiny: TinyRun, optimizer: str) -> None:
    options = [f"--optimizer.name={optimizer}", *(["--optimizer.args.ns_dtype=float32"] * (optimizer == "Muon"))]
    base = ["--optimizer.parametrization=completep", "--optimizer.base_width=42", "--optimizer.base_depth=1"]
    plain = trained(tiny.config(*options, "--job.name=plain"))
    assert_equal(trained(tiny.config(*options, *base, "--job.name=base")), plain)
    assert tiny.losses("base") == tiny.losses("plain")


@pytest.mark.long
@pytest.mark.usefixtures("single_process_group")
def test_another_base_does_not_resume(tiny: TinyRun) -> None:
    base = ["--optimizer.parametrization=mup", "--optimizer.base_width=42", "--training.steps=2"]
    trained(tiny.config(*base))
    for options in ([], ["--optimizer.parametrization=mup", "--optimizer.base_width=84"]):
        with pytest.raises(UserError) as error:
            built(0, 1, tiny.config(*options))
        assert mentions(str(error.value), "optimizer.base_width", "42")


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
@pytest.mark.usefixtures("single_process_group")
def test_what_does_not_fit_is_refused(tiny: TinyRun, options: list[str], words: list[Any]) -> None:
    with pytest.raises(ConfigError) as error:
        built(0, 1, tiny.config(*SHAPE, *options))
    [problem] = error.value.problems if "groups.0" not in words[0] else error.value.problems[:1]
    assert mentions(f"{problem.key} {problem.message}", *words)
    assert "\n" not in problem.message


def test_a_model_of_ones_own_declares_its_branches(tiny: TinyRun, tmp_path: Path) -> None:
    """Roles by pattern, also of biases; sizes by its own fields. Values of 1/sqrt(width) stay those of the rule."""
    file = tmp_path / "own.py"
    source = """
from dataclasses import dataclass, replace
from torch import nn
from titanlite.models.base import Model, ModelArgs
from titanlite.models.initial import Constant, Normal

@dataclass(frozen=True, kw_only=True)
class Args(ModelArgs):
    vocab_size: int = 97
    max_seq_len: int = 32
    size: int = 64
    blocks: int = 6

    def resized(self, *, width, depth):
        return replace(self, size=width, blocks=depth)

class Block(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.up, self.down = nn.Linear(size, 4 * size), nn.Linear(4 * size, size)

class Own(Model):
    flavors = {"debug": Args()}
    roles = ROLES

    def __init__(self, args):
        super().__init__(args)
        self.embedding = nn.Embedding(args.vocab_size, args.size)
        self.layers = nn.ModuleList(Block(args.size) for _ in range(args.blocks))
        self.head = nn.Linear(args.size, args.vocab_size, bias=False)

    def forward(self, tokens, loss=None, *, documents=None):
        raise NotImplementedError

    def init_weight(self, name, shape):
        return Normal(std=shape[-1] ** -0.5) if len(shape) > 1 else Constant(0.5)

    def flops_per_token(self, seq_len, *, causal=False):
        return 1.0
"""
    file.write_text(source.replace("ROLES", '{"layers.*.down.*": "residual"}'))
    own = ["--model.file", str(file), "--model.args={}"]
    text = tiny.toml.read_text()
    tiny.toml.write_text(text[: text.index("[model.args]")] + text[text.index("[training]") :])
    config = tiny.config(*own, *OPTIONS, *RULES["completep"])
    model = meta_model(config)
    assert options_of(config, model) == {
        name: pytest.approx(values)
        for name, values in {
            "embedding.weight": (0.12, 0.1, 3e-8), "head.weight": (0.06, 0.2, 6e-8),
            "up.weight": (0.06, 0.2, 1e-8), "up.bias": (0.12, 0.0, 1e-8),
            "down.weight": (0.02, 0.6, 3e-8), "down.bias": (0.04, 0.0, 3e-8),
        }.items()
    }  # fmt: skip
    initial = {name: scaling.initial for name, scaling in model.scaling.items()}
    assert initial["layers.5.up.weight"] == Scaled(Normal(std=32**-0.5), 2**-0.5)
    assert initial["layers.5.down.weight"] == Scaled(Normal(std=128**-0.5), 2**-0.5 / 3)
    assert initial["embedding.weight"] == Normal(std=32**-0.5)
    extra = "        self.extra = nn.Embedding(8, args.size) if args.blocks > 2 else None\n        self.layers ="
    for number, (wrong, words) in enumerate(
        [
            (source.replace("ROLES", "{}"), ["Own.roles", "completep"]),
            (file.read_text().replace("        self.layers =", extra), ["Own", "extra.weight"]),
            (file.read_text().replace("nn.Embedding(args.vocab_size, args.size)", "nn.Identity()"), ["Own", "input"]),
        ]
    ):
        other = tmp_path / f"wrong_{number}.py"
        other.write_text(wrong)
        with pytest.raises(ConfigError) as error:
            meta_model(tiny.config("--model.file", str(other), "--model.args={}", *RULES["completep"]))
        [problem] = error.value.problems
        assert mentions(problem.message, *words)


def test_inspect_shows_the_options_of_each_parameter(tiny: TinyRun) -> None:
    [technique] = [it for it in every_technique() if it.option == "optimizer.parametrization"]
    config = tiny.config(*SHAPE, *OPTIONS, *RULES["completep"])
    model = meta_model(config)
    facts = technique.parameter_facts(model, config)
    found = facts[model.get_parameter("layers.5.feed_forward.w2.weight")]
    assert found == {"role": "residual", "initial_std": pytest.approx(0.01 / 3 / 2**0.5), "eps": pytest.approx(3e-8)}
    assert technique.parameter_note(found) == "residual, std 0.00236, eps 3e-08"
    assert technique.parameter_note(technique.facts) == ""
    assert technique.parameter_facts(meta_model(tiny.config(*SHAPE)), tiny.config(*SHAPE)) == {}
