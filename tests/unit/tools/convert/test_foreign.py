"""What comes from others runs no code, and leads nowhere: the configs of checkpoints and runs, names, links."""

import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomlkit
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from tests.support.chat_tokenizer import write_chat_tokenizer
from tests.support.helpers import TinyRun, mentions, train_on_this_rank
from tests.support.manifests import forge
from tests.support.weights import save_random, small_toml
from titanlite.config.foreign import read_foreign
from titanlite.data.tokenizer import SHIPPED, TEMPLATES, files_of, is_copy, load_tokenizer
from titanlite.runtime.errors import UserError
from titanlite.runtime.files import checked_name, file_inside
from titanlite.tools import cli
from titanlite.tools.convert.source import open_model, open_source

SECRET = "a private file"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a small model."""
    folder = tmp_path_factory.mktemp("run")
    save_random(folder, "llama3")
    return folder


@pytest.fixture
def download(saved: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "download"
    shutil.copytree(saved, folder)
    return folder


def with_config(run: Path, text: str) -> Path:
    """Give the checkpoint of a run another config, with the right checksums, and return the run."""
    forge(run / "checkpoints" / "step-00000010", {"config.toml": text.encode()})
    return run


OWN_MODEL = """
open({canary!r}, "w")
from titanlite.models.llama3 import Llama3
class Mine(Llama3):
    pass
"""
PLACES = {
    "beside the checkpoint": "download/checkpoints/step-00000010/evil_a.py",
    "beside the run": "download/evil_b.py",
    "an absolute path elsewhere": "elsewhere/evil_c.py",
    "a relative path": "elsewhere/evil_d.py",
    "a module": "evil_e.py",
    "a base": "elsewhere/evil_f.py",
}


@pytest.mark.parametrize("place", PLACES)
def test_code_that_a_checkpoint_names_is_not_run(
    place: str, download: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Every command opens a checkpoint by the same function."""
    monkeypatch.chdir(tmp_path)
    canary, file = tmp_path / "canary", tmp_path / PLACES[place]
    file.parent.mkdir(exist_ok=True)
    file.write_text(OWN_MODEL.format(canary=str(canary)))
    named = {"a relative path": PLACES[place], "a module": file.stem}.get(place, str(file))
    text = small_toml("llama3").replace('name = "llama3"', f'file = "{named}"')
    if place == "a base":
        (tmp_path / "elsewhere" / "base.toml").write_text(text)
        text = f'base = "{tmp_path}/elsewhere/base.toml"\n'
        named = f"{tmp_path}/elsewhere/base.toml"
    with_config(download, text)
    assert cli.run(["checkpoint", "export", str(download), "--out", str(tmp_path / "out")]) == 2
    [line] = capfd.readouterr().err.splitlines()
    key = "base" if place == "a base" else "model.file"
    assert mentions(line, "step-00000010", f'{key} = "{named}"', "--config")
    assert ("--model-file" in line) == (key == "model.file")
    assert not canary.exists()
    assert not (tmp_path / "out").exists()


def test_code_that_the_user_names_is_run(download: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    canary, file = tmp_path / "canary", tmp_path / "mine_named.py"
    file.write_text(OWN_MODEL.format(canary=str(canary)))
    text = small_toml("llama3").replace('name = "llama3"', f'file = "{tmp_path}/gone.py"\nflavor = "debug"')
    with_config(download, text)
    words = ["checkpoint", "export", str(download), "--out"]
    assert cli.run([*words, str(tmp_path / "a"), "--model-file", str(file)]) == 0
    assert canary.exists()
    toml = tmp_path / "mine.toml"
    toml.write_text(text.replace("gone.py", "mine_named.py"))
    assert cli.run([*words, str(tmp_path / "b"), "--config", str(toml)]) == 0
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in "ab"]
    assert weights[0] == weights[1]
    assert cli.run(["generate", str(tmp_path / "a"), "--prompt", "a", "--model-file", str(file)]) == 2
    assert mentions(capfd.readouterr().err, f"--model-file: {tmp_path}/a", "--config")


def test_a_teacher_names_its_code_in_the_config_of_the_user(download: Path) -> None:
    with_config(download, '[model]\nfile = "/somewhere/teacher.py"\n')
    with pytest.raises(UserError, match=r"model\.file = .*teacher\.config$"):
        open_model(str(download), None, "teacher")


def test_pieces_of_the_users_own_are_not_imported(download: Path, tmp_path: Path) -> None:
    """Commands on weights have no use for these options, so a run of the user's own needs no other word."""
    canary, file = tmp_path / "canary", tmp_path / "pieces.py"
    file.write_text(f"open({str(canary)!r}, 'w')\n")
    text = small_toml("llama3").replace('name = "SGD"', f'name = "{file}:Own"')
    more = f"""
[data]
tokenizer = "bytes"
path = "python://{file}:Data"
cache_folder = "{tmp_path}/cache"
[metrics]
loggers = ["{file}:Logger"]
[teacher]
path = "{tmp_path}/teacher"
"""
    text = text.replace('[data]\ntokenizer = "bytes"\n', more).replace(
        "[training]", f'[training]\nloss = "{file}:loss"'
    )
    source = open_source(str(with_config(download, text)))
    assert source.config is not None
    assert (source.config.training.loss, source.config.data.path, source.config.teacher.path) == (None, None, None)
    assert (source.config.optimizer.name, source.config.metrics.loggers) == ("AdamW", ["tensorboard"])
    assert source.config.training.seq_len == 64
    assert not canary.exists()


# Tokenizers


@pytest.fixture
def opened() -> Iterator[list[str]]:
    """The files that this process opens."""
    files: list[str] = []
    active = [True]

    def note(event: str, arguments: tuple[Any, ...]) -> None:  # stays until the process ends
        if active and event == "open" and isinstance(arguments[0], str | bytes):
            files.append(os.fsdecode(arguments[0]))

    sys.addaudithook(note)
    yield files
    active.clear()


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    folder = tmp_path / "my tokenizer"
    folder.mkdir()
    return write_chat_tokenizer(folder, "{{ messages }}")


def of_a_path(download: Path, tokenizer: Path) -> Path:
    """Let the config of a checkpoint name the path of a tokenizer, and return the run."""
    return with_config(download, small_toml("llama3", tokenizer=str(tokenizer)))


READ = {
    "generate": ["generate", "{run}", "--prompt", "a", "--max-new-tokens", "1"],
    "export": ["checkpoint", "export", "{run}", "--out", "{out}"],
    "evaluate": ["evaluate", "{run}", "--data", "{text}", "--cache-folder", "{out}", "--sequences", "1"],
}


@pytest.mark.parametrize("command", READ)
def test_a_tokenizer_that_a_checkpoint_names_is_not_opened(
    command: str,
    download: Path,
    tokenizer: Path,
    tmp_path: Path,
    opened: list[str],
    capfd: pytest.CaptureFixture[str],
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("one two three four five " * 50)
    run = of_a_path(download, tokenizer)
    words = [word.format(run=run, out=tmp_path / "out", text=text) for word in READ[command]]
    assert cli.run(words) == 2
    [line] = capfd.readouterr().err.splitlines()
    assert mentions(line, f"{download}/tokenizer", f'"{tokenizer}"', "--tokenizer")
    assert any("step-00000010" in file for file in opened)
    assert [file for file in opened if "my tokenizer" in file] == []
    assert cli.run([*words, "--tokenizer", str(tokenizer)]) == 0
    assert [file for file in opened if "my tokenizer" in file] != []


def test_the_copy_beside_a_checkpoint_is_checked_as_weights_are(
    download: Path, tokenizer: Path, tmp_path: Path, opened: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["generate", str(of_a_path(download, tokenizer)), "--prompt", "a", "--max-new-tokens", "1"]
    copy = download / "tokenizer"
    copy.symlink_to(tokenizer)
    assert cli.run(words) == 2
    assert f"{download}: 'tokenizer' " in capfd.readouterr().err
    copy.unlink()
    copy.mkdir()
    (copy / "tokenizer.json").symlink_to(tokenizer / "tokenizer.json")
    assert cli.run(words) == 2
    assert f"{copy}: 'tokenizer.json' " in capfd.readouterr().err
    assert [file for file in opened if "my tokenizer" in file] == []
    (copy / "tokenizer.json").unlink()
    (copy / "tokenizer.json").touch()
    os.truncate(copy / "tokenizer.json", 2**28 + 1)  # takes no space
    assert cli.run(words) == 2
    assert mentions(capfd.readouterr().err, copy / "tokenizer.json", "268,435,457", "268,435,456")
    shutil.copy(tokenizer / "tokenizer.json", copy)
    assert cli.run(words) == 0
    alone = tmp_path / "alone" / "step-00000010"
    shutil.copytree(download / "checkpoints" / alone.name, alone)
    assert cli.run(["generate", str(alone), *words[2:]]) == 2
    assert mentions(capfd.readouterr().err, f"{alone.parent}/tokenizer")
    shutil.copytree(copy, alone.parent / "tokenizer")
    assert cli.run(["generate", str(alone), *words[2:]]) == 0


def test_a_teacher_of_others_reads_no_tokenizer_elsewhere(download: Path, tokenizer: Path, opened: list[str]) -> None:
    source = open_model(str(of_a_path(download, tokenizer)), None, "teacher")
    assert source.tokenizer is None
    assert [file for file in opened if "my tokenizer" in file] == []
    shutil.copytree(tokenizer, download / "tokenizer")
    source = open_model(str(download), None, "teacher")
    assert source.tokenizer is not None
    assert source.tokenizer.vocab_size == 260


def test_an_import_keeps_the_tokenizer(download: Path, tokenizer: Path, tmp_path: Path) -> None:
    """Imported weights go on where their source is gone."""
    words = ["checkpoint", "export", str(download), "--tokenizer", str(tokenizer), "--out", str(tmp_path / "hf")]
    assert cli.run(words) == 0
    assert cli.run(["checkpoint", "import", str(tmp_path / "hf"), "--out", str(tmp_path / "ours")]) == 0
    expected = load_tokenizer(str(tokenizer)).fingerprint
    shutil.rmtree(tokenizer)
    shutil.rmtree(tmp_path / "hf")
    found = open_source(str(tmp_path / "ours")).tokenizer
    assert found is not None
    assert (found.name, found.fingerprint) == (str(tmp_path / "ours/tokenizer"), expected)


def test_named_templates_go_with_a_tokenizer(saved: Path, tmp_path: Path) -> None:
    """From an export to its import, and to the export of that. What a killed export has left does no harm."""
    folder = tmp_path / "tokenizer"
    more = folder / TEMPLATES
    more.mkdir(parents=True)
    write_chat_tokenizer(folder, None)
    texts = {name: name + ": {{ messages[0].content }}" for name in ("rag", "tool_use")}
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    for name, text in texts.items():
        (more / f"{name}.jinja").write_text(text)
    (more / "notes.txt").write_text("mine")
    (more / "folder.jinja").mkdir()
    left = tmp_path / ".hf.staging" / TEMPLATES
    left.mkdir(parents=True)
    (left / "old.jinja").write_text("old")
    hf, ours, again = (tmp_path / name for name in ("hf", "ours", "again"))
    assert cli.run(["checkpoint", "export", str(saved), "--tokenizer", str(folder), "--out", str(hf)]) == 0
    assert cli.run(["checkpoint", "import", str(hf), "--out", str(ours)]) == 0
    assert cli.run(["checkpoint", "export", str(ours), "--out", str(again)]) == 0
    for found in (hf, ours / "tokenizer", again):
        assert {file.name: file.read_text() for file in (found / TEMPLATES).iterdir()} == {
            f"{name}.jinja": text for name, text in texts.items()
        }
    theirs: Any = AutoTokenizer.from_pretrained(again)
    chat = [{"role": "user", "content": "hi"}]
    assert theirs.apply_chat_template(chat, chat_template="rag", tokenize=False) == "rag: hi"
    assert theirs.apply_chat_template(chat, tools=[{}], tokenize=False) == "tool_use: hi"


@pytest.mark.usefixtures("single_process_group")
def test_a_run_keeps_its_tokenizer(tiny: TinyRun, tokenizer: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = [f"--data.tokenizer={tokenizer}", "--model.args.vocab_size=260", "--training.seq_len=16"]
    used = load_tokenizer(str(tokenizer)).fingerprint
    train_on_this_rank(tiny.config(*options, "--training.steps=2"), 0, 1)
    run = tiny.folder / "outputs" / "tiny"
    copy = run / "tokenizer"
    files = {file.name: file.read_bytes() for file in tokenizer.iterdir()}
    assert {file.name: file.read_bytes() for file in copy.iterdir()} == files
    [index] = (tiny.folder / "outputs").glob("data_cache/*/index.json")
    assert json.loads(index.read_bytes())["tokenizer"]["fingerprint"] == used
    assert load_tokenizer(str(copy)).fingerprint == used
    away = tokenizer.rename(tokenizer.with_name("away"))
    assert cli.run(["generate", str(run), "--prompt", "a", "--max-new-tokens", "1"]) == 0
    assert cli.run(["checkpoint", "export", str(run), "--out", str(tiny.folder / "hf")]) == 0
    assert (tiny.folder / "hf" / "tokenizer.json").read_bytes() == files["tokenizer.json"]
    away.rename(tokenizer)
    written = (copy / "tokenizer.json").stat().st_mtime_ns
    train_on_this_rank(tiny.config(*options, "--training.steps=3"), 0, 1)
    assert (copy / "tokenizer.json").stat().st_mtime_ns == written, "another start leaves it"
    (copy / "tokenizer.json").unlink()
    (tokenizer / "chat_template.jinja").write_text("new")
    (tokenizer / TEMPLATES).mkdir()
    (tokenizer / TEMPLATES / "rag.jinja").write_text("rag")
    train_on_this_rank(tiny.config(*options, "--training.steps=4"), 0, 1)
    assert (copy / "tokenizer.json").exists()
    assert (copy / "chat_template.jinja").read_text() == "new"
    assert (run / "tokenizer-until-step-3" / "tokenizer_config.json").exists()
    assert str(run / "tokenizer-until-step-3") in caplog.text
    assert is_copy(files_of(tokenizer / "tokenizer.json"), copy)
    (copy / TEMPLATES / "rag.jinja").unlink()
    assert not is_copy(files_of(tokenizer / "tokenizer.json"), copy)


@pytest.mark.usefixtures("single_process_group")
def test_a_run_with_a_rank_file_keeps_it(tiny: TinyRun) -> None:
    file = tiny.folder / "my.ranks"
    shutil.copy(SHIPPED / "python-2k.model", file)
    options = [f"--data.tokenizer={file}", "--model.args.vocab_size=2304", "--training.seq_len=16"]
    train_on_this_rank(tiny.config(*options, "--training.steps=1"), 0, 1)
    run = tiny.folder / "outputs" / "tiny"
    file.unlink()
    source = open_source(str(run))
    assert source.tokenizer is not None
    assert source.tokenizer.fingerprint == load_tokenizer("python-2k").fingerprint
    train_on_this_rank(tiny.config("--job.name=plain", "--training.steps=1"), 0, 1)
    assert not (run.parent / "plain" / "tokenizer").exists(), "bytes need none"


# Names and links


LINKED = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.json")


def test_an_export_copies_nothing_that_a_link_leads_to(
    saved: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    private, name = tmp_path / "private", ""
    export = ["checkpoint", "export", str(saved), "--out", str(tmp_path / "out"), "--tokenizer"]
    folder = tmp_path
    for name in (*LINKED, "chat_template.jinja", "added_tokens.json"):
        folder = tmp_path / f"tokenizer of {name}"
        folder.mkdir()
        write_chat_tokenizer(folder, "{{ messages }}")
        private.write_text((folder / name).read_text() if (folder / name).exists() else SECRET)
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(private)
        assert cli.run([*export, str(folder)]) == 2
        [line] = capfd.readouterr().err.splitlines()
        assert f"{folder}: {name!r} " in line
        assert not (tmp_path / "out").exists()
    (folder / name).unlink()
    elsewhere, templates = tmp_path / "elsewhere", folder / TEMPLATES
    elsewhere.mkdir()
    (elsewhere / "rag.jinja").write_text(SECRET)
    for link, leads in ((templates, elsewhere), (templates / "rag.jinja", elsewhere / "rag.jinja")):
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(leads)
        assert cli.run([*export, str(folder)]) == 2
        assert repr(link.name) in capfd.readouterr().err
        assert not (tmp_path / "out").exists()
        link.unlink()
    (folder / "inside").write_text("{}")
    (folder / name).symlink_to("inside")
    assert cli.run([*export, str(folder)]) == 0
    assert (tmp_path / "out" / name).read_bytes() == b"{}"
    assert not (tmp_path / "out" / name).is_symlink()


def test_a_template_that_is_a_link_is_not_read(tmp_path: Path, saved: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    write_chat_tokenizer(folder, None)
    (tmp_path / "private").write_text(SECRET)
    (folder / "chat_template.jinja").symlink_to(tmp_path / "private")
    assert cli.run(["generate", str(saved), "--tokenizer", str(folder), "--chat", "--prompt", "a"]) == 2
    written = capfd.readouterr()
    assert "'chat_template.jinja'" in written.err
    assert SECRET not in written.out + written.err


LETTERS = "aB3._-/~\\ \0\n\x85é日\u2028🙂"
NAMES = st.one_of(
    st.text(LETTERS, max_size=30),
    st.lists(st.sampled_from(["..", ".", "/", "a", "link", "inner", "\0", "~", "file", "\n"]), max_size=5).map("".join),
    st.sampled_from([None, 3, ["file"], {"a": 1}, b"file", "file", "link", "chain", "inner", "loop"]),
)


@given(name=NAMES)
@settings(max_examples=150, deadline=None)
def test_a_name_of_others_stays_in_its_folder(name: Any) -> None:
    """What passes is a file of the folder itself, and everything else is one clear line."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, "folder")
        (folder / "inner").mkdir(parents=True)
        (folder / "file").touch()
        Path(temporary, "outside").touch()
        (folder / "link").symlink_to("../outside")
        (folder / "chain").symlink_to("link")
        (folder / "loop").symlink_to("loop")
        try:
            path = file_inside(folder, name)
        except UserError as error:
            assert name not in ("file", "inner")
            assert "\n" not in str(error)  # noqa: PT017
        else:
            assert os.path.realpath(path) == os.path.join(os.path.realpath(folder), os.path.basename(path))
            assert name not in ("link", "chain")
        try:
            assert re.fullmatch(r"[\w.-]+", checked_name(name), re.ASCII)
            assert (folder / name).parent == folder
        except ValueError as error:
            assert "\n" not in str(error)  # noqa: PT017


TEXT = st.text(LETTERS, max_size=12)
VALUES = st.recursive(
    st.one_of(TEXT, st.integers(-9, 9), st.booleans(), st.just("/abs/evil.py"), st.just("evil.mod:It")),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXT, inner, max_size=3)),
    max_leaves=6,
)
SECTIONS = st.sampled_from(["base", "model", "data", "training", "validation", "checkpoint", "optimizer", "metrics"])
OPTIONS = st.sampled_from(["file", "name", "path", "sources", "chat_template", "loss", "loggers", "tokenizer", "args"])
TREES = st.dictionaries(SECTIONS, st.one_of(VALUES, st.dictionaries(OPTIONS, VALUES, max_size=4)), max_size=5)


def test_a_folder_of_a_model_of_transformers_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "olmo").mkdir()
    for path in (str(tmp_path), "../other", "~", "olmo", "hub/name", ""):
        text = tomlkit.dumps({"model": {"name": "transformers", "path": path}}).encode()
        with pytest.raises(UserError, match=r"model\.path"):
            read_foreign(text, model_file=None)
    draft, _ = read_foreign(b'model = {name = "transformers", path = "olmo2"}', model_file=None)
    assert draft.config.model.path == "olmo2"


@given(tree=TREES, raw=st.one_of(st.none(), st.binary(max_size=60)))
@settings(max_examples=100, deadline=None)
def test_a_config_of_others_names_nothing_that_is_followed(tree: dict[str, Any], raw: bytes | None) -> None:
    text = raw if raw is not None else tomlkit.dumps(tree).encode()
    try:
        draft, refused = read_foreign(text, model_file=None)
    except UserError as error:
        assert "\n" not in str(error)  # noqa: PT017
        return
    config = draft.config
    assert (config.model.file, config.training.loss, config.data.path, config.data.sources) == (None, None, None, [])
    assert config.model.path is None or re.fullmatch(r"\w+", config.model.path)
    assert config.data.chat_template in (None, "tokenizer")
    paths = [path for source in config.validation.all_sources() for path in [source.path]]
    assert all(word.startswith("stdlib://") for path in paths for word in ([path] if isinstance(path, str) else path))
    assert (config.optimizer.name, config.metrics.loggers) == ("AdamW", ["tensorboard"])
    assert json.dumps(refused)
