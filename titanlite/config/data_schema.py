"""Options of the data: [data] and [validation]."""

import re
from typing import Literal

from pydantic import Field

from titanlite.config.types import Count, Name, Positive, PositiveInt, Section


class ValidationSource(Section):
    """One of several validation sources."""

    path: Name | list[Name]
    """Text or tokens, as in data.path."""
    name: Name | None = None
    """Name of the source in metrics. Default: the last part of its path."""

    @property
    def title(self) -> str:
        """Name of the source in metrics."""
        path = self.path if isinstance(self.path, str) else "".join(self.path[:1])
        parts = [part for part in re.split(r"[:/]+", path) if part.strip(".~") and not re.search(r"[*?[]", part)]
        return self.name or (parts[-1] if parts else "data")


class DataSource(ValidationSource):
    """One of several data sources, mixed by weight."""

    weight: Positive = 1.0
    """Share of the tokens, relative to the sum of all weights."""
    epochs: PositiveInt | None = None
    """Largest number of passes over this source in the whole run. A run that needs more is refused. Default: no
    limit."""


class Data(Section):
    path: Name | list[Name] | None = None
    """Training data: files, folders or globs of text (.txt, .jsonl, .parquet, source code, ...), one or a list. It can
    also be a folder or URL of prepared tokens, or python://file.py:Class for sequences from your own code. Without
    it, stdlib:// is read, the source of Python's standard library. A file that is not there from the current folder is
    looked for beside the config file."""
    sources: list[DataSource] = Field(default_factory=list)
    """Several sources, mixed in exact shares, instead of data.path."""
    tokenizer: Name = "bytes"
    """Tokenizer: bytes (one token per byte), the name of a shipped tokenizer, or a path. The path is that of a tiktoken
    rank file (Llama 3's tokenizer.model), of Hugging Face's tokenizer.json, or of its folder."""
    add_bos: bool = True
    """Begin each document with the tokenizer's beginning-of-document token."""
    add_eos: bool = True
    """End each document with the tokenizer's end-of-document token."""
    text_field: Name | None = None
    """Field of JSON lines and table columns that holds the text of a document. Default: text, of chats messages."""
    chat_template: Name | None = None
    """Template that renders documents which are chats, JSON lines of messages. It is a Jinja file, also beside the
    config file, or "tokenizer" for that of the tokenizer's folder. The answers that it marks count in the loss.
    Default: documents are text."""
    shuffle: bool = True
    """Shuffle sequences, in another order in each epoch. false reads in the order of the files."""
    packing: Literal["stream", "best_fit"] = "stream"
    """Packing of documents into sequences. stream cuts one long stream of documents wherever a sequence is full.
    best_fit puts whole documents together, cuts only those longer than a sequence, and pads the rest."""
    document_mask: bool = False
    """Restrict attention to the own document, and count positions from the start of each document."""
    on_change: Literal["error", "continue", "restart"] = "error"
    """Action on resume with other data. error refuses. continue resumes the unchanged sources and starts the others
    from their beginning. restart starts all data from its beginning."""
    cache_folder: Name | None = None
    """Folder for the tokens made from text, and for copies of remote tokens. Default: <dump_folder>/data_cache."""
    num_workers: Count = 0
    """Processes per rank that read ahead; 0 reads in the training process. The number never changes the batches."""

    def all_sources(self) -> list[DataSource]:
        """Return the sources of the section, whether it gives a path or a list."""
        return self.sources or [DataSource(path=self.path or "stdlib://")]


class Validation(Section):
    enable: bool = False
    """Measure the loss on other data, and its bits per byte of text."""
    freq: PositiveInt = 100
    """Steps between validations. The last step is always followed by one."""
    path: Name | list[Name] | None = None
    """Validation data, as in data.path. stdlib:// without training data from stdlib:// gives a warning."""
    sources: list[ValidationSource] = Field(default_factory=list)
    """Several validation sources, instead of validation.path. Each has a loss of its own."""
    sequences: Count = 256
    """Sequences of each source, the same at each validation; 0 takes all."""

    def all_sources(self) -> list[ValidationSource]:
        """Return the sources of the section, whether it gives a path or a list; none if validation is off."""
        if not self.enable:
            return []
        return self.sources or ([ValidationSource(path=self.path)] if self.path else [])
