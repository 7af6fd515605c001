"""Key of an engine's profile: its weights, machine and settings."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.version import __version__ as vllm_version

from loomserve.kvstore.engine.fingerprint import folder_digest
from loomserve.platform.base.paths import cache_folder
from loomserve.platform.costs.profile import ProfileKey


def profile_key(config: VllmConfig) -> ProfileKey:
    """Key of the engine; called in a process with the environment of the engine's device."""
    on_cpu = current_platform.is_cpu()
    return ProfileKey(
        device=_processor() if on_cpu else current_platform.get_device_name(),
        threads=int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1) if on_cpu else 0,
        dtype=str(config.model_config.dtype).removeprefix("torch."),
        block_size=config.cache_config.block_size,
        enforce_eager=config.model_config.enforce_eager,
        vllm=vllm_version,
    )


def weights_digest(config: VllmConfig) -> str:
    """Digest of the model's folder, or of the hub's snapshot that the engine has loaded."""
    model = config.model_config
    folder = Path(model.model)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        folder = Path(
            snapshot_download(model.model, revision=model.revision, local_files_only=True)
        )
    return folder_digest(folder, cache_folder() / "digests")


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
