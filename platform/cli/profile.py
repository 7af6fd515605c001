"""``loomserve profile``: measures the steps and transfers of a model on a device.

``loomserve profile devices`` measures devices, for placement.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import ValidationError
from typer.core import TyperGroup

from loomserve.platform import config as configuration
from loomserve.platform.base.errors import ConfigError, StartError
from loomserve.platform.cli.tables import Row, display, say, table
from loomserve.platform.config import LOCAL_NODE, Device, parse_bytes
from loomserve.platform.costs.profile import Transfer, save
from loomserve.platform.devices.gpus import check_devices, gpus_here, lack_of
from loomserve.platform.models import catalog
from loomserve.platform.placement import device_profile
from loomserve.platform.placement.own_placement import placed_here
from loomserve.platform.placement.policy.device_times import DeviceProfile

if TYPE_CHECKING:
    from loomserve.platform.engine.profiling.profiler import Findings


class _ModelUnlessNamed(TyperGroup):
    """Command group in which ``profile MODEL`` means ``profile model MODEL``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in {*self.commands, *self.get_help_option_names(ctx)}:
            args = ["model", *args]
        return super().parse_args(ctx, args)


profile = typer.Typer(
    cls=_ModelUnlessNamed,
    no_args_is_help=True,
    help="Measure a model (profile MODEL), or the devices of a configuration.",
)


@profile.command("model")
def profile_model(
    model: Annotated[str, typer.Argument(help="demo, demo:NAME, a folder, or ORG/NAME.")],
    minutes: Annotated[float, typer.Option(min=0, help="How long steps are timed.")] = 3.0,
    device: Annotated[str, typer.Option(help="cpu:CORE[,CORE...] or cuda:NUMBER.")] = "cpu:0",
    max_model_len: Annotated[int, typer.Option(min=64, help="Longest request, in tokens.")] = 2048,
    max_num_batched_tokens: Annotated[int, typer.Option(min=64, help="Tokens of a step.")] = 2048,
    max_num_seqs: Annotated[int, typer.Option(min=4, help="Requests of a step.")] = 64,
    kv_cache_memory: Annotated[str, typer.Option(help="KV memory, such as 256MiB.")] = "256MiB",
    block_size: Annotated[int, typer.Option(min=16, help="Tokens of a KV block.")] = 32,
    compile_model: Annotated[bool, typer.Option("--compile", help="Compile the model.")] = False,
) -> None:
    """Measure a model's costs on a device, so that schedulers predict them from the start."""
    place = parse_device(device)
    if (lack := lack_of(place, gpus_here())) is not None:
        raise StartError(f"--device: {lack.why}")
    path = catalog.resolve(model, Path(), progress=say)
    # Read when vLLM is imported.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    # Only here: the other commands need no vLLM.
    from loomserve.platform.engine.profiling import profiler

    findings = profiler.profile(
        model,
        str(path),
        place,
        minutes,
        say,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        kv_cache_memory_bytes=_bytes(kv_cache_memory),
        block_size=block_size,
        enforce_eager=not compile_model,
    )
    for line in summary(findings):
        say(line)
    say(f"written to {save(findings.profile)}")


@profile.command("devices")
def profile_devices(
    path: Annotated[Path, typer.Argument(help="The configuration whose devices are measured.")],
    out: Annotated[
        Path | None, typer.Option(help="The file to write; else the one in the cache folder.")
    ] = None,
    batch: Annotated[
        list[int] | None, typer.Option(min=1, help="Requests of a step; may be repeated.")
    ] = None,
    quick: Annotated[
        bool, typer.Option(help="No model: its stages are predicted from bandwidth and arithmetic.")
    ] = False,
) -> None:
    """Measure memory, speed and links of devices, and the stages of models that are pipelines."""
    checked = configuration.load(path)
    if checked.cluster is not None:
        raise ConfigError(
            f"{path}: cluster: devices are measured on this machine, and these are on several: "
            "measure each node's with a file of its own, which has no cluster section"
        )
    check_devices(checked.devices, LOCAL_NODE, gpus_here())
    checked = placed_here(checked, path.parent, say).config
    models = {
        model.source: (
            str(catalog.resolve(model.source, path.parent, say, revision=model.revision)),
            [checked.device(name) for name in model.devices],
        )
        for model in checked.models
        if model.pipeline is not None and not quick
    }
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    # Only here: the other commands need no torch.
    from loomserve.platform.engine.profiling import device_speed

    found = device_speed.profile_devices(checked.devices, models, batch or [1, 8, 16], say)
    display(table("Devices", _device_rows(found)))
    target = out or device_profile.default_path()
    device_profile.save(found, target)
    say(f"written to {target}; loomserve placement {path} divides models by it")


def _device_rows(found: DeviceProfile) -> Iterator[Row]:
    for device in found.devices:
        speed: dict[str, str] = {
            "device": device.name,
            "place": device.place,
            "memory": f"{device.memory / 2**30:.1f} GiB",
            "reads": f"{device.bytes_per_s / 1e9:.1f} GB/s",
            "computes": f"{device.flop_per_s / 1e9:.0f} GFLOP/s",
        }
        timed = [
            {
                "model": f"{each.model}, {times.batch} requests",
                "a layer": f"{1000 * times.layer_s:.2f} ms",
                "the ends": f"{1000 * (times.stage_s + times.first_s + times.last_s):.2f} ms",
            }
            for each in device.models
            for times in each.times
        ]
        for row in timed or [dict.fromkeys(("model", "a layer", "the ends"), "-")]:
            yield {**speed, **row}
            speed = dict.fromkeys(speed, "")


def parse_device(text: str) -> Device:
    """Parse ``cpu:0,1`` or ``cuda:0``; raises ConfigError."""
    kind, _, numbers = text.partition(":")
    place = {"cores": numbers.split(",")} if kind == "cpu" else {"gpu": numbers}
    try:
        return Device.model_validate({"name": "profiled", "kind": kind, **place})
    except ValidationError:
        raise ConfigError(
            f"--device {text!r}: write cpu:CORE[,CORE...] such as cpu:0,1, or cuda:NUMBER"
        ) from None


def summary(findings: Findings) -> list[str]:
    """Describe the findings in plain words."""
    profile = findings.profile
    engine = profile.engine
    return [
        f"{len(profile.samples)} steps on {engine.device} ({engine.threads} threads, "
        f"{engine.dtype}, vLLM {engine.vllm})",
        f"predictions of steps that the profile has not seen are {100 * profile.mape:.1f} % off, "
        f"and {100 * findings.corrected:.1f} % when they learn from the steps before",
        f"without a profile, learning as it runs: {100 * findings.learnt:.1f} % off",
        f"the machine itself: the same step is {_share(profile.noise)} off its own median",
        f"out of the engine: {_transfer(profile.swap_out)}",
        f"into the engine: {_transfer(profile.swap_in)}",
    ]


def _transfer(transfer: Transfer) -> str:
    return (
        f"{transfer.bytes_per_s / 1e9:.2f} GB/s after {1e3 * transfer.latency_s:.2f} ms; "
        f"predictions are {100 * transfer.mape:.1f} % off, "
        f"equal sizes {_share(transfer.noise)} off their own median"
    )


def _share(noise: float | None) -> str:
    return "an unknown share" if noise is None else f"{100 * noise:.1f} %"


def _bytes(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise ConfigError(f"--kv-cache-memory: {error}") from None
