"""Environment variables of all processes that import vLLM for a model's requests."""

from __future__ import annotations

# Bounds what one request can ask of an engine: OpenAI's own limit of n.
_MAX_SEQUENCES_PER_REQUEST = "128"

# Ray would hide all GPUs from an actor that asks it for none.
KEEPS_GPUS_VISIBLE = {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
VLLM_ENVIRONMENT = {
    "VLLM_MAX_N_SEQUENCES": _MAX_SEQUENCES_PER_REQUEST,
    # A host that may be asked must not send the engine on to one that may not.
    "VLLM_MEDIA_URL_ALLOW_REDIRECTS": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    # torch asks for huge pages for what is large: a third fewer page faults in an engine's start.
    "THP_MEM_ALLOC_ENABLE": "1",
    **KEEPS_GPUS_VISIBLE,
}
# What vLLM's serving layer imports would let no warning pass, whoever has it.
_LETS_WARNINGS_PASS = {"SAGEMAKER_CONTAINER_LOG_LEVEL": "WARNING"}
GATEWAY_ENVIRONMENT = {
    **VLLM_ENVIRONMENT,
    # By setting up its own log when it is imported, vLLM would close Serve's.
    "VLLM_CONFIGURE_LOGGING": "0",
    **_LETS_WARNINGS_PASS,
}
FORK_SERVER_ENVIRONMENT = {**VLLM_ENVIRONMENT, **_LETS_WARNINGS_PASS}
