"""Whether a chat template can be read at all."""

from __future__ import annotations

from jinja2 import Environment, TemplateSyntaxError

# Nothing is rendered with it.
_ENVIRONMENT = Environment(extensions=["jinja2.ext.loopcontrols", "jinja2.ext.do"])


def template_problem(text: str) -> str | None:
    """What is wrong, with its line; None: nothing that its syntax shows."""
    try:
        _ENVIRONMENT.parse(text)
    except TemplateSyntaxError as error:
        message = error.message or "its syntax is wrong"
        # Tags that vLLM's environment has and this one has not.
        if "unknown tag" in message and "innermost block" not in message:
            return None
        return f"line {error.lineno}: {message}"
    return None
