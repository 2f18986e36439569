"""Chats become the tokens and masks of transformers, and packed chats have the loss that each has alone."""

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer

from tests.support.chat_tokenizer import write_chat_tokenizer
from tests.support.helpers import mentions
from tests.support.models import SMALL, built
from titanlite.config.load import load
from titanlite.data.packing import BestFit
from titanlite.data.samples import as_batch
from titanlite.data.sources import open_tokens
from titanlite.data.tokenizer import load_tokenizer
from titanlite.data.tokens import TokenStore
from titanlite.loss import token_loss
from titanlite.ops.attention import document_arguments
from titanlite.runtime.errors import UserError
from titanlite.schema import Data
from titanlite.tools import cli
from titanlite.tools.ingest import chat_template
from titanlite.tools.ingest.chat import _segments
from titanlite.tools.ingest.chat_template import Chat, ChatTemplate, Refused
from titanlite.tools.ingest.prepare import prepare_text

CHATML = """\
{{- bos_token }}
{%- if tools %}{{ tools | tojson(indent=2) }}{% endif %}
{%- for message in messages %}
    {%- if message.role == 'robot' %}{{ raise_exception('no such role') }}{% endif %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}
        {%- if message.content %}{{ message.content | trim }}{% endif %}
        {%- for call in message.tool_calls or [] %}{{ '<call>' + call | tojson + '</call>' }}{% endfor %}
        {{- '<|im_end|>\\n' }}
        {%- endgeneration %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
"""
HEADERS = """\
{% set names = {'user': 'Human'} %}
{% for message in messages %}
{% if loop.first and message.role == 'system' %}{{ message.content }}

{% continue %}
{% endif %}
[{{ names.get(message.role, message.role) }}]: \
{% if message.role == 'assistant' %}{% generation %} {{ message['content'] }}{{ eos_token }}
{% endgeneration %}{% else %}{{ message['content'] }}
{% endif %}
{% endfor %}
"""


def turn(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


USER, ASSISTANT = turn("user", "Hello?"), turn("assistant", "Hello.")
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "ü <&>"}}}
CHATS: list[list[dict[str, Any]]] = [
    [USER, ASSISTANT],
    [turn("system", "Be brief."), USER, ASSISTANT],
    [turn("system", "Be brief."), USER, ASSISTANT, turn("user", "And?"), turn("assistant", "That is all.")],
    [USER, turn("assistant", "")],
    [turn("user", ""), ASSISTANT],
    [USER, ASSISTANT, turn("assistant", "One more."), turn("assistant", "And another.")],
    [USER, ASSISTANT, turn("user", "It ends with the user.")],
    [ASSISTANT],
    [turn("assistant", "It begins with the assistant."), USER],
    [turn("user", "日本語 👩‍👩‍👧‍👦 é e\u0301"), turn("assistant", "Ünïcödé 👍🏽 — „ja“")],
    [turn("user", "  \n\t spaces \r\n"), turn("assistant", " \n padded \n\n")],
    [turn("user", "<|im_start|>assistant\nfaked<|im_end|>"), turn("assistant", "text with <|im_end|> and <s> in it")],
    [turn("user", "{{ bos_token }} {% generation %}"), turn("assistant", "{% endgeneration %} {# no comment #}")],
    [turn("user", "<b>&amp;</b>"), turn("assistant", '{"json": [1, 2], "text": "\\n"}')],
    [turn("user", "x" * 3000), turn("assistant", "y" * 2000)],
    [turn("user", "add 1 and ü"), turn("assistant", None, tool_calls=[CALL]), turn("tool", "3"), ASSISTANT],
    [turn("user", "twice"), turn("assistant", "first", tool_calls=[CALL, CALL])],
    [turn("user", "\n"), turn("assistant", "\n")],
    [turn("user", "a"), turn("assistant", "\u200b\u00a0")],
    [*[USER, ASSISTANT] * 6],
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_tokenizer(tmp_path_factory.mktemp("tokenizer"), CHATML)


def write_chats(path: Path, chats: list[Any]) -> Path:
    path.write_text(
        "".join(json.dumps(chat if isinstance(chat, dict) else {"messages": chat}) + "\n" for chat in chats)
    )
    return path


def prepare(chats: Path, tokenizer: object, *options: object) -> tuple[int, Path]:
    out = chats.with_suffix("")
    words = ["data", "prepare", chats, "--chat", "--tokenizer", tokenizer, "--out", out, *options]
    return cli.run([*map(str, words)]), out


def prepared(chats: Path, tokenizer: object, *options: object) -> Path:
    code, out = prepare(chats, tokenizer, *options)
    assert code == 0
    return out


def documents(folder: Path) -> list[tuple[list[int], list[bool]]]:
    """Return the tokens of each document, and which of them count in the loss."""
    store = TokenStore(folder)
    starts = store.document_starts(0, len(store)).tolist()
    return [
        (store.read(start, end - start).tolist(), store.read_mask(start, end - start).astype(bool).tolist())
        for start, end in zip(starts, [*starts[1:], len(store)], strict=True)
    ]


def of_transformers(
    folder: Path, chats: list[list[dict[str, Any]]], **options: Any
) -> list[tuple[list[int], list[bool]]]:
    return of_lines(folder, [{"messages": chat} for chat in chats], **options)


def of_lines(folder: Path, lines: list[dict[str, Any]], **options: Any) -> list[tuple[list[int], list[bool]]]:
    """Return what transformers makes of lines with `messages` and `tools`."""
    theirs = AutoTokenizer.from_pretrained(str(folder))
    found = []
    for line in lines:
        done = theirs.apply_chat_template(
            line["messages"],
            return_dict=True,
            return_assistant_tokens_mask=True,
            **{"tools": line.get("tools")} | options,
        )
        found.append((list(done["input_ids"]), [bool(flag) for flag in done["assistant_masks"]]))
    return found


@pytest.mark.long
def test_twenty_chats_are_those_of_transformers(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("titanlite.tools.ingest.prepare.WORKER_BYTES", 1)  # so that a process of its own makes them
    out = prepared(write_chats(tmp_path / "chats.jsonl", CHATS), tokenizer, "--workers", 2)
    expected = of_transformers(tokenizer, CHATS)
    assert len(expected) == 20
    assert documents(out) == expected
    assert all(any(mask) and not all(mask) for _, mask in expected)


@pytest.mark.long
def test_another_template(tmp_path: Path, tokenizer: Path) -> None:
    """Blocks lose their line ends as in transformers."""
    plain = [chat for chat in CHATS if all(isinstance(message["content"], str) for message in chat)]
    file = tmp_path / "template.jinja"
    file.write_text(HEADERS)
    chats = write_chats(tmp_path / "chats.jsonl", plain)
    out = prepared(chats, tokenizer, "--chat-template", file)
    assert documents(out) == of_transformers(tokenizer, plain, chat_template=HEADERS)


TURNS = """\
{% for message in messages %}{% if message.role == 'assistant' %}\
{{ 'bot: ' }}{% generation %}{{ message.content }}{% endgeneration %}{{ '\n' }}\
{% else %}{{ 'user: ' + message.content + '\n' }}{% endif %}{% endfor %}"""


@pytest.mark.long
def test_answers_end_where_a_character_has_several_tokens_or_none(tmp_path: Path) -> None:
    """An emoji is four tokens of bytes; a tokenizer of words has none for white space."""
    chats = [[USER, turn("assistant", "ok \N{ROCKET}")], [USER, turn("assistant", "ok \n"), turn("user", "and so on")]]
    for name in ("bytes", "words"):
        (tmp_path / name).mkdir()
    by_bytes, by_words = write_chat_tokenizer(tmp_path / "bytes", TURNS), tmp_path / "words"
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "ok": 1, "user": 2, "bot": 3, ":": 4}, "[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(by_words / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TURNS}
    (by_words / "tokenizer_config.json").write_text(json.dumps(config))
    counted = {}
    for folder in (by_bytes, by_words):
        out = prepared(write_chats(folder / "chats.jsonl", chats), folder)
        assert documents(out) == of_transformers(folder, chats)
        counted[folder] = [sum(mask) for _, mask in documents(out)]
    assert counted == {by_bytes: [7, 4], by_words: [2, 1]}


TOOL = {"type": "function", "function": {"name": "add", "description": "Adds <a> & b.", "extra": None}}
SHOWING = """\
{{ bos_token }}{{ tools | tojson }}{{ documents }}{{ pad_token is defined }}{{ cls_token }}
{% macro said(text) %}<{% generation %}{{ text }}{% endgeneration %}>{% endmacro %}
{% for message in messages %}
{{ message | tojson }}{{ message.name is defined }}
{% if message.role == 'assistant' %}{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}
{{ said(message.content) }}{{ said('x' * 9) | trim }}{% endif %}
{% endfor %}"""
"""A template that shows all that it is given, and has answers within a macro."""


def called(arguments: Any, **more: Any) -> dict[str, Any]:
    return turn("assistant", None, tool_calls=[{"function": {"name": "f", "arguments": arguments}}], **more)


@pytest.mark.long
def test_missing_values_and_tools_are_those_of_transformers(tmp_path: Path) -> None:
    """Pairs of a line and of what transformers is given for it."""
    tokenizer = write_chat_tokenizer(tmp_path, SHOWING)
    (tokenizer / "special_tokens_map.json").write_text(json.dumps({"cls_token": {"content": "<|endoftext|>"}}))
    chat = [USER, ASSISTANT]
    same: list[dict[str, Any]] = [
        {"messages": [USER, turn("assistant", None), ASSISTANT]},
        {"messages": [USER, called({"x": None, "y": [None, {"z": None}]}), turn("tool", "3", name=None), ASSISTANT]},
        {"messages": [USER, called('{"x": 1}', reasoning_content=None, name=None), ASSISTANT]},
        {"messages": [USER, turn("assistant", "Hm.", tool_calls=None, reasoning="why", weight=None)]},
        {"messages": [USER, turn("assistant", "Hm.", tool_calls=[], thinking="why")]},
        {"messages": [USER, turn("assistant", [{"type": "text", "text": None}])]},
        {"messages": [USER, {"role": "assistant"}, turn("assistant", "marks \ufdd0 \ufdd1")]},
        {"messages": chat, "tools": []},
        {"messages": chat, "tools": None},
        {"messages": chat, "tools": [TOOL, {}]},
    ]
    turns = [
        {"from": "human", "value": "Hello?", "role": None},
        {"from": "gpt", "value": None, "tool_calls": []},
        {"from": "gpt", "value": "Hello.", "name": None},
    ]
    pairs = [
        *((line, line) for line in same),
        ({"messages": chat, "tools": TOOL}, {"messages": chat, "tools": [TOOL]}),
        ({"messages": chat, "tools": json.dumps([TOOL, TOOL])}, {"messages": chat, "tools": [TOOL, TOOL]}),
        ({"messages": chat, "tools": json.dumps(TOOL)}, {"messages": chat, "tools": [TOOL]}),
        ({"messages": chat, "tools": "[]"}, {"messages": chat, "tools": []}),
        ({"messages": chat, "tools": "null", "documents": [{"title": "t"}], "id": 7}, {"messages": chat}),
        ({"messages": turns}, {"messages": [USER, {"role": "assistant", "tool_calls": []}, ASSISTANT]}),
    ]
    bad = [{"messages": chat, "tools": tools} for tools in ("[{", "", "7", '["add"]', ["add"], [None], 7, False)]
    lines = write_chats(tmp_path / "chats.jsonl", [*(line for line, _ in pairs), *bad])
    out = prepared(lines, tokenizer, "--on-error", "skip")
    for found, (line, given) in zip(documents(out), pairs, strict=True):
        assert found == of_lines(tokenizer, [given])[0], line
    errors = TokenStore(out).index["first_errors"]
    assert [error.partition(": ")[0] for error in errors] == [
        f"{lines}:{number}" for number in range(len(pairs) + 1, len(pairs) + len(bad) + 1)
    ]
    assert all("'tools'" in error for error in errors)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["parquet", "arrow", "dataset"])
@pytest.mark.parametrize("as_text", [True, False])
def test_rows_of_tables_have_the_tokens_of_their_lines(tmp_path: Path, kind: str, as_text: bool) -> None:
    """A table has each key in each object, as null where a line lacks it."""
    import datasets
    import pyarrow
    from pyarrow import feather, parquet

    tokenizer = write_chat_tokenizer(tmp_path, SHOWING)
    other = {"type": "function", "function": {"name": "g", "parameters": {"y": {"type": "int"}}}}
    lines: list[dict[str, Any]] = [
        {"messages": [USER, called({"x": 1}), called({"y": {"z": 2}}), turn("tool", "3"), ASSISTANT], "tools": [other]},
        {"messages": [USER, turn("assistant", "Hm.", reasoning_content="why")], "tools": [CALL, other]},
        {"messages": [USER, ASSISTANT], "tools": []},
        {"messages": [USER, ASSISTANT]},
    ]
    rows = [
        {"id": 7, **line, "tools": json.dumps(line["tools"]) if as_text and "tools" in line else line.get("tools")}
        for line in lines
    ]
    table, file = pyarrow.Table.from_pylist(rows), tmp_path / f"chats.{kind}"
    match kind:
        case "parquet":
            parquet.write_table(table, file)
        case "arrow":
            feather.write_feather(table, str(file))
        case _:
            datasets.Dataset(table).save_to_disk(str(file))
    assert documents(prepared(file, tokenizer)) == of_lines(tokenizer, lines)


@pytest.mark.long
@pytest.mark.parametrize("column", ["messages", "message", "arguments"])
def test_json_columns_and_json_text_have_the_tokens_of_their_lines(tmp_path: Path, column: str) -> None:
    """Hugging Face datasets stores objects of different keys as JSON, in a type of its own, at any depth. There, null
    is not a key that Arrow has added."""
    import datasets

    tokenizer = write_chat_tokenizer(tmp_path, SHOWING)
    lines: list[dict[str, Any]] = [
        {"messages": [USER, called({"x": None, "y": [None, 0.7]}), ASSISTANT], "tools": [CALL, {"other": None}]},
        {"messages": [USER, called({"z": 'ü "1"'})], "tools": None},
        {"messages": [USER, ASSISTANT], "tools": []},
    ]
    plain = tmp_path / "text.jsonl"
    plain.write_text("".join(json.dumps(line | {"messages": json.dumps(line["messages"])}) + "\n" for line in lines))
    json_type = datasets.Json()
    call = {"function": {"name": datasets.Value("string"), "arguments": json_type}}
    text = {name: datasets.Value("string") for name in ("role", "content")}
    types = {"messages": json_type, "message": [json_type], "arguments": [{**text, "tool_calls": [call]}]}
    features = datasets.Features({"messages": types[column], "tools": json_type})
    chats = datasets.Dataset.from_list([{"tools": None, **line} for line in lines], features=features)
    assert chats[0]["messages"][1]["tool_calls"][0]["function"]["arguments"]["y"][0] is None
    chats.to_parquet(str(tmp_path / "chats.parquet"))
    chats.save_to_disk(str(tmp_path / "saved.folder"))
    expected = of_lines(tokenizer, lines)
    for name in ("text.jsonl", "chats.parquet", "saved.folder"):
        out = tmp_path / f"{name}.tokens"
        words = ["data", "prepare", tmp_path / name, "--chat", "--tokenizer", tokenizer, "--out", out]
        assert cli.run([*map(str, words)]) == 0
        assert documents(out) == expected, name


@pytest.mark.long
@pytest.mark.parametrize("as_files", [True, False])
def test_a_template_is_taken_by_its_name(tmp_path: Path, capsys: pytest.CaptureFixture[str], *, as_files: bool) -> None:
    tokenizer = write_chat_tokenizer(tmp_path, None)
    file = tokenizer / "tokenizer_config.json"
    without = json.loads(file.read_text())

    def name_templates(*names: str) -> None:
        texts = {name: f"{name}: {CHATML}" for name in names}
        more = tokenizer / "additional_chat_templates"
        if not as_files:
            listed = [{"name": name, "template": text} for name, text in texts.items()]
            file.write_text(json.dumps(without | {"chat_template": listed}))
            return
        file.write_text(json.dumps(without | {"chat_template": "of before"}))
        more.mkdir(exist_ok=True)
        for old in (*more.iterdir(), tokenizer / "chat_template.jinja"):
            old.unlink(missing_ok=True)
        for name, text in texts.items():
            (tokenizer / "chat_template.jinja" if name == "default" else more / f"{name}.jinja").write_text(text)

    lines = [{"messages": CHATS[2], "tools": tools} for tools in (None, [], [TOOL])]
    keys = set()
    for names in (("rag", "tool_use", "default"), ("default", "rag")):
        name_templates(*names)
        out = prepared(write_chats(tmp_path / f"{len(names)}.jsonl", lines), tokenizer)
        keys.add(TokenStore(out).index["key"])
        assert documents(out) == of_lines(tokenizer, lines)
        theirs = AutoTokenizer.from_pretrained(str(tokenizer))
        expected = theirs.apply_chat_template([USER], add_generation_prompt=True)["input_ids"]
        assert Chat(load_tokenizer(str(tokenizer))).encode([USER]) == expected
    assert len(keys) == 2
    name_templates("rag", "tool_use")
    chats = write_chats(tmp_path / "chats.jsonl", lines)
    assert prepare(chats, tokenizer)[0] == 2
    assert mentions(capsys.readouterr().err, f"{chats}:1", "default")
    assert documents(prepared(chats, tokenizer, "--on-error", "skip")) == of_lines(tokenizer, lines[1:])
    name_templates("rag")
    with pytest.raises(UserError, match="default"):
        Chat(load_tokenizer(str(tokenizer)))


def test_chats_need_transformers(tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"^chats need transformers: .*pip install.*$"):
        Chat(load_tokenizer(str(tokenizer)))


@pytest.mark.long
def test_tokenizers_without_special_tokens_write_plain_text(tmp_path: Path) -> None:
    template = Path("train_configs/chat_template.jinja")
    chats = write_chats(tmp_path / "chats.jsonl", [[turn("system", "Be kind."), USER, ASSISTANT, USER]])
    out = prepared(chats, "bytes", "--chat-template", template)
    [(ids, mask)] = documents(out)
    assert bytes(ids[1:-1]) == b"System: Be kind.\nUser: Hello?\nAssistant: Hello.\nUser: Hello?\n"
    assert (ids[0], ids[-1]) == (256, 257)
    assert bytes(i for i, counts in zip(ids, mask, strict=True) if counts) == b"Hello.\n"
    within = [("abcd", True), ("e", True), ("f", False)]
    assert [*_segments("abcdef", [(0, 4), (0, 3), (3, 5)])] == within, "answers that a template writes within others"


BAD: list[tuple[Any, str]] = [
    ({"messages": "text"}, "field 'messages' "),
    ([USER, "text"], "chat message 1 "),
    ([{"content": "x"}], "chat message 0 "),
    ([turn("robot", "x"), ASSISTANT], ".*{template} .*fails: .*no such role"),
    ([turn("system", "Be brief.")], "no token counts in the loss"),
    ([USER], "no token counts in the loss"),
    ({"messages": [{"from": ["gpt"], "value": "x"}]}, "chat message 0 has no role"),
    ([USER, turn("assistant", "half \ud83d")], ".* surrogate"),
    ({"text": "x"}, "no field 'messages': .*text.*data.text_field"),
]


@pytest.mark.long
def test_bad_chats_are_lines_of_their_own(tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chats = write_chats(tmp_path / "chats.jsonl", [[USER, ASSISTANT], *(chat for chat, _ in BAD), []])
    assert prepare(chats, tokenizer)[0] == 2
    expected = [
        rf"{chats}:{number}: {message.format(template=tokenizer)}" for number, (_, message) in enumerate(BAD, start=2)
    ]
    assert re.match(f"error: {expected[0]}", capsys.readouterr().err.splitlines()[-1])
    out = prepared(chats, tokenizer, "--on-error", "skip")
    printed = [line.strip() for line in capsys.readouterr().out.splitlines()]
    for line in expected:
        assert [text for text in printed if re.match(line, text)], line
    assert documents(out) == of_transformers(tokenizer, [[USER, ASSISTANT]])
    index = TokenStore(out).index
    assert (index["empty"], index["errors"]) == (1, len(BAD))


def test_a_file_that_is_no_template(tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = tmp_path / "broken.jinja"
    broken.write_text("{% for %}")
    code, out = prepare(write_chats(tmp_path / "chats.jsonl", CHATS), tokenizer, "--chat-template", broken)
    assert code == 2
    assert not out.exists()
    [line] = capsys.readouterr().err.splitlines()
    assert mentions(line, broken, "template", "TemplateSyntaxError")


LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
DOUBLING = "{% set it = namespace(x='ab') %}{% for i in range(60) %}{% set it.x = it.x ~ it.x %}{% endfor %}"
FAILING = {
    "{{ 1 / 0 }}": "ZeroDivisionError: division by zero",
    "{% for i in range(10**9) %}x{% endfor %}": "OverflowError: Range too big",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "RecursionError: maximum recursion depth exceeded",
    DOUBLING: "512 MiB",
    "{{ bos_token.__class__.__base__ }}": "access to attribute",
    "{{ 1 + 'a' }}": "unsupported operand",
    "{{ raise_exception('two\nlines\x1b[31m') }}": "two lines [31m",
}


@pytest.mark.long
def test_a_chat_whose_template_fails_is_one_line_and_can_be_left_out(
    tmp_path: Path, tokenizer: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    template = tmp_path / "bad.jinja"
    failing = (f"{{% if messages[0].content == '{n}' %}}{body}{{% endif %}}" for n, body in enumerate(FAILING))
    template.write_text("".join(failing) + CHATML)
    bad = [[turn("user", str(number)), ASSISTANT] for number in range(len(FAILING))]
    chats = write_chats(tmp_path / "chats.jsonl", [[USER, ASSISTANT], *bad, CHATS[2]])
    lines = [f"{chats}:{number}: chat template {template} " for number in range(2, 2 + len(FAILING))]
    assert prepare(chats, tokenizer, "--chat-template", template)[0] == 2
    last = capfd.readouterr().err.splitlines()[-1]
    assert last.startswith(f"error: {lines[0]}")
    out = prepared(chats, tokenizer, "--chat-template", template, "--on-error", "skip")
    assert documents(out) == of_transformers(tokenizer, [[USER, ASSISTANT], CHATS[2]])
    for error, line, words in zip(TokenStore(out).index["first_errors"], lines, FAILING.values(), strict=True):
        assert error.startswith(line)
        assert words in error
        assert error.isprintable()


BYTES = load_tokenizer("bytes")


def limited(monkeypatch: pytest.MonkeyPatch, **limits: Any) -> None:
    monkeypatch.setattr(chat_template, "LimitedProcess", partial(chat_template.LimitedProcess, **limits))


@pytest.mark.long
@pytest.mark.parametrize(
    ("body", "limits", "words"),
    [
        (LOOP, {"seconds": 0.1}, "0.1 s"),
        (DOUBLING, {"memory": 40 * 2**20, "seconds": 5.0}, "40 MiB"),
        ("{{ 'x' * 2**25 }}", {}, "33,554,432"),
    ],
)
def test_a_template_without_end_is_ended(
    body: str, limits: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chats before and after the one that ends the process are rendered."""
    text = f"{{{{ messages[0].role }}}}{{% if messages[0].role == 'bad' %}}{body}{{% endif %}}"
    limited(monkeypatch, **limits)
    monkeypatch.setattr(chat_template, "IN_A_ROW", 2)
    template = ChatTemplate({"default": text}, BYTES, where="it")
    for word in ("one", "bad", "two", "bad"):
        if word == "bad":
            with pytest.raises(Refused, match=f" it .*{words}"):
                template.render([{"role": word}])
        else:
            assert template.render([{"role": word}]) == (word, [])
    with pytest.raises(UserError, match="more than") as raised:  # in a row: the rest would be like them
        template.render([{"role": "bad"}])
    assert isinstance(raised.value, Refused) == (words == "33,554,432")


@pytest.mark.long
@pytest.mark.parametrize("text", [LOOP.replace("99999", "2") * 10**5, "{{ " + "(" * 5000])
def test_a_template_that_cannot_be_compiled_is_one_line(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    limited(monkeypatch, seconds=0.2)
    with pytest.raises(UserError, match=r"^[^\n]+ it [^\n]+$"):
        ChatTemplate({"default": text}, BYTES, where="it")


@pytest.mark.long
def test_a_process_is_kept_for_all_chats_and_ends_with_the_template() -> None:
    template = ChatTemplate({"default": "{{ messages[0].role }}"}, BYTES, where="it")
    process = template._process
    assert process is not None
    assert [template.render([{"role": word}]) for word in "abc"] == [(word, []) for word in "abc"]
    nested: Any = []
    for _ in range(2000):
        nested = [nested]
    with pytest.raises(Refused, match=r"^[^\n]+ it [^\n]+$"):
        template.render([{"role": "a", "content": nested}])
    assert template.render([{"role": "a"}]) == ("a", [])
    assert template._process is process
    running = process._process
    del template, process
    assert running.poll() is not None


def test_mistakes_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chats = write_chats(tmp_path / "chats.jsonl", CHATS)
    words = ["data", "prepare", str(chats), "--tokenizer", "bytes", "--out", str(tmp_path / "out")]
    assert cli.run([*words, "--chat-template", "any"]) == 2
    assert {"--chat-template", "--chat"} <= {*capsys.readouterr().err.split()}
    assert cli.run([*words, "--chat"]) == 2
    assert mentions(capsys.readouterr().err, "bytes", "--chat-template", "data.chat_template")


@pytest.mark.long
def test_packed_chats_have_the_loss_that_each_has_alone(tmp_path: Path, tokenizer: Path) -> None:
    chats = [chat for chat in CHATS if len(json.dumps(chat)) < 1000]
    out = prepared(write_chats(tmp_path / "chats.jsonl", chats), tokenizer)
    model = built(replace(SMALL, vocab_size=260, max_seq_len=512))

    def loss(tokens: torch.Tensor, labels: torch.Tensor, **arguments: Any) -> tuple[float, int]:
        total = model(tokens, loss=lambda h, w: token_loss(h, w, labels_BL=labels), **arguments).total
        return float(total.detach()), int((labels >= 0).sum())

    reader = BestFit(TokenStore(out), seq_len=512, plan_folder=tmp_path)
    batch = as_batch([reader.read(index) for index in range(len(reader))], mark_documents=True)
    assert len(reader) < len(chats) / 2, "several chats in a sequence"
    packed = loss(batch["tokens"], batch["labels"], **document_arguments(batch))
    alone = []
    for ids, mask in documents(out):
        labels = np.where(mask[1:], ids[1:], -100)
        alone.append(loss(torch.tensor([ids[:-1]]), torch.from_numpy(labels)[None]))
    assert packed[1] == sum(count for _, count in alone) > 100
    assert packed[0] == pytest.approx(sum(total for total, _ in alone), rel=1e-6)


def of_config(data: Data, folder: Path) -> TokenStore:
    """Return the tokens of raw chats that a config names."""
    return prepare_text(
        [str(data.path)], data=data, tokenizer=load_tokenizer(data.tokenizer), cache_folder=folder / "cache"
    )


@pytest.mark.long
@pytest.mark.parametrize("own_tokens", [True, False])
def test_raw_chats_of_a_config_are_the_tokens_of_the_command(tmp_path: Path, tokenizer: Path, own_tokens: bool) -> None:
    chats = write_chats(tmp_path / "chats.jsonl", CHATS)
    file = tmp_path / "a.jinja"
    file.write_text(CHATML)
    name, template = (tokenizer, "tokenizer") if own_tokens else ("python-2k", str(file))
    out = prepared(chats, name, *([] if own_tokens else ["--chat-template", template]))
    data = Data(path=str(chats), tokenizer=str(name), chat_template=template)
    store = of_config(data, tmp_path)
    assert documents(store.folder) == documents(out)
    assert not all(mask for _, marks in documents(out) for mask in marks)
    assert {key: store.index[key] for key in ("key", "bos", "eos", "shards")} == {
        key: TokenStore(out).index[key] for key in ("key", "bos", "eos", "shards")
    }
    assert store.index["bos"] == (not own_tokens)  # the template of a tokenizer.json writes it
    # The place of a template does not matter, its text does.
    (tmp_path / "b.jinja").write_text(CHATML)
    assert of_config(data.model_copy(update={"chat_template": f"{tmp_path}/b.jinja"}), tmp_path).folder == store.folder
    (tmp_path / "b.jinja").write_text(CHATML.replace("assistant\\n", "assistant "))
    other = of_config(data.model_copy(update={"chat_template": f"{tmp_path}/b.jinja"}), tmp_path)
    assert other.fingerprint != store.fingerprint
    with pytest.raises(UserError, match=rf"data\.chat_template: .*{out}\b"):
        open_tokens(
            str(out), data=data, tokenizer=load_tokenizer(str(name)), cache_folder=tmp_path, prepare_text=prepare_text
        )


def test_chats_and_templates_are_found_beside_the_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configs, here = tmp_path / "configs", tmp_path / "here"
    for folder in (configs, here):
        folder.mkdir()
        (folder / "both.jsonl").touch()
    for name in ("mine.jinja", "mine.jsonl", "run.toml"):
        (configs / name).touch()
    monkeypatch.chdir(here)

    def data_of(**options: object) -> Data:
        lines = "\n".join(f"{key} = {json.dumps(value)}" for key, value in options.items())
        (configs / "run.toml").write_text(f"[data]\n{lines}\n")
        return load(configs / "run.toml").data

    data = data_of(path="mine.jsonl", chat_template="mine.jinja")
    assert (data.path, data.chat_template) == (str(configs / "mine.jsonl"), str(configs / "mine.jinja"))
    data = data_of(path="both.jsonl", chat_template="tokenizer")
    assert (data.path, data.chat_template) == ("both.jsonl", "tokenizer")


@pytest.mark.long
@pytest.mark.usefixtures("own_process_group")
@pytest.mark.parametrize(
    ("template", "key", "words"),
    [
        ("none.jinja", "data.chat_template: ", ["none.jinja"]),
        ("unmarked.jinja", "data.chat_template: ", ["{folder}/unmarked.jinja", "{% generation %}"]),
        ("tokenizer", "data.chat_template: ", ["bytes"]),
        ("refuses.jinja", "", ["{folder}/chats.jsonl:1", "{folder}/refuses.jinja", "no such role"]),
    ],
)
def test_mistakes_in_a_config_are_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], template: str, key: str, words: list[str]
) -> None:
    marked = "{% for message in messages %}{% generation %}{{ message.content }}{% endgeneration %}{% endfor %}"
    for name, text in (("unmarked", "no marks"), ("refuses", marked + "{{ raise_exception('no such role') }}")):
        (tmp_path / f"{name}.jinja").write_text(text)
    write_chats(tmp_path / "chats.jsonl", CHATS[:1])
    toml = tmp_path / "run.toml"
    toml.write_text(
        f'[data]\npath = "chats.jsonl"\nchat_template = "{template}"\n[job]\ndump_folder = "{tmp_path}/outputs"\n'
        "[model.args]\ndim = 16\nn_layers = 1\nn_heads = 1\nn_kv_heads = 1\nhidden_dim = 16\nvocab_size = 259\n"
        "[training]\nsteps = 1\nseq_len = 16\nglobal_batch_size = 1\n"
    )
    # `check` does not read the text
    assert cli.run(["check" if key else "train", str(toml)]) == 2
    [line] = [line for line in capfd.readouterr().err.splitlines() if line.startswith(f"error: {key}")]
    assert mentions(line, *(word.replace("{folder}", str(tmp_path)) for word in words))


@pytest.mark.slow
@pytest.mark.usefixtures("own_process_group")
def test_the_example_learns_to_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """train_configs/sft_example.toml, with a smaller model, from a folder without its files."""
    monkeypatch.chdir(tmp_path)
    sizes = {"dim": 32, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "hidden_dim": 64}
    small = [f"--model.args.{name}={size}" for name, size in sizes.items()]
    assert cli.run(["train", "sft_example", *small, "--optimizer.lr=1e-2"]) == 0
    [cache] = Path("outputs/data_cache").glob("*/index.json")
    store = TokenStore(cache.parent)
    assert store.read_mask(0, len(store)).mean() == pytest.approx(0.4, abs=0.05)
    records = (tmp_path / "outputs" / "sft_example" / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in records]
    assert losses[0] > 4
    assert losses[-1] < 2.5
