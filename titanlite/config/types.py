"""Base class of the sections of a config, and the types of their options."""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Name = Annotated[str, Field(min_length=1)]
AttentionBackend = Literal["auto", "flash", "cudnn", "efficient"]


DURATION = re.compile(r"(?=.)(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)min)?(?:(\d+)s)?")


def seconds_of(duration: str) -> int:
    """Return the seconds of a duration such as 2d, 11h30min or 90s.

    Raises:
        ValueError: the text is no duration.
    """
    if not (match := DURATION.fullmatch(duration)):
        raise ValueError(f"expected a duration such as 2d, 11h30min or 90s, got {duration!r}")
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def _check_duration(duration: str) -> str:
    seconds_of(duration)
    return duration


Duration = Annotated[str, AfterValidator(_check_duration)]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)
