"""`titanlite checkpoint import --layers`: a student with some layers of its teacher."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.foreign import assert_same, logits, oracle_of
from titanlite.checkpoint.state import model_state
from titanlite.runtime.errors import UserError
from titanlite.tools import cli
from titanlite.tools.convert.compress import parse_layers
from titanlite.tools.convert.source import load_model, open_source

TOKENS = torch.randint(0, 67, (2, 33), generator=torch.Generator().manual_seed(1))


@pytest.mark.long
@pytest.mark.parametrize("family", ["llama3", "qwen3_moe"])
def test_a_student_has_the_bits_of_its_teachers_layers(family: str, tmp_path: Path) -> None:
    oracle = oracle_of(family)
    oracle.save_pretrained(tmp_path / "hf")
    words = ["checkpoint", "import", str(tmp_path / "hf"), "--out"]
    assert cli.run([*words, str(tmp_path / "all")]) == 0
    assert cli.run([*words, str(tmp_path / "hf_student"), "--layers", "1"]) == 0
    ours = ["checkpoint", "import", str(tmp_path / "all"), "--out", str(tmp_path / "student"), "--layers", "1"]
    assert cli.run(ours) == 0, "of a checkpoint of ours"

    teacher = model_state(load_model(open_source(str(tmp_path / "all"))))
    expected = {
        name.replace("layers.1.", "layers.0."): tensor.detach()
        for name, tensor in teacher.items()
        if not name.startswith("layers.0.")
    }
    shallow: Any = copy.deepcopy(oracle).float()
    layer: Any = shallow.model.layers[1]
    layer.self_attn.layer_idx = 0
    shallow.model.layers = nn.ModuleList([layer])
    shallow.config.num_hidden_layers = 1
    for place in ("hf_student", "student"):
        source = open_source(str(tmp_path / place))
        assert source.config is not None
        assert source.config.model.args["n_layers"] == source.spec.args.n_layers == 1  # type: ignore[attr-defined]
        student = load_model(source)
        assert_same({name: tensor.detach() for name, tensor in model_state(student).items()}, expected)
        assert (logits(student, TOKENS) - logits(shallow, TOKENS)).abs().max() < 1e-4


def test_lists_of_layers() -> None:
    assert parse_layers("0,2,4-7", 8) == [0, 2, 4, 5, 6, 7]
    for text, message in {
        "": "'' is no number or range",
        "0,x": "'x' is no number or range",
        "-1": "'-1' is no number or range",
        "0,8": "there is no layer 8: the model has layers 0 to 7",
        "0-999999999": "there is no layer 999999999",
        "1,1": "1 is repeated",
        "0-3,2": "2 is repeated",
        "3,1": "1 is not in order",
        "5-3": "5-3 is not in order",
    }.items():
        with pytest.raises(UserError, match=message):
            parse_layers(text, 8)


def test_mistakes_are_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    oracle_of("llama3").save_pretrained(tmp_path / "hf")
    capfd.readouterr()
    words = ["checkpoint", "import", str(tmp_path / "hf"), "--out", str(tmp_path / "out"), "--layers", "0,2"]
    assert cli.run(words) == 2
    assert capfd.readouterr().err == "error: --layers: there is no layer 2: the model has layers 0 to 1\n"
    assert not (tmp_path / "out").exists()
