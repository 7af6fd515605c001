"""The ``x-slo-ms`` header: a client's own service-level objective for one request."""

from __future__ import annotations

import re

from loomserve.platform.base.errors import BadRequest

_NUMBER = re.compile(rb"[0-9]{1,12}(\.[0-9]{1,12})?")
_MAX_MS = 86_400_000.0


def parse_slo_ms(header: bytes | None) -> float | None:
    """Milliseconds, more than zero and at most a day; None without the header.

    Raises:
        BadRequest: the header is anything else; ``param`` is ``x-slo-ms``.
    """
    if header is None:
        return None
    if _NUMBER.fullmatch(header) and 0 < (slo_ms := float(header)) <= _MAX_MS:
        return slo_ms
    raise BadRequest(
        f"The x-slo-ms header must be a number of milliseconds, more than 0 and at most "
        f"{_MAX_MS:.0f}.",
        param="x-slo-ms",
    )
