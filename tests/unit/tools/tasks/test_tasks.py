"""Tasks: scores by hand and on every batch and layout, and mistakes in their files."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.support.helpers import TinyRun, mentions, one_process, train_on_this_rank
from tests.support.layouts import trace_blocks
from titanlite.data.tokenizer import load_tokenizer
from titanlite.models.base import Model
from titanlite.ops.cpu import CpuKernels
from titanlite.runtime.errors import UserError
from titanlite.runtime.private_torch.compiler import compiled_graphs
from titanlite.tasks import Answer, Question, Scorer, Task
from titanlite.tools import cli
from titanlite.tools.convert.source import load_model, open_source
from titanlite.tools.tasks.read import encode, read_tasks

SHIPPED = ["python_cloze", "number_choice"]
QUESTIONS = [
    {"context": "Question: one\nAnswer:", "choices": ["two", "three hundred"], "answer": 0},
    {"context": f"Question: {'three ' * 30}\nAnswer:", "choices": ["four", "fünf", "ff"], "answer": 2},
]
BYTES: dict[str, Any] = {"tokenizer": load_tokenizer("bytes"), "opening": [256], "seq_len": 32}


def write(folder: Path, questions: list[Any] | str = QUESTIONS, name: str = "mine.jsonl") -> str:
    """Write a task."""
    lines = questions if isinstance(questions, str) else "".join(json.dumps(question) + "\n" for question in questions)
    (folder / name).write_text(lines)
    return str(folder / name)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    """A run that has scored both shipped tasks and one with a context that is too long, after each third step."""
    tiny = TinyRun(tmp_path_factory.mktemp("tasks"))
    write(tiny.folder)
    options = ["--validation.enable", f"--validation.path={tiny.text}", "--validation.freq=3"]
    options += [f"--validation.tasks={json.dumps([*SHIPPED, str(tiny.folder / 'mine.jsonl')])}"]
    with one_process():
        train_on_this_rank(tiny.config("--job.name=with", *options), 0, 1)
        train_on_this_rank(tiny.config("--job.name=without"), 0, 1)
    return tiny


@pytest.fixture(scope="module")
def model(tiny: TinyRun) -> Model:
    return load_model(open_source(str(tiny.folder / "outputs" / "with")))


def validations(tiny: TinyRun, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tiny.folder / f"outputs/{name}/validation.jsonl").read_text().splitlines()]


def scorer(tasks: list[Task], **options: Any) -> Scorer:
    options = {"seq_len": 32, "batch_size": 3, **options}
    return Scorer(tasks, kernels=CpuKernels(), device=torch.device("cpu"), **options)


def scores_of(model: Model, tasks: list[Task], **options: Any) -> np.ndarray:
    with torch.no_grad():
        scored = scorer(tasks, **options)
        for measure, batch in scored.batches():
            measure(model, batch)
    return scored.scores.numpy()


def by_hand(model: Model, answer: Answer) -> tuple[float, int]:
    """Nats and misses of one answer alone, from all logits."""
    tokens, labels = torch.from_numpy(answer.tokens[:-1])[None], torch.from_numpy(answer.tokens[-answer.scored :])
    with torch.no_grad():
        logits = model(tokens)[0, -answer.scored :].float()
    return float(F.cross_entropy(logits, labels, reduction="sum")), int((logits.argmax(-1) != labels).sum())


def test_scores_are_those_of_the_logits_of_each_answer_alone(tiny: TinyRun, model: Model) -> None:
    tasks = read_tasks([*SHIPPED, str(tiny.folder / "mine.jsonl")], **BYTES)
    answers = [answer for task in tasks for answer in task.answers]
    expected = np.array([by_hand(model, answer) for answer in answers])
    scores = scores_of(model, tasks)
    assert scores[:, 0] == pytest.approx(expected[:, 0], rel=1e-5)
    assert scores[:, 1].tolist() == expected[:, 1].tolist()
    assert len({len(answer.tokens) for answer in answers}) > 5
    one_off = [Answer(answer.tokens, answer.scored - 1) for answer in answers if answer.scored > 1]
    planted = [Task("", [], is_choice=False, questions=[Question([answer], [""], 0) for answer in one_off])]
    kept = [score for score, answer in zip(scores[:, 0], answers, strict=True) if answer.scored > 1]
    assert scores_of(model, planted)[:, 0] != pytest.approx(kept, rel=1e-3)


def test_batches_and_ranks_change_no_bit(tiny: TinyRun, model: Model) -> None:
    tasks = read_tasks([*SHIPPED, str(tiny.folder / "mine.jsonl")], **BYTES)
    expected = scores_of(model, tasks)
    for batch_size in (7, 64):
        assert scores_of(model, tasks, batch_size=batch_size).tobytes() == expected.tobytes()
    parts = [scores_of(model, tasks, rank=rank, ranks=3) for rank in range(3)]
    assert np.sum(parts, axis=0).tobytes() == expected.tobytes()
    assert all((part != 0).any(axis=1).sum() > len(expected) / 4 for part in parts)
    counts = [len([*scorer(tasks, batch_size=8, rank=rank, ranks=3).batches()]) for rank in range(3)]
    assert len({*counts}) == 1


def test_sequences_are_short_where_answers_are(model: Model) -> None:
    tasks = read_tasks(SHIPPED, **{**BYTES, "seq_len": 1024})
    shapes = {
        multiple: {
            tuple(batch["tokens"].shape) for _, batch in scorer(tasks, seq_len=1024, multiple_of=multiple).batches()
        }
        for multiple in (2, 96, 512)
    }
    assert shapes == {2: {(3, 64), (3, 128)}, 96: {(3, 1024)}, 512: {(3, 512)}}


def test_metrics_are_those_of_the_harness() -> None:
    """acc_norm divides by characters; the first of equal answers counts."""
    texts = ["ab", "ää", "abcdef"]
    question = Question([Answer(np.array([1, 2]), 1)] * 3, texts, right=1)
    task = Task("t", ["acc", "acc_norm"], is_choice=True, questions=[question] * 4)
    nats = [[2.0, 1, 3], [1, 1, 2], [1, 2.1, 4], [1, 2.0, 6]]
    scores = np.array([[value, 0] for part in nats for value in part])
    # The best of each question, over 1: 1 0 0 0; over 2, 2, 6 characters: 1 2 0 0
    assert task.measure(scores) == {"acc": 0.25, "acc_norm": 0.25, "questions": 4}
    cloze = Task("c", ["acc", "perplexity"], is_choice=False, questions=[Question([question.answers[0]], ["a"], 0)] * 2)
    measured = cloze.measure(np.array([[1.0, 0], [3.0, 2]]))
    assert measured == {"acc": 0.5, "perplexity": pytest.approx(math.exp(2)), "questions": 2}


def test_tokens_are_those_of_the_harness() -> None:
    tokenizer = load_tokenizer("python-2k")
    encoder = {"tokenizer": tokenizer, "opening": [tokenizer.bos_id], "seq_len": 8}
    plain = encode("def f", "(self):", **encoder)
    ids = tokenizer.encode("def f(self):").tolist()
    assert plain.tokens.tolist() == [tokenizer.bos_id, *ids]
    assert plain.scored == len(ids) - len(tokenizer.encode("def f"))
    joined = encode("__init__", "(self", **encoder)
    before, both = (tokenizer.encode(text).tolist() for text in ("__init__", "__init__(self"))
    assert before != both[: len(before)], "a token of both is of the context and the answer"
    assert joined.tokens.tolist() == [tokenizer.bos_id, *before, *both[len(before) :]]
    spaced = encode("return  ", "self", **encoder)
    assert spaced.scored == len(tokenizer.encode("return  self")) - len(tokenizer.encode("return"))
    assert encode("", "self", **encoder).tokens.tolist() == [tokenizer.bos_id, *tokenizer.encode("self")]
    long = encode("return self\n" * 9, "pass", **encoder)
    whole = tokenizer.encode("return self\n" * 9 + "pass").tolist()
    assert long.tokens.tolist() == whole[-9:]
    assert len(encode("a", "b", tokenizer=load_tokenizer("bytes"), opening=[], seq_len=8).tokens) == 2


def test_a_run_records_tasks_and_trains_the_same(tiny: TinyRun, model: Model) -> None:
    assert tiny.losses("with") == tiny.losses("without")
    records = validations(tiny, "with")
    assert [record["step"] for record in records] == [3, 6]
    assert [*records[-1]["tasks"]] == [*SHIPPED, "mine"]
    tasks = read_tasks([*SHIPPED, str(tiny.folder / "mine.jsonl")], **BYTES)
    parts = np.split(scores_of(model, tasks), np.cumsum([len(task.answers) for task in tasks])[:-1])
    for task, part in zip(tasks, parts, strict=True):
        assert records[-1]["tasks"][task.name] == task.measure(part)
    assert records[-1]["tasks"]["python_cloze"].keys() == {"acc", "perplexity", "questions"}
    assert records[-1]["tasks"]["mine"].keys() == {"acc", "acc_norm", "questions"}
    perplexities = [record["tasks"]["python_cloze"]["perplexity"] for record in records]
    assert perplexities == sorted(perplexities, reverse=True)


@pytest.mark.slow
def test_compiled_blocks_are_not_compiled_for_tasks(tiny: TinyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titanlite.parallelize.compile_blocks", trace_blocks)
    options = ["--compile.enable", "--validation.enable", f"--validation.path={tiny.text}", "--validation.freq=3"]
    tasks = "--validation.tasks=['number_choice']"
    graphs = []
    with one_process():
        for words in ([tasks], []):
            torch.compiler.reset()
            before = compiled_graphs()
            train_on_this_rank(tiny.config(*options, *words, f"--job.name=compiled-{len(words)}"), 0, 1)
            graphs.append(compiled_graphs() - before)
    assert graphs[0] == graphs[1] > 0
    assert tiny.losses("compiled-1") == tiny.losses("compiled-0")
    assert validations(tiny, "compiled-1")[-1]["loss"] == validations(tiny, "compiled-0")[-1]["loss"]


def test_a_checkpoint_has_the_scores_of_its_run(tiny: TinyRun, capfd: pytest.CaptureFixture[str]) -> None:
    run, task = str(tiny.folder / "outputs" / "with"), str(tiny.folder / "mine.jsonl")
    words = [word for name in (*SHIPPED, task) for word in ("--task", name)]
    assert cli.run(["evaluate", run, *words, "--json"]) == 0
    record = json.loads(capfd.readouterr().out)
    assert record["tasks"] == validations(tiny, "with")[-1]["tasks"]
    assert record["sources"] == {}
    assert cli.run(["evaluate", run, "--config", f"{run}/config.toml"]) == 0
    shown = capfd.readouterr().out
    assert mentions(shown, "python_cloze", "number_choice", "mine", "text")
    assert cli.run(["evaluate", run, "--task", "python_clozes"]) == 2
    [line] = capfd.readouterr().err.splitlines()
    assert mentions(line, "python_clozes", "python_cloze")


def test_a_run_may_have_tasks_alone(tiny: TinyRun, capfd: pytest.CaptureFixture[str]) -> None:
    (tiny.folder / "beside").mkdir()
    write(tiny.folder / "beside")
    toml = tiny.folder / "beside" / "alone.toml"
    toml.write_text(tiny.toml.read_text() + '[validation]\nenable = true\ntasks = ["mine.jsonl"]\n')
    assert cli.run(["train", "--config", str(toml), "--training.steps=1"]) == 0
    assert mentions("".join(capfd.readouterr()), "mine", "acc", "2 questions")
    [record] = validations(tiny, "alone")
    assert "loss" not in record
    assert record["tasks"]["mine"]["questions"] == 2


GOOD = {"context": "x", "choices": ["a", "b"], "answer": 0}


@pytest.mark.parametrize(
    ("questions", "named"),
    [
        ([], ["mine.jsonl"]),
        ([GOOD, {**GOOD, "answer": 2}], ["mine.jsonl:2", "answer", 2]),
        ([{**GOOD, "answer": -1}], ["mine.jsonl:1", "answer"]),
        ([{**GOOD, "answer": "b"}], ["mine.jsonl:1", "answer"]),
        ([{**GOOD, "choices": []}], ["mine.jsonl:1", "choices"]),
        ([{**GOOD, "choices": ["a", ""]}], ["mine.jsonl:1", "choices.1"]),
        ([{**GOOD, "choices": ["a", "b" * 40]}], ["mine.jsonl:1", "41", "32"]),
        ([{**GOOD, "question": "x"}], ["mine.jsonl:1", "question"]),
        ([{**GOOD, "context": 3}], ["mine.jsonl:1", "context"]),
        ([GOOD, {"context": "x", "answer": "a"}], ["mine.jsonl:2", "choices"]),
        ([{"context": "x", "answer": ""}], ["mine.jsonl:1", "answer"]),
        (json.dumps(GOOD) + "\n{", ["mine.jsonl:2"]),
        ("[1]\n", ["mine.jsonl:1"]),
        ("[" * 100_000, ["mine.jsonl:1"]),
    ],
)
def test_mistakes_are_one_line(questions: Any, named: list[str], tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        read_tasks([write(tmp_path, questions)], **BYTES)
    assert "\n" not in str(caught.value)
    assert mentions(str(caught.value), *named)


def test_a_file_of_the_harness_names_what_translates_it(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"task\.yaml.*harness_task\.py"):
        read_tasks([write(tmp_path, "task: mine\n", "task.yaml")], **BYTES)


def test_mistakes_are_found_before_a_run_starts(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tiny = TinyRun(tmp_path)
    path = write(tmp_path, [{"context": "x", "choices": ["a", "b"]}])
    toml = tiny.toml.read_text()
    for tasks, named in (([path], "answer"), (["no.jsonl"], "no.jsonl"), ([path, path], "mine")):
        tiny.toml.write_text(f"{toml}[validation]\nenable = true\ntasks = {json.dumps(tasks)}\n")
        for command in ("check", "train"):
            assert cli.run([command, "--config", str(tiny.toml)]) == 2
            [line] = [line for line in capfd.readouterr().err.splitlines() if "validation.tasks" in line]
            assert mentions(line, named)
    assert not (tmp_path / "outputs").exists()
