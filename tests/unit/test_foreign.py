"""What comes from others runs no code, and leads nowhere: the configs of checkpoints and runs, names, links."""

import json
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import tomlkit
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.chat_tokenizer import write_chat_tokenizer
from tests.weights import save_random, small_toml
from titanlite.checkpoint import manifest as manifests
from titanlite.checkpoint.manifest import MANIFEST
from titanlite.config.foreign import load_of_run, read_foreign
from titanlite.runtime.errors import UserError
from titanlite.runtime.files import checked_name, file_inside
from titanlite.storage.storage import LocalStorage
from titanlite.tools import cli
from titanlite.tools.convert.source import open_source, open_teacher

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
    checkpoint = run / "checkpoints" / "step-00000010"
    manifest = manifests.read_manifest(LocalStorage(str(checkpoint.parent), ""), checkpoint.name)
    data = text.encode()
    (checkpoint / "config.toml").write_bytes(data)
    manifest.files["config.toml"] = manifests.FileRecord(len(data), manifests._crc32(data))
    (checkpoint / MANIFEST).write_bytes(manifest.to_json())
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
COMMANDS: dict[str, list[str]] = {
    "generate": ["generate", "{run}", "--prompt", "a"],
    "export": ["checkpoint", "export", "{run}", "--out", "{out}"],
    "evaluate": ["evaluate", "{run}", "--data", "stdlib://"],
    "import": ["checkpoint", "import", "{run}", "--layers", "0", "--out", "{out}"],
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("command", COMMANDS)
def test_code_that_a_checkpoint_names_is_not_run(
    command: str,
    place: str,
    download: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
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
    words = [word.format(run=download, out=tmp_path / "out") for word in COMMANDS[command]]
    assert cli.run(words) == 2
    [line] = capfd.readouterr().err.splitlines()
    key = "base" if place == "a base" else "model.file"
    assert f'step-00000010: the config names {key} = "{named}", and it may be of others: refused' in line
    assert "--config" in line
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
    assert "of another program: name a config with the model, with --config" in capfd.readouterr().err


def test_a_teacher_names_its_code_in_the_config_of_the_user(download: Path) -> None:
    with_config(download, '[model]\nfile = "/somewhere/teacher.py"\n')
    with pytest.raises(UserError, match=r"names model.file = .*name it yourself, with teacher.config$"):
        open_teacher(str(download), None)


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


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('base = "/abs/other.toml"', "base"),
        ('[model]\nfile = "/abs/a.py"', "model.file"),
        ('[training]\nloss = "a.b:loss"', "training.loss"),
        ('[optimizer]\nname = "evil.Optimizer"', "optimizer.name"),
        ('[[optimizer.groups]]\nparameters = ["*"]\nname = "evil.py:Optimizer"', "optimizer.name"),
        ('[metrics]\nloggers = ["wandb", "/abs/log.py:Logger"]', "metrics.loggers"),
        ('[teacher]\npath = "/abs/teacher"', "teacher.path"),
    ],
)
def test_the_config_of_a_run_is_planned_without_its_code(text: str, named: str, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(text)
    with pytest.raises(
        UserError, match=rf"config.toml: the config names {named} = .*with --config {tmp_path}"
    ) as raised:
        load_of_run(tmp_path, None, world_size=1)
    assert "\n" not in str(raised.value)
    (tmp_path / "config.toml").write_text('[optimizer]\nname = "SGD"\n[metrics]\nloggers = ["wandb"]\n')
    assert load_of_run(tmp_path, None, world_size=1).optimizer.name == "SGD"


# Names and links


LINKED = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.json")


@pytest.mark.parametrize("name", [*LINKED, "chat_template.jinja", "added_tokens.json"])
def test_an_export_copies_nothing_that_a_link_leads_to(
    name: str, saved: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    write_chat_tokenizer(folder, "{{ messages }}")
    private = tmp_path / "private"
    private.write_text((folder / name).read_text() if (folder / name).exists() else SECRET)
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(private)
    words = ["checkpoint", "export", str(saved), "--tokenizer", str(folder), "--out", str(tmp_path / "out")]
    assert cli.run(words) == 2
    [line] = capfd.readouterr().err.splitlines()
    assert f"{folder}: {name!r} leads out of the folder: refused" in line
    assert not (tmp_path / "out").exists()
    (folder / name).unlink()
    shutil.copy(private, folder / "inside")
    (folder / name).symlink_to("inside")
    assert cli.run(words) == 0
    assert (tmp_path / "out" / name).read_bytes() == private.read_bytes()
    assert not (tmp_path / "out" / name).is_symlink()


def test_a_template_that_is_a_link_is_not_read(tmp_path: Path, saved: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    write_chat_tokenizer(folder, None)
    (tmp_path / "private").write_text(SECRET)
    (folder / "chat_template.jinja").symlink_to(tmp_path / "private")
    assert cli.run(["generate", str(saved), "--tokenizer", str(folder), "--chat", "--prompt", "a"]) == 2
    written = capfd.readouterr()
    assert "'chat_template.jinja' leads out of the folder: refused" in written.err
    assert SECRET not in written.out + written.err


def test_links_of_hugging_faces_cache_are_followed(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    write_chat_tokenizer(snapshot, "{{ messages }}")
    blobs = snapshot.parents[1] / "blobs"
    blobs.mkdir()
    for number, file in enumerate(sorted(snapshot.iterdir())):
        file.rename(blobs / str(number))
        file.symlink_to(f"../../blobs/{number}")
    assert all(file_inside(snapshot, file.name) == file for file in snapshot.iterdir())
    (snapshot / "other").symlink_to("../../refs")
    with pytest.raises(UserError, match="leads out"):
        file_inside(snapshot, "other")


NAMES = st.one_of(
    st.text(max_size=30),
    st.lists(st.sampled_from(["..", ".", "/", "a", "link", "inner", "\0", "~", "file", "\n"]), max_size=5).map("".join),
    st.sampled_from([None, 3, ["file"], {"a": 1}, b"file", "file", "link", "chain", "inner", "loop"]),
)


@given(name=NAMES)
@settings(max_examples=400, deadline=None)
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


VALUES = st.recursive(
    st.one_of(st.text(max_size=12), st.integers(-9, 9), st.booleans(), st.just("/abs/evil.py"), st.just("evil.mod:It")),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=6), inner, max_size=3)),
    max_leaves=6,
)
SECTIONS = st.sampled_from(["base", "model", "data", "training", "validation", "checkpoint", "optimizer", "metrics"])
OPTIONS = st.sampled_from(["file", "name", "path", "sources", "chat_template", "loss", "loggers", "tokenizer", "args"])
TREES = st.dictionaries(SECTIONS, st.one_of(VALUES, st.dictionaries(OPTIONS, VALUES, max_size=4)), max_size=5)


@given(tree=TREES, raw=st.one_of(st.none(), st.binary(max_size=60)))
@settings(max_examples=300, deadline=None)
def test_a_config_of_others_names_nothing_that_is_followed(tree: dict[str, Any], raw: bytes | None) -> None:
    text = raw if raw is not None else tomlkit.dumps(tree).encode()
    try:
        found = read_foreign(text, model_file=None)
    except UserError as error:
        assert "\n" not in str(error)  # noqa: PT017
        return
    config = found.draft.config
    assert (config.model.file, config.training.loss, config.data.path, config.data.sources) == (None, None, None, [])
    assert config.data.chat_template in (None, "tokenizer")
    paths = [path for source in config.validation.all_sources() for path in [source.path]]
    assert all(word.startswith("stdlib://") for path in paths for word in ([path] if isinstance(path, str) else path))
    assert (config.optimizer.name, config.metrics.loggers) == ("AdamW", ["tensorboard"])
    assert json.dumps(found.refused)
