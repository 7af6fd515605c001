"""Profiles as files."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from loomserve.platform.costs.profile import (
    Profile,
    ProfileError,
    ProfileKey,
    Transfer,
    held_out,
    load,
    noise,
    path_of,
    read,
    save,
)
from loomserve.platform.costs.step_time import Step

ENGINE = ProfileKey(
    device="A CPU @ 2 GHz",
    threads=2,
    dtype="float32",
    block_size=32,
    enforce_eager=True,
    vllm="0.29.0",
)
SAMPLES = tuple(
    (tokens, 1, context, tokens * (context + tokens / 2), 0.01 + 1e-3 * tokens)
    for tokens in (1, 16, 64, 256)
    for context in (0, 128)
)
PROFILE = Profile(
    model="demo",
    weights="w",
    engine=ENGINE,
    measured_at="2026-11-21T00:00:00+00:00",
    samples=SAMPLES,
    mape=0.01,
    noise=0.01,
    swap_out=Transfer(bytes_per_s=2e9, latency_s=1e-3, mape=0.02, noise=None),
    swap_in=Transfer(bytes_per_s=4e9, latency_s=0.0, mape=0.02, noise=None),
)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOOMSERVE_HOME", str(tmp_path))


def test_a_saved_profile_predicts_from_the_first_step(tmp_path: Path) -> None:
    path = save(PROFILE)
    assert path == path_of("w", ENGINE)
    assert path.parent == tmp_path / "profiles"
    assert read(path, "w", ENGINE) == PROFILE
    steps, transfers = load("w", ENGINE)
    assert steps.seconds(Step.of([(0, 100)])) == pytest.approx(0.11, rel=0.01)
    assert steps.prefill_s(512, 256) == pytest.approx(0.532, rel=0.01)
    assert transfers.out.seconds(2_000_000) == pytest.approx(2e-3)


@pytest.mark.parametrize(
    ("fact", "value"),
    [
        ("device", "Another CPU"),
        ("threads", 1),
        ("dtype", "bfloat16"),
        ("block_size", 128),
        ("enforce_eager", False),
        ("vllm", "0.30.0"),
    ],
)
def test_another_engines_profile_is_refused_and_says_why(fact: str, value: object) -> None:
    other = ENGINE.model_copy(update={fact: value})
    with pytest.raises(ProfileError, match=f"{fact}.*{value}"):
        read(save(PROFILE), "w", other)


def test_other_weights_profile_is_refused() -> None:
    with pytest.raises(ProfileError, match="other weights"):
        read(save(PROFILE), "v", ENGINE)


@pytest.mark.parametrize(
    ("field", "whole", "damaged"),
    [("mape", '"mape":0.01', '"mape":"x"'), ("samples", '"samples":[[', '"samples":[[7,')],
)
def test_a_damaged_profile_is_refused(field: str, whole: str, damaged: str) -> None:
    path = save(PROFILE)
    path.write_text(path.read_text().replace(whole, damaged))
    with pytest.raises(ProfileError, match=field):
        read(path, "w", ENGINE)


def test_a_profile_with_more_fields_is_read() -> None:
    path = save(PROFILE)
    path.write_text(path.read_text().replace('"mape"', '"degree":1,"mape"', 1))
    assert read(path, "w", ENGINE) == PROFILE


def test_a_step_is_held_out_with_all_its_samples() -> None:
    many = [(Step.of([(number, 1)]), 1.0 + number) for number in range(50)] * 3
    known, unknown = held_out(many)
    assert len(unknown) == 30
    assert not {step for step, _ in known} & {step for step, _ in unknown}
    assert sorted(map(repr, known + unknown)) == sorted(map(repr, many))


def test_noise_is_that_of_steps_that_repeat() -> None:
    step, other = Step.of([(0, 1)]), Step.of([(0, 2)])
    assert noise([(step, 1.0), (step, 2.0), (step, 4.0), (other, 9.0)]) == pytest.approx(0.5)
    assert noise([(step, 1.0), (other, 9.0)]) is None


def test_without_its_profile_an_engine_learns(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    steps, transfers = load("w", ENGINE)
    assert "cannot be read" in caplog.text
    step = Step.of([(0, 64)])
    for _ in range(20):
        steps.observe(step, 7.0)
        transfers.out.observe(10**6, 3.0)
    assert steps.seconds(step) == pytest.approx(7, rel=0.1)
    assert transfers.out.seconds(10**6) == pytest.approx(3, rel=0.1)
