"""Building blocks of the configuration's sections: their base class, names and sizes."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

_SIZE = re.compile(r"^\s*(\d{1,18}(?:\.\d+)?)\s*(B|KiB|MiB|GiB|TiB|KB|MB|GB|TB)?\s*$")
_COUNT = re.compile(r"^\s*(\d{1,15})(\.\d{1,9})?\s*([kKmMgGtT])?\s*$")
_UNITS = {
    None: 1, "B": 1,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
}  # fmt: skip


class FieldError(ValueError):
    """Error of a validator of a whole section, which points at the wrong field in it."""

    def __init__(self, message: str, field: str | tuple[str | int, ...] = ()) -> None:
        """``field``: its name, or names and indices down to it; none: the section itself."""
        super().__init__(message)
        self.field = (field,) if isinstance(field, str) else field


def parse_bytes(value: object) -> int:
    """Parse ``512MiB``, ``1.5 GiB`` or a plain number of bytes.

    pydantic.ByteSize takes ``8bit`` and ``512M`` too, and its errors give no example.

    Raises ValueError if it is no size, negative or zero.
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


def parse_count(value: str) -> int:
    """Parse a number as vLLM's command line does: ``8k`` is 8,000, ``8K`` is 8,192. Raises
    ValueError if it is no such number."""
    match = _COUNT.match(value)
    if match is None or (match[2] and not (match[3] or "").islower()):
        raise ValueError(f"{value!r} is no number; write 8192, 8K (which is 8192) or 8k (8000)")
    letter = match[3] or ""
    power = "kmgt".find(letter.lower()) + 1 if letter else 0
    return int(float(match[1] + (match[2] or "")) * (1000 if letter.islower() else 1024) ** power)


Bytes = Annotated[int, BeforeValidator(parse_bytes)]
AUTO = "auto"
"""What marks a tuple that is empty where the platform chooses, and how a file says that."""
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
Revision = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,199}$")]
_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:-]{0,126}")


def check_model_name(name: str) -> str:
    """Raises ValueError if clients cannot ask for a model, an alias or an adapter by that name."""
    if _MODEL_NAME.fullmatch(name) is None:
        raise ValueError(
            f"{name[:130]!r} is no name: use up to 127 letters, digits and ._-/: with a letter or "
            "digit first"
        )
    return name


ModelName = Annotated[str, AfterValidator(check_model_name)]


def plain_name(model: str) -> str:
    """A model's name for files and Ray Serve's applications: without ``/`` and ``:``."""
    return model.replace("/", "--").replace(":", "--")


class Section(BaseModel):
    """A section of the configuration: strict about unknown fields, and immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
