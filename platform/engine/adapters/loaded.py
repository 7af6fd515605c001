"""The adapters of one engine: given to its workers between two steps, and taken away unused.

vLLM's workers would load an adapter when the first request with it is computed, and an adapter that
cannot be loaded ends the engine then. So each is loaded beforehand, known to the KV store's
connector, too, and a request with any other is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vllm.lora.request import LoRARequest

from loomserve.kvstore.engine.connector import StoreConnector
from loomserve.platform.base.plain_reason import first_line

_logger = logging.getLogger(__name__)


class EngineAdapters:
    """Loads and unloads adapters; called by the core's thread alone, but for :meth:`own`."""

    def __init__(self, core: Any) -> None:
        """``core`` is vLLM's ``EngineCore``."""
        self._core = core
        self._loaded: dict[int, LoRARequest] = {}

    def set(self, wanted: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Load what is wanted, and unload what is not and no request is computed with.

        ``wanted`` has of each adapter ``id``, ``name`` (which its KV is told apart by) and
        ``path``. Returns ``problems``: by number, as text, why some cannot be loaded; and ``left``:
        how many more than are wanted are still there, for the requests that they have. Raises
        ValueError if the engine was started without adapters.
        """
        if self._core.vllm_config.lora_config is None:
            raise ValueError("it was started without adapters")
        numbers = {each["id"] for each in wanted}
        # First what makes room.
        left = self._unload(self._loaded.keys() - numbers)
        problems: dict[str, str] = {}
        for each in wanted:
            if each["id"] not in self._loaded:
                request = LoRARequest(each["name"], each["id"], each["path"])
                try:
                    self._load(request)
                except Exception as error:  # vLLM's words say what is wrong with it
                    problems[str(each["id"])] = first_line(error)
        return {"problems": problems, "left": left}

    def own(self, asked: LoRARequest | None) -> LoRARequest | None:
        """The adapter that a request names, as this engine has it; else raises ``ValueError``."""
        if asked is None:
            return None
        loaded = self._loaded.get(asked.lora_int_id)
        if loaded is None or loaded.lora_name != asked.lora_name:
            raise ValueError(f"adapter {asked.lora_name!r} is not loaded here")
        return loaded

    def _load(self, request: LoRARequest) -> None:
        most = self._core.vllm_config.lora_config.max_cpu_loras
        if len(self._loaded) >= most:
            # vLLM would throw out the one that was used least lately, and load it anew in a step.
            raise ValueError(f"the engine has {most} adapters, and room for no more")
        connector = self._core.scheduler.connector
        if isinstance(connector, StoreConnector):
            connector.learn_adapter(request)
        try:
            if not self._core.add_lora(request):
                raise ValueError("vLLM does not load it")
        except Exception:
            # What failed half-way would hold its place.
            self._core.remove_lora(request.lora_int_id)
            raise
        self._loaded[request.lora_int_id] = request
        _logger.info("adapter %s is loaded", request.lora_name)

    def _unload(self, numbers: Iterable[int]) -> int:
        requests = self._core.scheduler.requests.values()
        busy = {each.lora_request.lora_int_id for each in requests if each.lora_request}
        left = 0
        for number in sorted(numbers):
            if number in busy:
                left += 1
                continue
            # First here: nobody gets it from now on.
            gone = self._loaded.pop(number)
            self._core.remove_lora(number)
            _logger.info("adapter %s is unloaded", gone.lora_name)
        return left
