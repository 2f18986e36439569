"""Each pair of settings that a resume refuses with an option: the option is taken, and the run resumes as it says."""

import re
import shutil
from dataclasses import dataclass
from itertools import islice

import pytest
import torch

from tests.support.helpers import TinyRun, built, train_on_this_rank
from tests.support.whole_runs import values_of
from titanlite.runtime.errors import UserError

pytestmark = pytest.mark.usefixtures("single_process_group", "_unlocked")

MOE = "--model={name='qwen3_moe',args={head_dim=14,n_experts=4,n_active_experts=2,balance_rate=0.05}}"
MUON = "--optimizer.name=Muon"
EMBEDDING, HEAD = "--freeze.parameters=['tok_embeddings.*']", "--freeze.parameters=['head.*']"
FURTHER = "--training.multi_token_weight="
EXACT = "--debug.reproducible_layouts --training.local_batch_size="
DEEP, LORA = "--model.args.n_layers=2", "--lora.rank=2"
OUTER = "--outer.every="


@dataclass(frozen=True)
class Pair:
    before: str
    after: str
    offered: str
    """Options that the refusal offers."""
    new: str = "nothing"
    """Pattern of the trained parameters whose moments begin anew; of those that the checkpoint lacks, too."""
    dropped: str = "nothing"
    """Pattern of the tensors that only the checkpoint has."""


PAIRS = {
    "freeze more": Pair("", EMBEDDING, "freeze.parameters", dropped=r"tok_embeddings\.weight\.\w+"),
    "unfreeze": Pair(EMBEDDING, "", "freeze.parameters", new=r"tok_embeddings\."),
    "freeze other": Pair(
        EMBEDDING, HEAD, "freeze.parameters", new=r"tok_embeddings\.", dropped=r"head\.\w+\.weight\.\w+"
    ),
    "unfreeze, Muon": Pair(f"{MUON} {EMBEDDING}", MUON, "freeze.parameters", new=r"tok_embeddings\."),
    "unfreeze, bfloat16 moments": Pair(
        f"--optimizer.state_dtype=bfloat16 {EMBEDDING}", "--optimizer.state_dtype=bfloat16", "freeze.parameters",
        new=r"tok_embeddings\.",
    ),
    "unfreeze, a state that does not begin with zeros": Pair(
        f"--optimizer.name=NAdam {EMBEDDING}", "--optimizer.name=NAdam", "freeze.parameters", new=r"tok_embeddings\."
    ),
    "less weight of the second token": Pair(f"{FURTHER}0.3", f"{FURTHER}0.1", "training.multi_token_weight"),
    "second token off": Pair(
        f"{FURTHER}0.3", "", "training.multi_token_weight", dropped=r"layers\.1\.|head\.further_norm"
    ),
    "second token on": Pair("", f"{FURTHER}0.3", "training.multi_token_weight", new=r"layers\.1\.|head\.further_norm"),
    "adapters on": Pair(
        "", LORA, "lora.alpha lora.rank", new=r".*lora_", dropped=r".*(weight|w\d)\.(step|exp_avg|exp_avg_sq)"
    ),
    "adapters off": Pair(LORA, "", "lora.alpha lora.rank", new=r"(?!.*lora_)", dropped=r".*lora_"),
    "alpha of adapters": Pair(LORA, f"{LORA} --lora.alpha=32", "lora.alpha"),
    "bias rate": Pair(MOE, f"{MOE} --model.args.balance_rate=0", "model.args.balance_rate"),
    "balance loss": Pair(MOE, f"{MOE} --model.args.balance_loss=0.01", "model.args.balance_loss"),
    "rope": Pair("", "--model.args.rope_theta=20000.0", "model.args.rope_theta"),
    "epsilon": Pair("", "--model.args.norm_eps=1e-6", "model.args.norm_eps"),
    "batch": Pair("", "--training.global_batch_size=4", "training.global_batch_size"),
    "ramp of the batch": Pair(
        "--training.local_batch_size=2",
        "--training.local_batch_size=2 --training.batch_ramp=[{until_tokens=1000,global_batch_size=2}]",
        "training.batch_ramp",
    ),
    "ramp of the length": Pair(
        "", "--training.seq_len_ramp=[{until_tokens=1000,seq_len=16}]", "training.seq_len_ramp"
    ),
    "length": Pair("", "--training.seq_len=16 --data.on_change=continue", "training.seq_len"),
    "seed": Pair("", "--debug.seed=5", "debug.seed"),
    "outer optimizer on": Pair("", f"{OUTER}1", "outer.every"),
    "outer optimizer off": Pair(f"{OUTER}1", "", "outer.every"),
    "outer rounds": Pair(f"{OUTER}1", f"{OUTER}2", "outer.every"),
    "parametrization": Pair(
        "", "--optimizer.parametrization=mup --optimizer.base_width=42",
        "optimizer.base_width optimizer.parametrization",
    ),
    "reproducible micro-batches": Pair(
        f"{EXACT}2", f"{EXACT}4", "training.local_batch_size"
    ),
}  # fmt: skip
REFUSED = {
    "hidden dims": ("", "--model.args.hidden_dim=64"),
    "more blocks": ("", DEEP),
    "fewer blocks": (DEEP, ""),
    "a larger vocabulary": ("", "--model.args.vocab_size=300"),
    "another model": ("", MOE),
    "rank of adapters": (LORA, "--lora.rank=3"),
}


@pytest.fixture
def _unlocked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that failed in this process would hold its folder as long as pytest holds the error."""
    monkeypatch.setattr("titanlite.run.run_folder._lock", lambda path: None)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    return TinyRun(tmp_path_factory.mktemp("changed"))


TRAINED: pytest.StashKey[dict[str, dict[str, torch.Tensor]]] = pytest.StashKey()


def begun(shared: TinyRun, request: pytest.FixtureRequest, before: str, name: str) -> dict[str, torch.Tensor]:
    """Train a step with some options, once for all tests, and copy the run. Returns its values."""
    done = request.config.stash.setdefault(TRAINED, {})
    outputs, first = shared.folder / "outputs", f"first-{[*done, before].index(before)}"
    if before not in done:
        run = train_on_this_rank(shared.config(*before.split(), f"--job.name={first}", "--training.steps=1"), 0, 1)
        done[before] = {key: value.clone() for key, value in values_of(run).items()}
    shutil.copytree(outputs / first, outputs / name)
    return done[before]


def resumed(shared: TinyRun, name: str, after: str, *more: str, steps: int) -> dict[str, torch.Tensor]:
    words = [*after.split(), *more, f"--job.name={name}", f"--training.steps={steps}"]
    return values_of(train_on_this_rank(shared.config(*words), 0, 1))


@pytest.mark.parametrize("pair", PAIRS)
def test_what_a_refusal_offers_is_taken(shared: TinyRun, pair: str, request: pytest.FixtureRequest) -> None:
    it, name = PAIRS[pair], re.sub(r"\W", "-", pair)
    saved = begun(shared, request, it.before, name)
    with pytest.raises(UserError, match=r"checkpoint\.allow_changes = ") as error:
        resumed(shared, name, it.after, steps=1)
    offer = re.search(r"checkpoint\.allow_changes = (\[.*?\])", str(error.value))
    assert offer
    assert sorted(re.findall(r'"(.+?)"', offer[1])) == it.offered.split()
    taken = f"--checkpoint.allow_changes={offer[1].replace(' ', '')}"
    at_once = resumed(shared, name, it.after, taken, steps=1)
    new = {key for key in at_once.keys() - saved.keys() if re.match(it.new, key)}
    assert at_once.keys() - saved.keys() == new
    assert {key for key in saved.keys() - at_once.keys() if not re.match(it.dropped, key)} == set()
    for key in at_once.keys() & saved.keys():
        assert torch.equal(at_once[key], saved[key]), key
    after = resumed(shared, name, it.after, taken, steps=2)
    counts = {key.removesuffix(".step"): float(value) for key, value in after.items() if key.endswith(".step")}
    assert {key for key, count in counts.items() if count != (1 if re.match(it.new, key) else 2)} == set()
    moments = {key.removesuffix(".exp_avg") for key in after if key.endswith(".exp_avg") and re.match(it.new, key)}
    for key in moments if "bfloat16" not in it.before else ():  # as after the first step of AdamW
        first, second = after[f"{key}.exp_avg"] / 0.1, after[f"{key}.exp_avg_sq"] / 0.05
        assert torch.allclose(first.square(), second, rtol=1e-3), key
    if "NAdam" in it.after:
        assert float(after["tok_embeddings.weight.mu_product"]) == pytest.approx(0.9 * (1 - 0.5 * 0.96**0.004))
    if it.new != "nothing":
        assert any(re.match(it.new, key) and not torch.equal(after[key], at_once.get(key, after[key])) for key in after)


@pytest.mark.parametrize("name", ["AdamW", "NAdam"])
def test_moments_that_an_initial_load_lacks_begin_anew(
    shared: TinyRun, name: str, request: pytest.FixtureRequest
) -> None:
    before = f"--optimizer.name={name}" if name != "AdamW" else ""
    begun(shared, request, before, f"source-{name}")
    path = f"--checkpoint.initial_load_path={shared.folder}/outputs/source-{name}"
    parts = '--checkpoint.initial_load=["model","optimizer.state.head.*"]'
    after = resumed(shared, f"begins-{name}", f"{before} {path} {parts}", steps=1)
    counts = {key: float(value) for key, value in after.items() if key.endswith(".step")}
    assert {key: count for key, count in counts.items() if count != (2 if key.startswith("head.") else 1)} == {}


@pytest.mark.parametrize("case", REFUSED)
def test_nothing_is_offered_where_tensors_have_other_shapes(
    shared: TinyRun, case: str, request: pytest.FixtureRequest
) -> None:
    before, after = REFUSED[case]
    name = re.sub(r"\W", "-", case)
    begun(shared, request, before, name)
    with pytest.raises(UserError, match=r"\n  (missing|unexpected) +model\.") as error:
        resumed(shared, name, after, steps=1)
    assert "allow_changes" not in str(error.value)
    assert "job.name" in str(error.value)


def test_a_rollback_begins_new_parameters_anew(shared: TinyRun, request: pytest.FixtureRequest) -> None:
    """The run goes back to a checkpoint that lacks them, after they were trained."""
    before = begun(shared, request, "", "rollback")
    words = [f"{FURTHER}0.3", '--checkpoint.allow_changes=["training.multi_token_weight"]', "--job.name=rollback"]
    run = built(0, 1, shared.config(*words, "--training.steps=3"))
    at_start = {name: tensor.clone() for name, tensor in values_of(run).items()}
    run.train_step([*islice(run.batches, run.accumulation)])
    trained = {name: tensor.clone() for name, tensor in values_of(run).items()}
    run.checkpoints.go_back()
    back = values_of(run)
    names = {name for name in back if name in at_start and not torch.equal(trained[name], back[name])}
    assert any(name.startswith("layers.1.") for name in names)
    for name in names:
        assert torch.equal(back[name], at_start[name]), name
    assert before.keys() <= back.keys()
