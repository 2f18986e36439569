"""What blocks compute again, so that a step stays within a budget of memory."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from titanlite.config.load import load
from titanlite.config.schema import ActivationCheckpoint, Config
from titanlite.models.registry import resolve_model
from titanlite.parallelize import RecomputePolicy
from titanlite.parallelize.activation_checkpoint import levels_of
from titanlite.plan import budget as module
from titanlite.plan.budget import GIB, Chosen, choose_levels
from titanlite.plan.estimate import Trace, sketch
from titanlite.plan.memory import profile
from titanlite.plan.trace import trace_step
from titanlite.runtime.errors import ConfigError, UserError

BLOCKS = 3
SIZES = [
    "--model.args.dim=64", "--model.args.hidden_dim=192", "--model.args.n_heads=4", "--model.args.n_kv_heads=2",
    "--model.args.vocab_size=512", "--training.seq_len=256", "--training.global_batch_size=8", "--data.tokenizer=bytes",
]  # fmt: skip
KEY = "activation_checkpoint.memory_budget_gib"


def config_of(*options: str, blocks: int = BLOCKS, gib: float = 100.0) -> Config:
    budget = ["--activation_checkpoint.mode=budget", f"--{KEY}={gib!r}"]
    sizes = [*SIZES, f"--model.args.n_layers={blocks}"]
    return load("train_configs/debug.toml", [*sizes, *budget, *options], world_size=2)


def choose(config: Config, *, gpu: bool = False) -> Chosen:
    return choose_levels(config, *model_of(config), world_size=2, gpus_per_node=2, gpu=gpu)


def model_of(config: Config) -> Any:
    kind, args = resolve_model("llama3", "debug", config.model.args)
    return kind, replace(args, max_seq_len=config.training.seq_len)


def peak_of(config: Config, levels: Sequence[RecomputePolicy]) -> int:
    """Bytes, of a rehearsal of the whole model."""
    rehearsal = trace_step(config, *model_of(config), world_size=2, gpu=False, levels=levels)
    return profile(rehearsal.recorder, rehearsal.blocks).peak


@pytest.fixture(scope="module")
def known() -> dict[Any, Trace]:
    """Sketches by what they are of."""
    return {}


@pytest.fixture
def within(known: dict[Any, Trace], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Chosen]:
    """The choice for so many bytes and some options. Each sketch is made once."""

    def once(config: Config, *, levels: Sequence[RecomputePolicy] | None = None, **options: Any) -> Trace:
        no_budget = config.model_copy(update={"activation_checkpoint": ActivationCheckpoint()})
        levels = levels or levels_of(config.activation_checkpoint, config.model.args["n_layers"])
        key = no_budget.model_dump_json(), tuple(levels)
        if key not in known:
            known[key] = sketch(config, levels=None if len({*levels}) == 1 else levels, **options)
        return known[key]

    monkeypatch.setattr(module, "sketch", once)
    return lambda size, *options, **sizes: choose(config_of(*options, gib=size / GIB, **sizes))


@pytest.mark.nightly
def test_a_larger_budget_never_computes_more(within: Callable[..., Chosen]) -> None:
    free = within(10**12)
    assert free.levels == ("none",) * BLOCKS
    assert (free.peak, free.recomputed) == (free.peak_none, 0)
    between = [free.peak_full + (free.peak_none - free.peak_full) * sixth // 6 for sixth in range(7)]
    found = [within(size) for size in between]
    shares = [chosen.recomputed for chosen in found]
    assert shares == sorted(shares, reverse=True)
    assert len(set(shares)) > 3
    for size, chosen in zip(between, found, strict=True):
        assert chosen.peak <= chosen.budget == size
        assert (chosen.peak_none, chosen.peak_full) == (free.peak_none, free.peak_full)
        assert chosen.levels == tuple(sorted(chosen.levels, key=["full", "op", "none"].index))
    assert found[-1].levels == free.levels


def test_no_mix_that_costs_less_fits(within: Callable[..., Chosen]) -> None:
    """By rehearsals of the whole model. Whatever the rates are, two blocks of op cost more than one of anything."""
    free = within(10**12)
    chosen = within((free.peak_none + free.peak_full) // 2)
    assert chosen.levels == ("op", "op", "none")
    config = config_of()
    assert peak_of(config, chosen.levels) == chosen.peak <= chosen.budget < free.peak_none
    for level in ("op", "full"):
        assert peak_of(config, (level, "none", "none")) > chosen.budget


def test_the_order_of_levels_saves_memory(within: Callable[..., Chosen]) -> None:
    """The last block needs no room to compute again while all is kept."""
    free = within(10**12)
    chosen = within((free.peak_none + free.peak_full) // 2)
    assert peak_of(config_of(), [*reversed(chosen.levels)]) > chosen.peak


def test_the_budget_must_be_enough(within: Callable[..., Chosen]) -> None:
    least = within(10**12).peak_full
    with pytest.raises(UserError, match=f"^{KEY}: .* GiB is not enough: a step takes at least") as caught:
        within(least - 1)
    told = re.search(r"at least ([\d.]+) GiB", str(caught.value))
    assert told
    assert least <= float(told[1]) * GIB < least + GIB / 1000
    assert within(least).peak <= least


def test_what_a_rehearsal_finds_too_large_is_not_taken(
    within: Callable[..., Chosen], monkeypatch: pytest.MonkeyPatch
) -> None:
    free = within(10**12)
    budget = (free.peak_none + free.peak_full) // 2
    right = within(budget)
    peak = module._Mixes.peak
    monkeypatch.setattr(module._Mixes, "peak", lambda self, levels: peak(self, levels) - (budget - right.peak) - 10**6)
    assert within(budget).peak <= budget
    monkeypatch.setattr(module._Mixes, "peak", lambda self, levels: 0)
    assert within(budget).peak <= budget


@pytest.mark.slow
def test_compiled_blocks_can_be_of_any_level() -> None:
    config = config_of("--compile.enable", "--training.seq_len=64", blocks=2)
    assert peak_of(config, ("full", "op")) < peak_of(config, ("op", "none"))


def test_offloaded_states_are_not_on_the_device() -> None:
    free, offloaded = (
        choose(config_of(f"--training.enable_cpu_offload={on}", "--training.seq_len=64", blocks=2), gpu=True)
        for on in ("false", "true")
    )
    states = free.sketch.profile.breakdown
    assert offloaded.peak < free.peak - states["parameters"] - states["optimizer"] // 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["mode=budget"], "mode budget needs it: most memory of each device, in GiB"),
        (["mode=budget", "memory_budget_gib=0"], "expected a number above 0, got 0"),
        (["mode=budget", "memory_budget_gib=inf"], "finite"),
    ],
)
def test_the_budget_belongs_to_its_mode(options: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load("train_configs/debug.toml", [f"--activation_checkpoint.{option}" for option in options])
    [problem] = caught.value.problems
    assert problem.key == KEY
    assert message in problem.message


@pytest.mark.parametrize(
    ("options", "levels"),
    [
        ({"mode": "none"}, ["none", "none", "none", "none"]),
        ({"mode": "full"}, ["full", "full", "full", "full"]),
        ({"mode": "selective"}, ["op", "op", "op", "op"]),
        ({"mode": "selective", "selective_ac_option": 1}, ["full", "full", "full", "full"]),
        ({"mode": "selective", "selective_ac_option": 3}, ["full", "none", "none", "full"]),
    ],
)
def test_modes_are_levels(options: dict[str, Any], levels: list[RecomputePolicy]) -> None:
    assert levels_of(ActivationCheckpoint(**options), 4) == levels
