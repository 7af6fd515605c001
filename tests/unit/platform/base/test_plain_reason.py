"""Reasons for operators, out of what Python programs say."""

import pytest

from loomserve.platform.base.plain_reason import plain_reason, reason_of_traceback

SERVE = """Deployment failed to start 3 times in a row. See controller logs for details. Error:
\x1b[36mray::ServeReplica:model--a@core0:Engine.initialize_and_get_metadata()\x1b[39m (pid=71)
    raise RuntimeError(traceback.format_exc()) from None
RuntimeError: Traceback (most recent call last):
  File "/x/ray/serve/_private/replica.py", line 1, in initialize_and_get_metadata
    await self._user_callable_wrapper.initialize_callable()
loomserve.platform.base.errors.ConfigError: /models/a/config.json: names no architectures
"""


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("loomserve.base.errors.ConfigError: /a/b.json is missing", "/a/b.json is missing"),
        ("RuntimeError: ValueError: no such thing", "no such thing"),
        ("ray.exceptions.RayTaskError(ValueError): no room", "no room"),
        ("1 validation error for ModelConfig\n  Value error, unknown [type=value_error, "
         "input_value=ArgsKwargs((), {'a': 1}), input_type=ArgsKwargs]\n    For further "
         "information visit https://errors.pydantic.dev",
         "1 validation error for ModelConfig Value error, unknown"),
        ("it is vllm.config.model.ModelConfig that says: no", "it is ModelConfig that says: no"),
        ("Value error, the length is 5", "the length is 5"),
        ("generation_config.json: temperature is a text, 'warm'",) * 2,
        ("", ""),
    ],
)  # fmt: skip
def test_no_class_of_an_exception_is_told(words: str, told: str) -> None:
    assert plain_reason(words) == told


def test_the_last_exception_of_a_traceback_is_told_whole() -> None:
    assert reason_of_traceback(SERVE) == "/models/a/config.json: names no architectures"
    more = SERVE + "and a second line\n\nmodel--a is UNHEALTHY\n"
    assert reason_of_traceback(more).endswith("names no architectures and a second line")
    assert reason_of_traceback("it ended\nby itself\n") == "by itself"
    assert reason_of_traceback("") == ""


def test_long_ones_are_cut() -> None:
    assert len(plain_reason("x " * 2000)) == 600
