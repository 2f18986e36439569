# For pyright alone: transformers imports all of its models for a type checker, which took half of the time and memory.
from typing import Any

def __getattr__(name: str) -> Any: ...
