"""What ``loomserve profile`` says before it starts an engine."""

from __future__ import annotations

import sys

import pytest

from loomserve.platform.base.errors import ConfigError
from loomserve.platform.cli import main
from loomserve.platform.cli.profile import parse_device


def test_a_device_is_some_cores_or_a_gpu() -> None:
    assert parse_device("cpu:0,3").cores == (0, 3)
    assert parse_device("cuda:1").gpu == 1


@pytest.mark.parametrize("text", ["", "cpu", "cpu:", "cpu:a", "cuda:", "tpu:0", "0"])
def test_another_device_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"cpu:CORE"):
        parse_device(text)


@pytest.mark.parametrize("model", ["nothing-like-it", "./no/such/folder", "demo:other"])
def test_an_unknown_model_is_named(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["loomserve", "profile", model])
    with pytest.raises(SystemExit) as exit_:
        main.main()
    assert exit_.value.code == 2
    assert repr(model.removeprefix("demo:")) in capsys.readouterr().err
