"""An application that runs once models answer: KubeRay moves traffic when all applications run."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection

from ray import serve

from loomserve.deployments.ray_node import keep_calls_on_node
from loomserve.platform.base.reply import Reply
from loomserve.platform.fleet.messages import CONTROLLER_APP, CONTROLLER_DEPLOYMENT
from loomserve.platform.state import ModelState, ModelStatus, PlatformState

_log = logging.getLogger("ray.serve")

_LOOK_S = 0.5
_TELL_S = 60.0
_ANSWER_S = 10.0
# Whoever asks for a model that sleeps or is not loaded has it come.
_ANSWERING = frozenset(
    {ModelStatus.READY, ModelStatus.DEGRADED, ModelStatus.ASLEEP, ModelStatus.UNLOADED}
)


class Ready:
    """Serve deployment whose start lasts until the configured models answer."""

    async def __init__(self, models: Collection[str]) -> None:  # type: ignore[misc]  # Serve awaits it
        """``models`` are the names of the configured ones."""
        keep_calls_on_node()
        controller = serve.get_deployment_handle(CONTROLLER_DEPLOYMENT, CONTROLLER_APP)
        told_at = time.monotonic()
        while True:
            waits = "for the controller"
            try:
                async with asyncio.timeout(_ANSWER_S):
                    reply: Reply[PlatformState] = await controller.state.remote()
                waits = waiting_for(models, reply.get().models)
            except TimeoutError:
                pass  # it is busy, as when engines start
            if not waits:
                return
            if time.monotonic() - told_at > _TELL_S:
                told_at = time.monotonic()
                _log.warning("no traffic yet: waiting %s", waits)
            await asyncio.sleep(_LOOK_S)


def waiting_for(names: Collection[str], models: Collection[ModelState]) -> str:
    """What traffic waits for, for the end of a sentence; empty: for nothing. A configured model
    that is not among those that there are was unloaded by an operator."""
    late = [
        f"{model.name} ({model.status}{f': {model.message}' if model.message else ''})"
        for model in models
        if model.name in names and model.status not in _ANSWERING
    ]
    return f"for {', '.join(late)}" if late else ""
