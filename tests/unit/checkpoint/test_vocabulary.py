"""Weights that begin a run with more tokens, or fewer, than they have."""

import pytest
import torch
from torch import Tensor

from tests.support.foreign import expected_tensors, options_of, oracle_of, spec_of
from tests.support.helpers import TinyRun, mentions
from tests.support.weights import save_random, state
from tests.support.whole_runs import trained
from titanlite.checkpoint.dcp_read import RankReader, read_tensors
from titanlite.checkpoint.vocabulary import ResizedReader, resized
from titanlite.runtime.errors import UserError
from titanlite.tools.convert.source import open_source

ACCEPT = '--checkpoint.allow_changes=["model.args.vocab_size"]'
ONE_STEP = ["--training.steps=1", "--lr_scheduler.warmup_steps=1", "--optimizer.lr=0.0"]


def with_rows(tensor: Tensor, rows: int) -> Tensor:
    """Return a matrix with as many rows: the known ones, and their mean for each other."""
    mean = tensor.double().mean(0).float().expand(max(rows - len(tensor), 0), -1)
    return torch.cat([tensor[:rows], mean])


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[RankReader, dict[str, Tensor]]]:
    """Readers of a checkpoint of ours and of a Hugging Face folder, with their tensors."""
    folder = tmp_path_factory.mktemp("weights")
    checkpoint, model = save_random(folder, "llama3")
    oracle = oracle_of("llama3")
    oracle.save_pretrained(folder / "theirs")
    return {
        "ours": (open_source(str(checkpoint)).reader, {name: value.detach() for name, value in state(model).items()}),
        "theirs": (open_source(str(folder / "theirs")).reader, expected_tensors(oracle)),
    }


@pytest.mark.parametrize("source", ["ours", "theirs"])
@pytest.mark.parametrize("more", [-9, 5])
def test_known_rows_are_kept_and_others_are_their_mean(
    source: str, more: int, sources: dict[str, tuple[RankReader, dict[str, Tensor]]]
) -> None:
    reader, stored = sources[source]
    ends = ["model.tok_embeddings.weight", "model.head.output.weight"]
    rows = len(stored["tok_embeddings.weight"])
    wanted = {f"model.{name}": torch.full_like(tensor, torch.nan) for name, tensor in stored.items()}
    wanted |= {name: torch.full((rows + more, wanted[name].shape[1]), torch.nan) for name in ends}
    assert resized(wanted, reader.metadata, rows + more) == dict.fromkeys(ends, rows)
    read_tensors(ResizedReader(reader, dict.fromkeys(ends, rows + more)), wanted, None)
    for name, tensor in wanted.items():
        expected = stored[name.removeprefix("model.")]
        assert torch.equal(tensor, with_rows(expected, rows + more) if name in ends else expected), name


@pytest.mark.long
@pytest.mark.usefixtures("single_process_group")
def test_a_release_begins_a_run_with_more_tokens(tiny: TinyRun) -> None:
    oracle = oracle_of("qwen3", vocab_size=260, tied=True)
    oracle.save_pretrained(tiny.folder / "model")
    options = [*options_of(spec_of("qwen3", oracle)), *ONE_STEP]
    first = [*options, f"--checkpoint.initial_load_path={tiny.folder}/model", "--model.args.vocab_size=270"]
    embedding = expected_tensors(oracle)["tok_embeddings.weight"]
    found = trained(tiny.config(*first, ACCEPT, "--job.name=first"))["tok_embeddings.weight"]
    assert torch.equal(found, with_rows(embedding, 270))
    again = [*options, f"--checkpoint.initial_load_path={tiny.folder}/outputs/first", "--model.args.vocab_size=280"]
    with pytest.raises(UserError) as refusal:
        trained(tiny.config(*again, "--job.name=again"))
    lines = str(refusal.value).splitlines()
    assert mentions(lines[-1], ACCEPT.replace("--", "").replace("=", " = "))
    assert not any("allow_missing" in line for line in lines)
    assert torch.equal(trained(tiny.config(*again, ACCEPT))["tok_embeddings.weight"], with_rows(found, 280))
