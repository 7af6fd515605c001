"""Ray Serve LLM with two models on a core each, as it ships: ``PORT MODEL ENGINE_FLAGS…``."""

import signal
import sys

import ray
from ray import serve
from ray.serve.llm import LLMConfig, build_openai_app

NAMES = ("measured", "idle")


def options(flags: list[str]) -> dict[str, object]:
    """Of vLLM's command line, as its engine's arguments."""
    found: dict[str, object] = {}
    for flag in flags:
        name, _, value = flag.removeprefix("--").partition("=")
        found[name.replace("-", "_")] = int(value) if value.isdigit() else value or True
    return found


def model(name: str, core: int, source: str, flags: list[str]) -> LLMConfig:
    environment = {"VLLM_CPU_OMP_THREADS_BIND": str(core), "OMP_NUM_THREADS": "1"}
    return LLMConfig(
        model_loading_config={"model_id": name, "model_source": source},
        accelerator_config={"kind": "cpu"},
        engine_kwargs=options(flags),
        deployment_config={"autoscaling_config": {"min_replicas": 1, "max_replicas": 1}},
        runtime_env={"env_vars": environment},
        log_engine_metrics=False,
    )


if __name__ == "__main__":
    port, source, *flags = sys.argv[1:]
    # Its actors ask for more cores than they use.
    ray.init(num_cpus=16, include_dashboard=False)
    serve.start(http_options={"host": "127.0.0.1", "port": int(port)})
    configs = [model(name, core, source, flags) for core, name in enumerate(NAMES)]
    serve.run(build_openai_app({"llm_configs": configs}))
    signal.sigwait({signal.SIGINT, signal.SIGTERM})
    ray.shutdown()
