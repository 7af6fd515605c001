"""How long a text may be of which a model's context holds only so much."""

from __future__ import annotations

import re

CHARACTERS_PER_TOKEN = 16
"""No real text has more to a token; one that is longer is refused before it is tokenised."""

# A picture or a sound is no text. In a text quotes are escaped, so none can pass for one.
_MEDIA = re.compile(rb'"(?:url|image_url|data|file_data)"\s*:\s*"[^"\\]{1024,}"')
_ESCAPED = 6


def characters(json_text: bytes) -> int:
    r"""Characters of a field that was left as JSON, nearly: brackets and names count as well.

    ``\uXXXX`` counts as one character, so as not to punish clients that write ASCII only.
    """
    text = _MEDIA.sub(b"", json_text)
    escaped = min(text.count(rb"\u"), len(text) // _ESCAPED)
    length = len(text) if text.isascii() else len(text.decode("utf-8", "replace"))
    return length - (_ESCAPED - 1) * escaped
