"""Profile of a model on a device: a file of measurements, and the predictors fitted to them.

It holds samples and the name of the regressor that predicted them best, which loading fits again.
"""

from __future__ import annotations

import hashlib
import logging
import re
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from loomserve.platform.base.errors import LoomserveError
from loomserve.platform.base.files import replace_file
from loomserve.platform.base.paths import cache_folder
from loomserve.platform.costs.step_time import Step, StepTimes, TimedStep
from loomserve.platform.costs.transfer_time import TransferTimes

_logger = logging.getLogger(__name__)


class ProfileError(LoomserveError):
    """There is no profile of this model, device and engine; the message says why."""


class _Node(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ProfileKey(_Node):
    """Device and settings of an engine, on which times depend besides the model's weights."""

    device: str = Field(description="The processor's or GPU's model.")
    threads: int = Field(description="Cores that compute; 0 on a GPU.")
    dtype: str
    block_size: int
    enforce_eager: bool
    vllm: str = Field(description="Version.")


class Transfer(_Node):
    """Transfers in one direction between an engine's KV cache and the host's memory."""

    bytes_per_s: float = Field(gt=0)
    latency_s: float = Field(ge=0)
    mape: float = Field(description="Error on transfers that were not fitted, as a share.")
    noise: float | None = Field(description="The machine's own, of equal sizes; None: none were.")


class Profile(_Node):
    """Measurements of a model on a device. Errors are shares of the measured time."""

    model: str
    weights: str = Field(description="Digest of the model's weights, configuration and code.")
    engine: ProfileKey
    measured_at: str = Field(description="UTC, ISO 8601.")
    context: int = Field(gt=0, description="Longest request in tokens.")
    samples: tuple[tuple[int, int, int, float, float], ...] = Field(
        min_length=1,
        description="Steps in the order of time: tokens, requests, context, attention, seconds.",
    )
    regressor: Literal["linear", "ridge"]
    degree: int = Field(ge=1, le=5)
    mape: float = Field(description="Of the winner on steps that neither fit nor choice had seen.")
    noise: float | None = Field(description="The machine's own, of equal steps; None: none were.")
    swap_out: Transfer
    swap_in: Transfer

    def timed_steps(self) -> list[TimedStep]:
        return [
            (Step(tokens, requests, context, attention), seconds)
            for tokens, requests, context, attention, seconds in self.samples
        ]

    def step_times(self) -> StepTimes:
        """Fit the regressor, in less than a second."""
        # It imports scikit-learn, which takes a second.
        from loomserve.platform.costs.regressors import FittedModel

        return StepTimes(FittedModel(self.regressor, self.degree, self.timed_steps(), self.context))

    def transfer_times(self) -> TransferTimes:
        out, into = self.swap_out, self.swap_in
        return TransferTimes(out.bytes_per_s, into.bytes_per_s, out.latency_s, into.latency_s)


def path_of(weights: str, engine: ProfileKey) -> Path:
    """Path of a model's profile on a device, in ``profiles`` in the user's cache folder."""
    device = re.sub(r"[^A-Za-z0-9]+", "-", f"{engine.device}-{engine.threads}").strip("-")
    digest = hashlib.sha256(weights.encode()).hexdigest()[:16]
    return cache_folder() / "profiles" / f"{digest}-{device}.json"


def save(profile: Profile) -> Path:
    """Write the profile over an older one of the same model and device."""
    path = path_of(profile.weights, profile.engine)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, profile.model_dump_json())
    return path


def read(path: Path, weights: str, engine: ProfileKey) -> Profile:
    """Read the profile of this model, machine and engine.

    Raises:
        ProfileError: it does not exist, is damaged, or is of another.
    """
    try:
        profile = Profile.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ProfileError(f"profile {path} cannot be read ({error.strerror})") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ProfileError(f"{path} is not a profile ({where}: {first['msg']})") from None
    if profile.weights != weights:
        raise ProfileError(f"profile {path} is of other weights ({profile.model})")
    for fact, measured in profile.engine:
        here = getattr(engine, fact)
        if measured != here:
            raise ProfileError(
                f"profile {path} was measured with {fact} {measured}, and here it is {here}"
            )
    return profile


def load(weights: str, engine: ProfileKey) -> tuple[StepTimes, TransferTimes]:
    """Predictors of this engine: from its profile if there is one, else predictors that learn."""
    path = path_of(weights, engine)
    try:
        profile = read(path, weights, engine)
    except ProfileError as error:
        # Most engines were never profiled, and learn quickly.
        level = logging.WARNING if path.exists() else logging.INFO
        _logger.log(level, "%s: costs are learnt as the engine runs (loomserve profile)", error)
        return StepTimes.unprofiled(), TransferTimes.unprofiled()
    return profile.step_times(), profile.transfer_times()
