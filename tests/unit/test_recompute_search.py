"""The recompute policy of each block within a memory budget."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.plans import layout_of
from titanlite.config.load import load
from titanlite.parallelize.activation_checkpoint import recompute_policies
from titanlite.runtime.errors import ConfigError, UserError
from titanlite.schema import ActivationCheckpoint, Config, RecomputePolicy, parse_policies
from titanlite.tools.cli import run
from titanlite.tools.plan import recompute_search as module
from titanlite.tools.plan.estimate import OUTSIDE, Layout, Trace, model_of, trace
from titanlite.tools.plan.memory import profile
from titanlite.tools.plan.recompute_search import GIB, PolicyChoice, choose_policies, per_block
from titanlite.tools.plan.trace import trace_step

BLOCKS = 3
SIZES = [
    "--model.args.dim=64", "--model.args.hidden_dim=192", "--model.args.n_heads=4", "--model.args.n_kv_heads=2",
    "--model.args.vocab_size=512", "--training.seq_len=256", "--training.global_batch_size=8", "--data.tokenizer=bytes",
]  # fmt: skip
KEY = "activation_checkpoint.per_block"


def config_of(*options: str, blocks: int = BLOCKS) -> Config:
    return load("train_configs/debug.toml", [*SIZES, f"--model.args.n_layers={blocks}", *options], world_size=2)


def peak_of(config: Config, policies: Sequence[RecomputePolicy]) -> int:
    """Bytes, from a trace of the whole model."""
    config = config.model_copy(update={"activation_checkpoint": per_block(policies)})
    traced = trace_step(config, *model_of(config), world_size=2, gpu=False)
    return profile(traced.recorder, traced.blocks).peak


@pytest.fixture(scope="module")
def known() -> dict[Any, Trace]:
    return {}


@pytest.fixture
def within(known: dict[Any, Trace], monkeypatch: pytest.MonkeyPatch) -> Callable[[int], PolicyChoice]:
    """The choice for a budget in bytes. Each trace is made once."""

    def once(config: Config, layout: Layout) -> Trace:
        key = tuple(recompute_policies(config.activation_checkpoint, BLOCKS))
        if key not in known:
            known[key] = trace(config, layout)
        return known[key]

    monkeypatch.setattr(module, "trace", once)
    return lambda budget: choose_policies(config_of(), layout_of(2, gpu=False), budget=budget)


@pytest.mark.nightly
def test_a_larger_budget_never_recomputes_more(within: Callable[[int], PolicyChoice]) -> None:
    free = within(10**12)
    assert free.policies == ("none",) * BLOCKS
    assert (free.peak, free.recomputed) == (free.peak_none, 0)
    between = [free.peak_full + (free.peak_none - free.peak_full) * sixth // 6 for sixth in range(7)]
    found = [within(size) for size in between]
    shares = [chosen.recomputed for chosen in found]
    assert shares == sorted(shares, reverse=True)
    assert len(set(shares)) > 3
    for size, chosen in zip(between, found, strict=True):
        assert chosen.peak <= chosen.budget == size
        assert (chosen.peak_none, chosen.peak_full) == (free.peak_none, free.peak_full)
        assert chosen.policies == tuple(sorted(chosen.policies, key=["full", "op", "none"].index))
    assert found[-1].policies == free.policies


@pytest.mark.nightly
def test_no_mix_that_costs_less_fits(within: Callable[[int], PolicyChoice]) -> None:
    """Compare with traces of the whole model. Two blocks with `op` cost more than one with any policy, at any rates."""
    free = within(10**12)
    chosen = within((free.peak_none + free.peak_full) // 2)
    assert chosen.policies == ("op", "op", "none")
    config = config_of()
    assert peak_of(config, chosen.policies) == chosen.peak <= chosen.budget < free.peak_none
    for policy in ("op", "full"):
        assert peak_of(config, (policy, "none", "none")) > chosen.budget


@pytest.mark.nightly
def test_the_order_of_policies_saves_memory(within: Callable[[int], PolicyChoice]) -> None:
    """The last block needs no room to recompute while all activations are kept."""
    free = within(10**12)
    chosen = within((free.peak_none + free.peak_full) // 2)
    assert peak_of(config_of(), [*reversed(chosen.policies)]) > chosen.peak


@pytest.mark.long
def test_the_budget_must_be_enough(within: Callable[[int], PolicyChoice]) -> None:
    least = within(10**12).peak_full
    with pytest.raises(UserError, match=r"^--memory-budget-gib: .* GiB is not enough: a step needs at least") as caught:
        within(least - 1)
    least_gib = re.search(r"at least ([\d.]+) GiB", str(caught.value))
    assert least_gib
    assert least <= float(least_gib[1]) * GIB < least + GIB / 1000
    assert within(least).peak <= least


@pytest.mark.long
def test_a_mix_whose_trace_is_too_large_is_not_chosen(
    within: Callable[[int], PolicyChoice], monkeypatch: pytest.MonkeyPatch
) -> None:
    free = within(10**12)
    budget = (free.peak_none + free.peak_full) // 2
    right = within(budget)
    peak = module._Mixes.peak
    monkeypatch.setattr(
        module._Mixes, "peak", lambda self, policies: peak(self, policies) - (budget - right.peak) - 10**6
    )
    assert within(budget).peak <= budget
    monkeypatch.setattr(module._Mixes, "peak", lambda self, policies: 0)
    assert within(budget).peak <= budget


@pytest.mark.nightly
def test_a_budget_of_a_gpu_counts_what_it_reserves_and_the_cuda_context() -> None:
    config, layout = config_of("--training.seq_len=64", blocks=2), layout_of(2)
    free = choose_policies(config, layout, budget=100 * GIB)
    assert free.peak == free.trace.profile.reserved + OUTSIDE
    assert free.trace.profile.reserved > free.trace.profile.peak
    chosen = choose_policies(config, layout, budget=free.peak_full)
    assert chosen.trace.profile.reserved + OUTSIDE == chosen.peak <= free.peak_full
    with pytest.raises(UserError, match="is not enough"):
        choose_policies(config, layout, budget=free.trace.profile.peak + OUTSIDE // 2)


@pytest.mark.nightly
def test_compiled_blocks_accept_any_policy() -> None:
    config = config_of("--compile.enable", "--training.seq_len=64", blocks=2)
    assert peak_of(config, ("full", "op")) < peak_of(config, ("op", "none"))


@pytest.mark.nightly
def test_offloaded_states_are_not_on_the_device() -> None:
    free, offloaded = (
        choose_policies(
            config_of(f"--training.enable_cpu_offload={on}", "--training.seq_len=64", blocks=2),
            layout_of(2),
            budget=100 * GIB,
        )
        for on in ("false", "true")
    )
    states = free.trace.profile.breakdown
    assert offloaded.peak < free.peak - states["parameters"] - states["optimizer"] // 2


def test_policies_are_written_as_runs() -> None:
    section = per_block(["full", "full", "op", "none"])
    assert section.per_block == ["full x 2", "op x 1", "none x 1"]
    assert parse_policies(section.per_block) == ["full", "full", "op", "none"]
    assert parse_policies(["full", "op  x 3"]) == ["full", "op", "op", "op"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["mode=per_block"], "set both or none"),
        (['per_block=["full x 6"]'], "set both or none"),
        (["mode=per_block", 'per_block=["fulll x 6"]'], "'fulll' is no recompute policy, did you mean full?"),
        (["mode=per_block", 'per_block=["6 x full"]'], "'6' is no recompute policy; expected none, op or full"),
        (["mode=per_block", 'per_block=["full x six"]'], "expected a number of blocks, as in 'full x 20'"),
        (["mode=per_block", 'per_block=["full x 0"]'], "expected a number of blocks, as in 'full x 20'"),
    ],
)
def test_mistakes_of_the_policies(options: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load("train_configs/debug.toml", [f"--activation_checkpoint.{option}" for option in options])
    [problem] = caught.value.problems
    assert problem.key == KEY
    assert message in problem.message


def test_each_block_must_have_a_policy(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--activation_checkpoint.mode=per_block", f'--{KEY}=["full x 2", "none x 3"]']
    assert run(["config", "check", "--config", "train_configs/debug.toml", *options]) == 2
    assert f"error: {KEY}: lists 5 blocks, and the model has 6" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "policies"),
    [
        ({"mode": "none"}, ["none", "none", "none", "none"]),
        ({"mode": "full"}, ["full", "full", "full", "full"]),
        ({"mode": "selective"}, ["op", "op", "op", "op"]),
        ({"mode": "selective", "selective_ac_option": 1}, ["full", "full", "full", "full"]),
        ({"mode": "selective", "selective_ac_option": 3}, ["full", "none", "none", "full"]),
        ({"mode": "per_block", "per_block": ["full x 2", "op", "none"]}, ["full", "full", "op", "none"]),
    ],
)
def test_policies_of_the_modes(options: dict[str, Any], policies: list[RecomputePolicy]) -> None:
    assert recompute_policies(ActivationCheckpoint(**options), 4) == policies
