"""Secrets in URLs, which no file of a run may keep. Imports no torch."""

import re

SECRET = re.compile(
    r"(?<=://)[^/\s@'\"]+(?=@)"  # user:password@host
    r"|(?<=[?&])([\w-]*(?:key|token|secret|password|signature|credential)[\w-]*=)[^&\s'\"]+",
    re.IGNORECASE,
)


def hide_secrets(text: str) -> str:
    """Return a text with *** in place of user names, passwords and keys in its URLs."""
    return SECRET.sub(lambda match: f"{match[1] or ''}***", text)
