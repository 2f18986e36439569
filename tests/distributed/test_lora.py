"""Training of adapters on a base, and resumes of it. On every layout and with every technique: tests/matrix.py."""

import numpy as np
import pytest
import torch

from tests.support.helpers import TinyRun, run_in_turn, train_on_this_rank
from tests.support.layouts import trained, whole
from titanlite.runtime.errors import UserError
from titanlite.schema import Config
from titanlite.state import state_of
from titanlite.tools import cli
from titanlite.tools.convert.reader import read_whole
from titanlite.tools.convert.source import load_model, open_source

LORA = ["--lora.rank=3", "--lora.alpha=6", "--training.steps=4", "--training.max_norm=0", "--optimizer.lr=0.03"]


def train(rank: int, world_size: int, config: Config) -> dict[str, np.ndarray]:
    """Train adapters, which alone have gradients and optimizer states, and return the weights."""
    run = train_on_this_rank(config, rank, world_size)
    parameters = dict(run.model.named_parameters())
    moments = state_of(run.model, run.optimizer)["optimizer"]
    adapters = {name for name in parameters if "lora_" in name}
    assert len(adapters) == 2 * 7
    assert {name.removeprefix("state.").rpartition(".")[0] for name in moments} == adapters
    assert {name for name, parameter in parameters.items() if parameter.requires_grad} == adapters
    return {name: whole(parameter.float()).numpy() for name, parameter in parameters.items()}


@pytest.mark.slow
@pytest.mark.usefixtures("single_process_group")
def test_a_run_begins_with_a_base_and_resumes_with_its_adapters(
    tiny: TinyRun, capfd: pytest.CaptureFixture[str]
) -> None:
    """The base is a checkpoint of ours or a Hugging Face folder; neither has adapters."""
    base = ["--training.steps=2", "--job.name=base", "--training.max_norm=0", "--optimizer.lr=0.03"]
    weights = trained(0, 1, tiny.config(*base))
    ours, folder = tiny.folder / "outputs" / "base", tiny.folder / "hf"
    assert cli.run(["checkpoint", "export", str(ours), "--out", str(folder)]) == 0
    options, steps = [*LORA, "--checkpoint.interval=2"], "--training.steps=2"
    runs = [
        tiny.config(*options, f"--checkpoint.initial_load_path={ours}", "--job.name=whole"),
        tiny.config(*options, f"--checkpoint.initial_load_path={folder}", "--job.name=hf"),
        tiny.config(*options, f"--checkpoint.initial_load_path={ours}", "--job.name=parts", steps),
    ]
    whole_run, of_folder, _ = (train(0, 1, run) for run in runs)
    assert tiny.losses("hf") == tiny.losses("whole")
    for result in (whole_run, of_folder):
        for name, value in weights.items():
            assert np.array_equal(result[name], value), name

    # Without initial_load_path: base and adapters are both in the checkpoint.
    resumed = train(0, 1, tiny.config(*options, "--job.name=parts"))
    assert tiny.losses("parts") == tiny.losses("whole")
    for name, value in whole_run.items():
        assert np.array_equal(resumed[name], value), name
    longer = [*options, "--training.steps=6"]
    run_in_turn(train, 2, [tiny.config(*longer, "--job.name=parts", world_size=2)])
    train(0, 1, tiny.config(*longer, "--job.name=whole"))
    assert tiny.losses("parts") == pytest.approx(tiny.losses("whole"), abs=1e-5)
    source = open_source(str(tiny.folder / "outputs" / "parts"))  # two ranks saved it
    assert source.adapters is not None
    for name, merged in load_model(source).named_parameters():
        layer = name.removesuffix(".weight")
        if layer in source.adapters.layers:
            weight, a, b = (
                read_whole(source.adapters.reader, f"{layer}.{part}") for part in ("weight", "lora_a", "lora_b")
            )
            assert np.array_equal(weight.numpy(), weights[name])
            torch.testing.assert_close(merged.data, weight + 2 * b @ a)
            assert (merged - weight).abs().max() > 1e-4
        else:
            assert np.array_equal(merged.detach().numpy(), weights[name])
    with pytest.raises(UserError, match=r"lora.alpha was 6.0, is 7.0"):
        train(0, 1, tiny.config(*options, "--job.name=parts", "--lora.alpha=7", "--training.steps=8"))

    # Adapters of another run are taken, too, at the scale that they were trained with.
    other = [*LORA, "--training.steps=1", f"--checkpoint.initial_load_path={tiny.folder}/outputs/whole"]
    with pytest.raises(UserError, match=r"lora\.alpha: .* 6\.0.* 5\.0"):
        train(0, 1, tiny.config(*other, "--job.name=refused", "--lora.alpha=5"))
    taken = train(0, 1, tiny.config(*other, "--job.name=taken", "--optimizer.lr=0"))
    kept = train(0, 1, tiny.config(*options, "--job.name=whole", "--training.steps=6"))
    assert all(np.array_equal(taken[name], value) for name, value in kept.items())
