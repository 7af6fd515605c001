"""File of a device profile, which ``loomserve profile devices`` writes."""

from __future__ import annotations

from pathlib import Path

import yaml
from pydantic import ValidationError

from loomserve.platform.base.errors import ConfigError
from loomserve.platform.base.files import replace_file
from loomserve.platform.base.paths import cache_folder
from loomserve.platform.placement.policy.device_times import DeviceProfile


def default_path() -> Path:
    return cache_folder() / "devices.yaml"


def save(profile: DeviceProfile, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, yaml.safe_dump(profile.model_dump(mode="json"), sort_keys=False))


def load(path: Path) -> DeviceProfile:
    """Read a device profile. Raises ConfigError if the file does not exist, or is damaged."""
    try:
        return DeviceProfile.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError(
            f"device profile {path} cannot be read ({error.strerror}): "
            "run loomserve profile devices CONFIG"
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError):
        raise ConfigError(
            f"device profile {path} is not YAML: run loomserve profile devices CONFIG"
        ) from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(
            f"device profile {path} is wrong ({where}: {first['msg']}): "
            "run loomserve profile devices CONFIG"
        ) from None
