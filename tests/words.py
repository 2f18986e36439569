"""Checker of the house's words: docstring openings, and the table of words that the project does not use.

    python -m tests.words [PATH ...]      list the hits in files or folders; default: everything

`tests/unit/test_words.py` keeps the counts.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
FOLDERS = ("titanlite", "docs", "tests", "benchmarks", "examples", "train_configs", "scripts", ".github")
TOP = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "run_train.sh", "run_tests.sh", "pyproject.toml")
SKIPPED = ("tests/words.py", "tests/unit/test_words.py", "tests/data/*", "benchmarks/*.jsonl", "*/schema.json")


class Word(NamedTuple):
    """A row of the table. A space in a pattern stands for any white space, so that a phrase may cross a line.

    Attributes:
        instead: what to write.
        text: pattern in prose, docstrings, comments and strings.
        name: pattern in one word of an identifier (snake_case and CamelCase are split, lower case).
        code: pattern in a line of Python, for names that are wrong in one use only.
        allowed: pattern of text around a hit of `text` that makes it right.
        allowed_names: whole identifiers that `name` does not concern.
        within: glob of the files that `name` and `code` concern.
        text_within: glob of the files that `text` concerns.
    """

    instead: str
    text: str = ""
    name: str = ""
    code: str = ""
    allowed: str = ""
    allowed_names: str = ""
    within: str = "*"
    text_within: str = "*"


ADJECTIVES = r"(error|log|warning|commit|chat|exception|help|user|system|assistant|tool|abort)"
WORDS = {
    "go on": Word("resume, continue", r"\b(go|goes|going|went|gone) on\b", r"(go|goes|going) on"),
    "message": Word(
        "collective, all-reduce, all-gather; an error's message stays",
        r"\bmessages?\b",
        r"(hidden|exposed|send|collect) messages?|messages? (time|of|size|bytes)",
        r"\bMessage[\[(|:)]",
        r"%\(message\)s|"
        rf"{ADJECTIVES}('s)? messages?|messages? (\w+ ){{0,2}}(of|in|from) (a|an|the|its) (\w+ )?{ADJECTIVES}|"
        rf"{ADJECTIVES}s?\b[^.]{{0,60}}\bmessages?\b|\bmessages?\b[^.]{{0,60}}\b(names?|lacks?|mistake|{ADJECTIVES})|"
        r"(?<=[`'\"])messages?|messages?(?=[`'\"\[]|\.(role|content|tool))|in messages",
        within="*plan*",
    ),
    "product": Word(
        "matmul",
        r"\bproducts?\b",
        r"products?",
        "",
        r"(dot|inner|outer|Kronecker|elementwise|Cartesian|Hadamard)[- ]products?|"
        r"products? (is|of) (the |its |all |both |two |these |mesh )*"
        r"(degrees|sizes|axes|axis|means|lengths|factors|dims|dimensions|shape|world|numbers|\w*world_size)|"
        r"degrees[^.]{0,40}product",
        r"product|.*(?i:dot_product).*",
    ),
    "moment": Word(
        "step, time, peak; Adam's first and second moments stay",
        r"\b(at|for|until) (a|the|any|this|that|every|each|which|random|some|no|what|one) (\w+ )?moments?\b|"
        r"\bthe moment (it|when|that|in|of|a|the|they|its|all)\b|\bfrom (the|that|this) moment\b|"
        r"\b(highest|peak|random|wrong|right|same|any|worst|busiest) moments?\b|"
        r"\bmoments? (in time|of (forward|backward|time|each|a step|the step|a phase|their))\b",
        r"moment",
        "",
        r"",
        r"(first|second|adam)_moment\w*",
        "*plan*",
    ),
    "units for bfloat16": Word(
        "hardware bfloat16", r"\bunits? for\b|\b(float8|bfloat16|such|has|have|these) units\b", r"units for"
    ),
    "copies": Word(
        "replicas",
        r"\bcopies of (a |the |each |every |its |all |one )*(parameter|weight|model|gradient|state)s?\b|"
        r"\bsharded copies\b|\b(number of|how many|\d+|two|many) copies\b",
        r"copies",
        within="titanlite/[!c]*",
    ),
    "rehearse": Word("trace a step; step trace", r"\brehears\w*", r"rehears\w*"),
    "sketch": Word("trace", r"\bsketch\w*", r"sketch\w*"),
    "appraise": Word("estimate", r"\bapprais\w*", r"apprais\w*"),
    "level": Word(
        "recompute policy",
        r"\blevels?\b",
        r"levels|(choose|block|recompute) level",
        "",
        r"(log|logging|compression|zstd|priority|byte|top|module|high|low|file|process|heading)('s)?[- ]levels?|"
        r"levels? of (the )?(log|nesting|a heading)|(two|one|three) levels? (of|deep|below)|logger|level \d",
        r"",
        "titanlite/*",
    ),
    "cause": Word(
        "category",
        r"\bby cause\b|\bcauses? of memory\b|\b(each|every) cause\b|\bper cause\b|\bwith a cause\b",
        r"causes?",
        "",
        r"",
        r"__cause__|\w*because\w*",
        "titanlite/plan/*",
    ),
    "ways out": Word("suggestions", r"\bways? out\b", r"ways? out"),
    "nodes-of": Word("gpus_per_node, --gpus-per-node", r"\bnodes[-_]of\b", r"nodes of"),
    "verdict": Word("skip_reason, decide, result", r"\bverdicts?\b|\bjudg(e|es|ed|ing|ement)\b", r"verdicts?|judges?"),
    "forbids": Word("should_skip", "", "forbids"),
    "tally": Word("counters", r"\btall(y|ies)\b", r"tall(y|ies)"),
    "of_model": Word("model_metrics", "", "", r"\bof_model\b"),
    "Ingredients": Word("resolved config, model spec", r"\bIngredients\b", "ingredients?"),
    "Blocking": Word("save overhead", "", "", r"\bclass Blocking\b|\bBlocking\("),
    "Files, Local, Remote": Word("storage", "", "", r"\bclass (Files|Local|Remote)\b"),
    "tell, say": Word(
        "report, print, log, is",
        r"\b(tells?|told|telling|says?|said|saying)\b",
        r"tells?|told|says?|said",
        "",
        r"\b(tells?|telling|told) (\S+ ){0,6}apart\b|\.tell\b",
        r"tell|\w*_tells?_\w+_apart\w*",
    ),
    "settle": Word("flush; resolve; raise_if_invalid", r"\bsettl(e|es|ed|ing)\b", r"settle[sd]?"),
    "meaning": Word(
        "fingerprint; settings that must match on resume",
        r"\bgives? [^.]{0,50}meaning\b|\bsettings? of meaning\b|\bits meaning\b|\btheir meaning\b",
        r"meanings?",
    ),
    "leave aside": Word(
        "quarantine",
        r"\b(leave|leaves|leaving|left|lay|lays|laid) (\w+ ){0,3}aside\b|\bwithdr[ae]w\w*",
        r"withdr[ae]w\w*|(leaves?|left|lay|laid) aside",
    ),
    "figure": Word(
        "metrics, values, numbers, measurements",
        r"\bfigures?\b",
        r"figures?",
        "",
        r"[Ff]igures? \d|go\.Figure|figures-\d",
        r"",
    ),
    "kind": Word(
        "model_cls, optimizer_cls",
        "",
        "",
        r"\bkinds?: (dict\[str, |list\[|Sequence\[)?type\b(?!\[BaseException)|issubclass\(kind\b|signature\(kind\b",
    ),
    "row": Word(
        "sequence",
        r"\brows?\b",
        "",
        r"\bclass Rows?\b",
        r"in a row|[Pp]arquet|matri|table|line or row|row group",
        "",
        "titanlite/data/*",
        "titanlite/data/*",
    ),
    "compute again": Word("recompute", r"\bcomput(e|es|ed|ing) (\w+ ){0,3}again\b", r"compute[sd]? again"),
    "dear": Word("expensive", r"\bdear(er|est)?\b", r"dear"),
}
"""The glossary of the project, as patterns."""

ON_DISK = {
    "meaning": "key of a checkpoint's manifest (data/samples.py): checkpoints that exist must still load",
}
"""Exceptions with their reasons: string literals that are no word of ours to change. As identifiers they are hits."""

OPENINGS = re.compile(
    "of|what|where|as|in|which|whose|that|how|when|whether|to|by|with|from|for|at|on|after|before|without|within|"
    "between|beside|besides|below|above|among|against|if|unless|because|since|while|until|once|then|than|though|"
    "who|whom|why|it|its|they|them|their|those|these|such|also|so|but|and|or|nor|not|only|never|always|there|here|"
    "equal|else|both|either|neither|alone|is|are|was|were|has|have|may|must|can|could|would|should",
    re.IGNORECASE,
)
"""First words of a docstring that are neither a verb nor a noun."""


class Hit(NamedTuple):
    path: str
    line: int
    rule: str
    """A key of WORDS, or `docstring`."""
    text: str
    """The hit itself, with what to do."""


class Text(NamedTuple):
    line: int
    """The first line of the text, from 1."""
    text: str


def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(text.replace(" ", r"\s+"), re.IGNORECASE if text.islower() else 0)


TEXTS = {key: _pattern(word.text) for key, word in WORDS.items() if word.text}
ALLOWED = {key: _pattern(word.allowed) for key, word in WORDS.items() if word.allowed}
NAMES = {key: re.compile(rf"\b({word.name})\b") for key, word in WORDS.items() if word.name}
ANY_NAME = re.compile("|".join(pattern.pattern for pattern in NAMES.values()))
CODE = {key: re.compile(word.code) for key, word in WORDS.items() if word.code}


def _docstrings(nodes: list[ast.AST]) -> Iterator[Text]:
    """Docstrings of the module, its classes and functions, and of attributes."""
    for node in nodes:
        body = getattr(node, "body", None)
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or not body:
            continue
        pairs = zip([None, *body], body, strict=False)
        for before, statement in pairs:
            is_documented = before is None or isinstance(before, ast.Assign | ast.AnnAssign)
            value = statement.value if isinstance(statement, ast.Expr) else None
            if is_documented and isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield Text(statement.lineno, value.value)


def docstring_problems(text: str) -> list[str]:
    """Problems of a docstring: its first word, and how its first paragraph and its last one end."""
    paragraphs = [part for part in re.split(r"\n\s*\n", text.strip()) if part.strip()]
    if not paragraphs:
        return ["empty"]
    problems = []
    first = re.match(r"[A-Za-z]+", paragraphs[0])
    if first and OPENINGS.fullmatch(first[0]) and not paragraphs[0][first.end() :].startswith(("_", "(", "`")):
        problems.append(f"begins with {first[0]!r}: begin with a verb or a noun")
    for paragraph in {paragraphs[0], paragraphs[-1]}:
        is_code = paragraph.startswith("    ") or paragraph.lstrip().startswith(("```", "|"))
        if not is_code and not re.search(r"[.:!?][\"'`)\]]*$|https?://\S+$", paragraph.rstrip()):
            problems.append(f"ends with {paragraph.rstrip()[-12:]!r}: end the sentence")
    return problems


def _comments(source: str) -> Iterator[Text]:
    """Comments; neighbouring lines are one text."""
    lines: list[str] = []
    first = last = -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        if token.start[0] != last + 1 and lines:
            yield Text(first, "\n".join(lines))
            lines = []
        first = first if lines else token.start[0]
        last = token.start[0]
        lines.append(token.string.lstrip("#: "))
    if lines:
        yield Text(first, "\n".join(lines))


def _strings(nodes: list[ast.AST]) -> Iterator[Text]:
    """String literals, docstrings among them; what an f-string fills in is left out."""
    parts = {id(value) for node in nodes if isinstance(node, ast.JoinedStr) for value in node.values}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            values = [value.value if isinstance(value, ast.Constant) else "{}" for value in node.values]
            yield Text(node.lineno, "".join(str(value) for value in values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            yield Text(node.lineno, node.value)


@cache
def _name_fields(node_cls: type[ast.AST]) -> list[str]:
    return [field for field in ("id", "attr", "arg", "name", "asname", "module") if field in node_cls._fields]


def _identifiers(nodes: list[ast.AST]) -> Iterator[Text]:
    """Names, attributes, arguments, keywords, and the parts of what is imported."""
    for node in nodes:
        for field in _name_fields(type(node)):
            for name in str(getattr(node, field) or "").split("."):
                yield Text(getattr(node, "lineno", 1), name)


@cache
def _keys_in_name(name: str) -> list[str]:
    """Keys of WORDS whose pattern is in an identifier."""
    words = _words_of(name)
    return [key for key, pattern in NAMES.items() if pattern.search(words)] if ANY_NAME.search(words) else []


def _words_of(name: str) -> str:
    """The words of an identifier in lower case, with spaces: `_someName_of` -> "some name of"."""
    return " ".join(re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)).lower()


def _text_hits(path: str, part: Text) -> Iterator[Hit]:
    for key, pattern in TEXTS.items():
        if not fnmatch(path, WORDS[key].text_within):
            continue
        allowed = [match.span() for match in ALLOWED[key].finditer(part.text)] if key in ALLOWED else []
        for match in pattern.finditer(part.text):
            if not any(start <= match.start() and match.end() <= end for start, end in allowed):
                line = part.line + part.text.count("\n", 0, match.start())
                yield Hit(path, line, key, f"{' '.join(match[0].split())!r}: {WORDS[key].instead}")


def _name_hits(path: str, part: Text) -> Iterator[Hit]:
    for key in _keys_in_name(part.text):
        word = WORDS[key]
        if not fnmatch(path, word.within) or (word.allowed_names and re.fullmatch(word.allowed_names, part.text)):
            continue
        yield Hit(path, part.line, key, f"{part.text}: {word.instead}")


def _python_hits(path: str, source: str) -> Iterator[Hit]:
    nodes = [*ast.walk(ast.parse(source))]
    if path.startswith(("titanlite/", "tests/")):
        for part in _docstrings(nodes):
            yield from (Hit(path, part.line, "docstring", problem) for problem in docstring_problems(part.text))
    for part in (*_comments(source), *_strings(nodes)):
        # One word is a key or a name, and no prose.
        text = part.text.strip()
        if text in ON_DISK:
            continue
        yield from _text_hits(path, part) if re.search(r"\s", text) else _name_hits(path, part._replace(text=text))
    for part in _identifiers(nodes):
        yield from _name_hits(path, part)
    patterns = {key: pattern for key, pattern in CODE.items() if fnmatch(path, WORDS[key].within)}
    for number, line in enumerate(source.splitlines(), 1):
        for key, pattern in patterns.items():
            if pattern.search(line):
                yield Hit(path, number, key, f"{line.strip()[:60]}: {WORDS[key].instead}")


def _prose_hits(path: str, text: str) -> Iterator[Hit]:
    """Hits in Markdown and other text. Code spans count as names; in the changelog they name what was."""

    def blank(match: re.Match[str]) -> str:
        return re.sub(r"[^\n]", ".", match[0])

    prose = re.sub(r"`[^`\n]+`", blank, text) if path.endswith(".md") else text
    yield from _text_hits(path, Text(1, prose))
    if path.endswith(".md") and path != "CHANGELOG.md":
        for match in re.finditer(r"`([^`\n]+)`", text):
            line = 1 + text.count("\n", 0, match.start())
            for name in re.findall(r"[\w-]+", match[1]):
                yield from _name_hits(path, Text(line, name))


def hits_in(file: Path) -> list[Hit]:
    """Hits in one file, in the order of its lines."""
    path = str(file.resolve().relative_to(ROOT))
    if any(fnmatch(path, skipped) for skipped in SKIPPED):
        return []
    found = list(_name_hits(path, Text(1, file.stem)))
    text = file.read_text()
    found += _python_hits(path, text) if file.suffix == ".py" else _prose_hits(path, text)
    return sorted(set(found), key=lambda hit: (hit.line, hit.rule))


def files_below(paths: Iterable[Path]) -> list[Path]:
    """Files with words in them, in folders and among the paths themselves."""
    suffixes = (".py", ".md", ".toml", ".sh", ".yml")
    files = [file for path in paths for file in (sorted(path.rglob("*")) if path.is_dir() else [path])]
    return [file for file in files if file.is_file() and file.suffix in suffixes]


def everything() -> list[Path]:
    return files_below(ROOT / name for name in (*FOLDERS, *TOP))


def main(arguments: list[str]) -> int:
    paths = [Path(argument) for argument in arguments]
    hits = [hit for file in (files_below(paths) if paths else everything()) for hit in hits_in(file)]
    for hit in hits:
        print(f"{hit.path}:{hit.line}: [{hit.rule}] {hit.text}")
    print(f"{len(hits)} hits")
    return 1 if hits else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
