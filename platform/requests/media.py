"""The media that a request links to: images, audio and video of its messages.

Engines fetch them and could reach loopback, their network or a cloud's metadata, so only hosts that
the operator names are allowed. Engines would refuse others as well, less clearly.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any
from urllib.parse import urlsplit

from loomserve.platform.base.errors import BadRequest

# Where the endpoints have messages, or parts of one.
_FIELDS = (
    *("messages", "input", "inputs", "query", "queries", "documents", "items"),
    *("data_1", "data_2", "text_1", "text_2"),
)
# Links alone.
_IMAGES = "images"
# Each is a URL, or has one under "url".
_LINKS = ("image_url", "audio_url", "video_url", "file_url", "source")
_PARTS = ("content", "output")
_DATA = "data:"


def check_media(fields: Mapping[str, Any], hosts: Collection[str]) -> None:
    """Raises BadRequest if a request links to media outside itself and ``hosts``."""
    for field in _FIELDS:
        given = fields.get(field)
        if isinstance(given, list | dict):
            _check_parts(given if isinstance(given, list) else [given], field, hosts)
    images = fields.get(_IMAGES)
    for link in images if isinstance(images, list) else ():
        _check_link(link, _IMAGES, hosts)


def _check_parts(parts: list[Any], field: str, hosts: Collection[str]) -> None:
    # No recursion: a client decides how deep it is.
    waiting = [parts]
    while waiting:
        for part in waiting.pop():
            if not isinstance(part, dict):
                continue
            waiting += [part[each] for each in _PARTS if isinstance(part.get(each), list)]
            for link in _LINKS:
                if link in part:
                    _check_link(part[link], field, hosts)


def _check_link(link: Any, field: str, hosts: Collection[str]) -> None:
    url = link.get("url") if isinstance(link, dict) else link
    if not isinstance(url, str) or not url or url[: len(_DATA)].lower() == _DATA:
        return
    if _host(url) not in hosts:
        allowed = f"from {', '.join(sorted(hosts))}, or sent" if hosts else "sent"
        raise BadRequest(
            f"Media must be {allowed} within the request, as data:image/png;base64,… The operator "
            "names hosts that may be fetched from in server.media_hosts.",
            param=field,
        )


def _host(url: str) -> str | None:
    try:
        parsed = urlsplit(url)
    except ValueError:
        return None
    return parsed.hostname if parsed.scheme in ("http", "https") else None
