"""A model of the user's own is tried at a small size: what it sees, and what it leaves without a value."""

import pytest
import torch

from tests.support.helpers import TinyRun, mentions
from titanlite.checks.preflight import preflight
from titanlite.loss import token_loss
from titanlite.models.registry import resolve_model
from titanlite.models.trial import check_buffers, check_causal, check_documents_apart, small_model, unused_parameters
from titanlite.runtime.errors import ConfigError, UserError
from titanlite.runtime.process_group import Ranks

OWN = """
import torch
from torch import nn
from titanlite.models.initial import Normal
from titanlite.models.llama3 import Llama3

class Leaks(Llama3):
    def forward(self, tokens, loss=None, **arguments):
        return super().forward(torch.cat([tokens[:, 1:], tokens[:, :1]], dim=1), loss, **arguments)

class LeaksOften(Llama3):
    def forward(self, tokens, loss=None, **arguments):
        x = self.tok_embeddings(tokens)
        return self.head(x + x.mean(dim=1, keepdim=True), loss)

class Forgets(Llama3):
    def __init__(self, args):
        super().__init__(args)
        self.register_buffer("scale", torch.ones(args.dim), persistent=False)
        self.register_buffer("first_half", torch.zeros(4, dtype=torch.int64))

    def init_buffers(self):
        super().init_buffers()
        self.first_half[:2] = torch.tensor([1, 0])

class Draws(Llama3):
    def __init__(self, args):
        super().__init__(args)
        self.register_buffer("noise", torch.empty(64, dtype=torch.bool))

    def init_buffers(self):
        super().init_buffers()
        self.noise.copy_(torch.rand(64) > 0.5)

class Noisy(Llama3):
    def forward(self, tokens, loss=None, **arguments):
        x = self.tok_embeddings(tokens)
        return self.head(x + torch.randn_like(x), loss)

class Spare(Llama3):
    def __init__(self, args):
        super().__init__(args)
        self.spare = nn.Linear(4, 4, bias=False)
        self.layers[-1].also = nn.Parameter(torch.empty(3))
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("own") / "own_trials.py"
    path.write_text(OWN)
    return str(path)


def test_a_model_that_sees_the_next_token_is_refused(tiny: TinyRun, file: str) -> None:
    ranks, device = Ranks(0, 1, 0, 1), torch.device("cpu")
    for name in ("Leaks", "LeaksOften"):
        with pytest.raises(UserError):
            check_causal(resolve_model(name, None, {}, file))
        options = [f"--model.file={file}", f"--model.name={name}"]
        with pytest.raises(ConfigError) as error:
            preflight(tiny.config(*options), ranks, device)
        assert [problem.key for problem in error.value.problems] == ["model.file"]
    preflight(
        tiny.config(*options, "--training.loss=tests.support.layouts:smoothed_loss"), ranks, device
    )  # its own objective
    check_causal(resolve_model("Spare", None, {}, file))
    check_causal(resolve_model("Noisy", None, {}, file))
    check_causal(resolve_model(None, None, {}, "examples/my_model/gpt2.py"))
    check_causal(resolve_model("Spare", None, {"max_seq_len": 3}, file))


def test_buffers_without_a_value_are_named(file: str) -> None:
    with pytest.raises(UserError) as error:
        check_buffers(resolve_model("Forgets", None, {}, file))
    assert mentions(str(error.value), "scale", "first_half")
    check_buffers(resolve_model("Draws", None, {}, file))
    check_buffers(resolve_model("qwen3_moe", None, {}))


def test_parameters_without_a_gradient_are_named(file: str) -> None:
    assert unused_parameters(resolve_model("Spare", None, {}, file), token_loss) == ["layers.5.also", "spare.weight"]
    for name, model in ((None, "examples/my_model/gpt2.py"), ("Leaks", file)):
        assert unused_parameters(resolve_model(name, None, {}, model), token_loss) == []


IGNORES = """
from titanlite.models.llama3 import Llama3

class Ignores(Llama3):
    def forward(self, tokens, loss=None, *, documents=None):
        return super().forward(tokens, loss)

class Keeps(Llama3):
    pass
"""


@pytest.mark.long
def test_a_model_that_takes_documents_and_ignores_them_is_refused(tiny: TinyRun) -> None:
    """The model's own zeros at the start would hide it: it is tried with other values."""
    (tiny.folder / "ignores.py").write_text(IGNORES)
    ranks, device = Ranks(0, 1, 0, 1), torch.device("cpu")
    options = [f"--model.file={tiny.folder}/ignores.py", "--model.name=Ignores"]
    preflight(tiny.config(*options), ranks, device)
    for flavor in ("debug", "8B"):
        with pytest.raises(ConfigError) as error:
            preflight(tiny.config(*options, "--data.document_mask=true", f"--model.flavor={flavor}"), ranks, device)
        problem = error.value.problems[0]  # the large one may not fit in memory either
        assert problem.key == "data.document_mask"
        assert mentions(problem.message, "Ignores")
    preflight(tiny.config(options[0], "--model.name=Keeps", "--data.document_mask=true"), ranks, device)
    for flavor in ("debug", "1.5B"):
        spec = resolve_model(None, flavor, {}, "examples/my_model/gpt2.py")
        assert small_model(spec) is not None
        check_documents_apart(spec)
