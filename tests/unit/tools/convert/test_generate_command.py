"""`titanlite generate`: prompts, chats, endings and mistakes, on checkpoints of small models."""

import io
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.chat_tokenizer import write_chat_tokenizer
from tests.support.helpers import mentions, one_process
from tests.support.weights import random_model, save_model, small_toml
from titanlite.data.tokenizer import load_tokenizer
from titanlite.runtime.console import install_hint
from titanlite.runtime.errors import UserError
from titanlite.tools import cli
from titanlite.tools.convert.generation import Generator
from titanlite.tools.convert.prompts import opening_ids, stop_ids
from titanlite.tools.convert.source import open_source, tokenizer_of
from titanlite.tools.ingest.chat_template import Chat

PROMPT = "Die Größe von 日本"


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    toml = folder / "small.toml"
    toml.write_text(small_toml("llama3", max_seq_len=64))
    with one_process():
        save_model(folder, random_model(toml), toml)
    return folder


def generate(capfd: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = cli.run(["generate", *map(str, words)])
    written = capfd.readouterr()
    return code, written.out, written.err


def by_hand(folder: Path, prompt: str, count: int) -> bytes:
    """Greedy bytes, computing the whole sequence for each token, up to one that ends a document."""
    from titanlite.tools.convert.source import load_model

    model = load_model(open_source(str(folder)))
    ids = [256, *prompt.encode()]
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids]))[0, -1, :258].argmax()))
            if ids[-1] == 257:
                ids.pop()
                break
    return bytes(ids[1 + len(prompt.encode()) :])


def test_greedy_text(run_folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, out, err = generate(capfd, run_folder, "--prompt", PROMPT, "--max-new-tokens", 30)
    assert out == by_hand(run_folder, PROMPT, 30).decode(errors="replace") + "\n"
    assert (code, err) == (0, "")


@pytest.mark.long
def test_prompts_of_a_file_and_the_end_of_the_models_positions(
    run_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "prompts.txt"
    text.write_text("one\n\ntwo\r\n")
    code, out, err = generate(capfd, run_folder, "--prompt-file", text, "--max-new-tokens", 4)
    one, two = (by_hand(run_folder, prompt, 4).decode(errors="replace") for prompt in ("one", "two"))
    assert (code, out, err) == (0, f"{one}\n---\n{two}\n", "")
    whole = by_hand(run_folder, "one", 60)
    code, out, err = generate(capfd, run_folder, "--prompt", "one", "--max-new-tokens", 200)
    assert (code, out) == (0, whole.decode(errors="replace") + "\n")
    assert mentions(err, "max_seq_len", 64) if len(whole) == 60 else err == ""


@pytest.mark.long
def test_drawn_text_repeats_with_the_seed(run_folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    drawn = ("--prompt", "a", "--max-new-tokens", 30, "--temperature", 1.5, "--top-p", 0.9)
    texts = [generate(capfd, run_folder, *drawn, "--seed", seed)[1] for seed in (0, 1, 0)]
    assert texts[0] == texts[2] != texts[1]
    assert generate(capfd, run_folder, *drawn)[1] == texts[0], "0 is the default"


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--prompt", "a", "--prompt-file", "-"],
        ["--prompt", " "],
        ["--prompt", "a\udcff"],
        ["--prompt", "x" * 63],
        ["--prompt-file", "/no/such"],
        ["--prompt", "a", "--temperature", "nan"],
        ["--prompt", "a", "--seed", "3"],
        ["--prompt", "a", "--chat"],
        ["--prompt", "a", "--tokenizer", "python-2k"],
    ],
)
def test_mistakes_are_one_line(words: list[str], run_folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, out, err = generate(capfd, run_folder, *words)
    assert (code, out, err.count("\n")) == (2, "", 1)


def test_prompt_files_that_are_none(run_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for name, content in (
        ("empty.txt", b"\n \n"),
        ("broken.txt", b"\xff\n"),
    ):
        file = tmp_path / name
        file.write_bytes(content)
        code, out, err = generate(capfd, run_folder, "--prompt-file", file)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert err.startswith(f"error: --prompt-file: {file}")
    (tmp_path / "prompts.txt").write_text("a\n" + "x" * 200)
    code, out, err = generate(capfd, run_folder, "--prompt-file", tmp_path / "prompts.txt")
    assert (code, out) == (2, ""), "found before the first answer"
    assert mentions(err, "error", "201 tokens")


def test_lines_of_standard_input_are_answered_as_they_come(
    run_folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = b"one\n\ntwo\na\xff\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines), encoding="utf-8"))
    code, out, err = generate(capfd, run_folder, "--prompt-file", "-", "--max-new-tokens", 4)
    one, two = (by_hand(run_folder, prompt, 4).decode(errors="replace") for prompt in ("one", "two"))
    assert (code, out) == (2, f"{one}\n---\n{two}\n")
    assert err.startswith("error: --prompt-file: -: ")


def test_ctrl_c_ends_quietly(
    run_folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text so far ends with a line break."""
    next_logits = Generator.next_logits

    def interrupted(self: Generator, ids: list[int]) -> torch.Tensor:
        if len(ids) == 14:
            signal.raise_signal(signal.SIGINT)  # in this thread, at once
        return next_logits(self, ids)

    monkeypatch.setattr(Generator, "next_logits", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job begins with none
    try:
        code, out, err = generate(capfd, run_folder, "--prompt", "one", "--temperature", 1, "--seed", 1)
    finally:
        signal.signal(signal.SIGINT, before)
    assert (code, err) == (130, "")
    assert out.endswith("\n")
    assert 1 < len(out) < 12


TEMPLATE = Path(__file__).parents[3].joinpath("data", "chat_template.jinja").read_text().strip()


@pytest.fixture(scope="module")
def chat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_tokenizer(tmp_path_factory.mktemp("tokenizer"), TEMPLATE)


@pytest.mark.long
def test_chats_are_encoded_as_transformers_does(chat_folder: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = load_tokenizer(str(chat_folder))
    theirs = AutoTokenizer.from_pretrained(str(chat_folder))
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": " Wie groß? <|im_end|> "},
        {"role": "assistant", "content": "日本\nX"},
        {"role": "user", "content": "{{ x }}"},
    ]
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=True)["input_ids"]
    assert Chat(tokenizer).encode(messages) == expected
    assert expected.count(257) == 5
    assert opening_ids(tokenizer, None) == [256]
    assert stop_ids(tokenizer) == {258, 259}
    assert max(tokenizer.encode("<s>")) < 256, "in prompts that are no chat, it is plain text"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((chat_folder / name).read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{{ eos_token }}!")
    assert Chat(load_tokenizer(str(tmp_path))).encode(messages[:1]) == [258, *tokenizer.encode("!")]


@pytest.mark.long
def test_a_chat_is_what_the_template_makes_of_it(
    run_folder: Path, chat_folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[list[int]] = []
    stream = Generator.stream

    def watch(self: Generator, prompt: list[int], **options: Any) -> Any:
        given.append(prompt)
        return stream(self, prompt, **options)

    monkeypatch.setattr(Generator, "stream", watch)
    words = ("--prompt", "a", "--chat", "--tokenizer", chat_folder, "--max-new-tokens", 3)
    code, _, err = generate(capfd, run_folder, *words)
    assert (code, err) == (0, "")
    assert given == [Chat(load_tokenizer(str(chat_folder))).encode([{"role": "user", "content": "a"}])]


def test_a_tokenizer_of_another_size_is_pointed_out(run_folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = open_source(str(run_folder))
    assert tokenizer_of(source).name == "bytes"
    assert capfd.readouterr().err == ""
    larger = replace(source, spec=source.spec._replace(args=replace(source.spec.args, vocab_size=2304)))
    assert tokenizer_of(larger).name == "bytes"
    assert mentions(capfd.readouterr().err, "bytes", "258", "2,304")
    with pytest.raises(UserError, match="--tokenizer"):
        tokenizer_of(replace(source, tokenizer=None))


def test_a_tokenizer_without_its_package_is_one_line(
    run_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder has its tokenizer: only the package that reads it is missing. What needs no tokenizer is silent."""
    folder = tmp_path / "hf"
    assert cli.run(["checkpoint", "export", str(run_folder), "--out", str(folder)]) == 0
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    capfd.readouterr()
    reason = f"{folder}/tokenizer.json needs tokenizers: {install_hint('tokenizers')}; or"
    code, out, err = generate(capfd, folder, "--prompt", PROMPT, "--max-new-tokens", 3)
    assert (code, out) == (2, "")
    assert reason in err
    words = ["checkpoint", "export", str(folder), "--out", str(tmp_path / "again")]
    assert cli.run(words) == 2
    assert reason in capfd.readouterr().err
    assert cli.run([*words, "--no-tokenizer"]) == 0
    assert capfd.readouterr().err == ""


@pytest.mark.long
def test_an_exported_folder_generates_the_same_text(
    run_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The folder names the tokens that begin and end a text, and needs no option."""
    assert cli.run(["checkpoint", "export", str(run_folder), "--out", str(tmp_path / "hf")]) == 0
    capfd.readouterr()
    words = ("--prompt", PROMPT, "--max-new-tokens", 30)
    code, out, err = generate(capfd, tmp_path / "hf", *words)
    assert (code, out) == (0, by_hand(run_folder, PROMPT, 30).decode(errors="replace") + "\n")
    assert err == ""
    (tmp_path / "text.txt").write_text("zwölf Boxkämpfer jagen Viktor " * 20)
    lines = []
    for folder in (run_folder, tmp_path / "hf"):
        options = ("--seq-len", 64, "--sequences", 4, "--dtype", "float32", "--cache-folder", tmp_path / "cache")
        assert cli.run(["evaluate", str(folder), "--data", str(tmp_path / "text.txt"), *map(str, options)]) == 0
        lines.append(capfd.readouterr().out.splitlines()[1])
    assert lines[0] == lines[1]
    assert lines[0].split()[-2:] == ["256", "4"]
    (tmp_path / "hf" / "generation_config.json").write_text("[" * 100_000)
    assert generate(capfd, tmp_path / "hf", *words)[:2] == (code, out), "not needed"
