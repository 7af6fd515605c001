"""Building blocks of the configuration's sections: their base class, names and sizes."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

_SIZE = re.compile(r"^\s*(\d{1,18}(?:\.\d+)?)\s*(B|KiB|MiB|GiB|TiB|KB|MB|GB|TB)?\s*$")
_UNITS = {
    None: 1, "B": 1,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
}  # fmt: skip


class FieldError(ValueError):
    """Error of a validator of a whole section, which points at the wrong field in it."""

    def __init__(self, message: str, *field: str | int) -> None:
        super().__init__(message)
        self.field = field


def parse_bytes(value: object) -> int:
    """Parse ``512MiB``, ``1.5 GiB`` or a plain number of bytes.

    pydantic.ByteSize takes ``8bit`` and ``512M`` too, and its errors give no example.

    Raises:
        ValueError: not a size, negative or zero.
    """
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError("write a size such as 512MiB or 2GiB")
    match = _SIZE.match(str(value))
    if match is None:
        raise ValueError(f"{value!r} is not a size; write a positive one such as 512MiB or 2GiB")
    size = int(float(match[1]) * _UNITS[match[2]])
    if size <= 0:
        raise ValueError(f"{value!r} must be more than zero")
    return size


Bytes = Annotated[int, BeforeValidator(parse_bytes)]
AUTO = "auto"
"""What marks a tuple that is empty where the platform chooses, and how a file says that."""
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
Revision = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,199}$")]
MODEL_NAME = r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,126}$"
ModelName = Annotated[str, Field(pattern=MODEL_NAME)]


class Section(BaseModel):
    """A section of the configuration: strict about unknown fields, and immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
