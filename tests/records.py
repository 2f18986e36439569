"""What in a record of a run is not of the form."""

from typing import Any

from titanlite.metrics.records import Field


def find_faults(record: dict[str, Any], fields: dict[str, Field]) -> list[str]:
    """Return what in a record is not of the form. Further numbers are no fault."""
    faults = [f"{name} is missing" for name, field in fields.items() if name not in record and not field.optional]
    for name, value in record.items():
        field = fields.get(name, Field(float, ""))
        types = (int, float) if field.type is float else (field.type,)
        if value is None and not field.optional and name in fields:
            faults.append(f"{name} is null")
        elif value is not None and (type(value) not in types):
            faults.append(f"{name} is {type(value).__name__}, not {field.type.__name__}")
    return faults
