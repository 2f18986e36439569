"""`titanlite evaluate`: the values of a run's own validation, other data, and mistakes."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from tests.support.helpers import TinyRun, mentions, one_process, train_on_this_rank
from titanlite.tasks import Answer, Question, Task
from titanlite.tools import cli
from titanlite.tools.convert.source import load_model, open_source

SEQ_LEN = 32
BARE = ("--tokenizer", "bytes", "--no-bos", "--no-eos")
VALIDATION = """
[validation]
enable = true
sequences = 5
freq = 4
sources = [{path = "TEXT/a.txt"}, {path = "TEXT/*.txt", name = "all of it"}]
"""


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    """A run that validates in bfloat16, with documents kept apart."""
    tiny = TinyRun(tmp_path_factory.mktemp("evaluate"))
    tiny.toml.write_text(tiny.toml.read_text() + VALIDATION.replace("TEXT", str(tiny.text)))
    config = tiny.config("--training.mixed_precision_param=bfloat16", "--data.document_mask=true")
    with one_process():
        train_on_this_rank(config, 0, 1)
    return tiny


def evaluate(capfd: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = cli.run(["evaluate", *map(str, words)])
    written = capfd.readouterr()
    return code, written.out, written.err


def own(run: Path) -> tuple[object, ...]:
    """The user's word for the config of a run of his own, whose checkpoints name data."""
    return "--config", run / "config.toml"


def test_data_that_a_checkpoint_names_is_not_read(tiny_run: TinyRun, capfd: pytest.CaptureFixture[str]) -> None:
    run = tiny_run.folder / "outputs" / "tiny"
    code, out, err = evaluate(capfd, run)
    assert (code, out) == (2, "")
    [line] = err.splitlines()
    assert mentions(line, f"validation = '{tiny_run.text}/a.txt, {tiny_run.text}/*.txt'", "--data PATH", "--config")


@pytest.mark.long
def test_values_are_those_of_the_runs_own_validation(tiny_run: TinyRun, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tiny_run.folder / "outputs" / "tiny"
    expected = json.loads((folder / "validation.jsonl").read_text().splitlines()[-1])
    code, out, err = evaluate(capfd, folder, *own(folder), "--json", "--batch-size", 3)
    assert (code, err) == (0, "")
    record = json.loads(out)
    assert record["checkpoint"].endswith("checkpoints/step-00000006")
    assert record["seq_len"] == SEQ_LEN
    assert expected["step"] == 6
    assert record["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    assert list(record["sources"]) == ["a.txt", "all of it"]
    for name, values in expected["sources"].items():
        assert record["sources"][name] == pytest.approx(values, rel=1e-6)
    wide = json.loads(evaluate(capfd, folder, *own(folder), "--json", "--dtype", "float32")[1])
    assert wide["loss"] != pytest.approx(expected["loss"], rel=1e-6)
    assert wide["loss"] == pytest.approx(expected["loss"], rel=1e-2)


@pytest.mark.long
def test_other_data_and_other_lengths(tiny_run: TinyRun, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Every token of a text, in one sequence: from the text, and from tokens without the ends of documents."""
    folder = tiny_run.folder / "outputs" / "tiny"
    text = "one two, drei vier fünf."
    file = tmp_path / "other.txt"
    file.write_text(text)
    ids = torch.tensor([[256, *text.encode(), 257]])
    assert cli.run(["data", "prepare", str(file), "--out", str(tmp_path / "tok"), *BARE]) == 0
    capfd.readouterr()
    model = load_model(open_source(str(folder)))
    options = ("--json", "--dtype", "float32", "--sequences", 0, "--cache-folder", tmp_path / "cache")
    for path, tokens in ((f"mine={file}", ids), (f"mine={tmp_path / 'tok'}", ids[:, 1:-1])):
        length = tokens.shape[1] - 1
        code, out, err = evaluate(capfd, folder, "--data", path, "--seq-len", length, *options)
        assert (code, err) == (0, "")
        with torch.no_grad():
            nats = F.cross_entropy(model(tokens[:, :-1])[0], tokens[0, 1:], reduction="none")
        text_bytes = int((tokens[0, 1:] < 256).sum())
        values = json.loads(out)["sources"]["mine"]
        assert values["loss"] == pytest.approx(float(nats.mean()), rel=1e-5)
        assert values["bits_per_byte"] == pytest.approx(float(nats.sum()) / math.log(2) / text_bytes, rel=1e-5)
        assert (values["tokens"], values["sequences"]) == (length, 1)
    assert not (tiny_run.folder / "cache").exists()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--data /no/such", "--data: such: "),
        ("--data {text}/a.txt --data a.txt={text}/b.txt", "a.txt"),
        ("--data {text}/a.txt --seq-len 8000", "--data: a.txt: "),
        ("--data {other}", "python-2k"),
        ("--seq-len 9000", "--seq-len: "),
        ("--tokenizer python-2k", "--tokenizer"),
    ],
)
def test_mistakes_are_one_line(
    words: str, named: str, tiny_run: TinyRun, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "tok"
    if "{other}" in words:
        prepare = ["data", "prepare", str(tiny_run.text), "--out", str(other), "--tokenizer", "python-2k"]
        assert cli.run(prepare) == 0
        capfd.readouterr()
    given = words.format(text=tiny_run.text, other=other).split()
    code, out, err = evaluate(capfd, tiny_run.folder / "outputs" / "tiny", *given)
    [line] = err.splitlines()
    assert (code, out) == (2, "")
    assert named in line


def test_the_text_may_be_in_another_field(tiny_run: TinyRun, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The option that the error names is one of the command."""
    (tmp_path / "text.jsonl").write_text(json.dumps({"body": "one two three " * 40}) + "\n")
    words = tiny_run.folder / "outputs" / "tiny", "--data", tmp_path / "text.jsonl"
    code, _, err = evaluate(capfd, *words)
    assert code == 2
    assert mentions(err, "'text'", "body", "--text-field")
    code, out, _ = evaluate(capfd, *words, "--text-field", "body", "--json")
    assert code == 0
    assert json.loads(out)["loss"] > 0
    (tmp_path / "other.jsonl").write_text(json.dumps({"content": "one two three " * 40}) + "\n")
    words = *words, "--data", f"other={tmp_path}/other.jsonl", "--text-field", "body", "--json"
    code, out, _ = evaluate(capfd, *words, "--text-field", "other=content")
    assert code == 0
    losses = [values["loss"] for values in json.loads(out)["sources"].values()]
    assert losses[0] == losses[1] > 0
    code, _, err = evaluate(capfd, *words, "--text-field", "othr=content")
    assert code == 2
    assert mentions(err, "--text-field", "other")


def test_runs_without_validation_need_data(tiny_run: TinyRun, capfd: pytest.CaptureFixture[str]) -> None:
    other = tiny_run.folder / "other.toml"
    other.write_text(tiny_run.toml.read_text().replace("enable = true\nsequences", "enable = false\nsequences"))
    code, out, err = evaluate(capfd, tiny_run.folder / "outputs" / "tiny", "--config", other)
    assert (code, out) == (2, "")
    assert "--data" in err


def strict(text: str) -> Any:
    """Read JSON as other programs do, which know no NaN and no infinity."""

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    return json.loads(text, parse_constant=refuse)


@pytest.mark.long
@pytest.mark.parametrize("value", [math.nan, math.inf, 3e38])
@pytest.mark.parametrize("words", ["--task python_cloze", "--task number_choice", "--data {text}/a.txt"])
def test_a_broken_model_has_no_metrics(
    value: float, words: str, tiny_run: TinyRun, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """NaN compares as false and is the least of several, so that it could pass for right."""
    folder = tmp_path / "hf"
    assert cli.run(["checkpoint", "export", str(tiny_run.folder / "outputs" / "tiny"), "--out", str(folder)]) == 0
    capfd.readouterr()
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"][:] = value
    save_file(tensors, file, metadata={"format": "pt"})
    given = words.format(text=tiny_run.text).split()
    for form in ((), ("--json",)):
        code, out, err = evaluate(capfd, folder, "--cache-folder", tmp_path / "cache", *given, *form)
        assert (code, out) == (1, "")
        [line] = err.splitlines()
        assert mentions(line, "NaN")
    code = cli.run(["generate", str(folder), "--prompt", "a", "--temperature", "1"])
    assert (code, capfd.readouterr().out.strip()) in ((1, ""), (1, "a"))


def test_a_source_without_text_to_predict_has_no_loss(
    tiny_run: TinyRun, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    record = {"loss": math.nan, "sources": {"a": {"loss": math.nan, "bits_per_byte": None, "tokens": 0}}}
    monkeypatch.setattr("titanlite.tools.convert.evaluate._measure", lambda *_, **__: record)
    code, out, _ = evaluate(capfd, tiny_run.folder / "outputs" / "tiny", "--data", tiny_run.text / "a.txt", "--json")
    assert code == 0
    assert strict(out)["sources"]["a"]["loss"] is None


def test_of_scores_that_are_not_finite_no_metric_is_good() -> None:
    answer = Answer(np.arange(3), 1)
    choice = Task("t", ["acc", "acc_norm", "acc_bytes"], True, [Question([answer] * 2, ["a", "b"], 0)])
    cloze = Task("t", ["acc", "perplexity"], False, [Question([answer], ["a"], 0)] * 2)
    for broken in (math.nan, math.inf, -math.inf):
        for task in (choice, cloze):
            found = task.measure(np.array([[broken, 0.0], [1.0, 0.0]]))
            assert found.pop("questions") == len(task.questions)
            assert all(map(math.isnan, found.values()))
