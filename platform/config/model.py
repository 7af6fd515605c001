"""The section ``models``, whose fields must fit each other."""

from __future__ import annotations

from pydantic import model_validator

from loomserve.platform.config.base import FieldError
from loomserve.platform.config.model_fields import ModelFields, Roles
from loomserve.platform.config.scaling import Scaling

# Values that lending and borrowing allow for options of vLLM's engine, and why.
_ALLOWED_WITH_LENDING: dict[str, tuple[tuple[object, ...], str]] = {
    "tensor_parallel_size": ((1,), "a model whose attention is lent runs in one process"),
    "pipeline_parallel_size": ((1,), "a model whose attention is lent runs in one process"),
    "runner": (("auto", "generate"), "a model that embeds or scores has no answer that grows"),
    "speculative_config": ((None,), "attention that is lent knows no speculative decoding"),
    "kv_cache_dtype": (("auto",), "attention that is lent knows no quantised KV"),
    "enforce_eager": ((True,), "a compiled model cannot look for tasks between its operators"),
    "distributed_executor_backend": (("mp",), "loans are opened through our own executor"),
}

# Fields of a model that a pipeline does not allow, and why.
_REFUSED_WITH_PIPELINE = {
    "roles": "a pipeline is one replica, which both prefills and decodes",
    "lending": "a pipeline's attention is on several devices already",
    "adapters": "vLLM's adapters have been tried on engines of one device only",
}

# Fields of a model that a simulated one does not allow, and what it lacks for them.
_REFUSED_WHEN_SIMULATED = {"pipeline": "layers to divide", "lending": "KV and attention to lend"}

# Those of which requests would get adapters that they do not name, and KV that is not told apart.
_REFUSED_WITH_ADAPTERS = {
    "default_mm_loras": "requests name the adapters that they get",
    "enable_tower_connector_lora": "what a vision tower computes is not told apart by adapter",
}


def _check_replicas(model: ModelFields) -> None:
    if len(set(model.devices)) != len(model.devices):
        raise FieldError(
            f"model {model.name!r} names a device twice; a device runs one replica of a model",
            "devices",
        )
    if isinstance(model.replicas, Scaling):
        _check_scaling(model, model.replicas)
    elif not model.is_placed:
        if model.replicas != "auto" and model.replicas < 1:
            raise FieldError(
                f"model {model.name!r} asks for {model.replicas} replicas: ask for 1 or more",
                "replicas",
            )
        return
    elif model.replicas != "auto" and not 1 <= model.replicas <= len(model.devices):
        raise FieldError(
            f"model {model.name!r} asks for {model.replicas} replicas on "
            f"{len(model.devices)} devices; a device runs one replica of a model, so give "
            f"1 to {len(model.devices)}",
            "replicas",
        )
    if model.roles is not None:
        _check_roles(model, model.roles)


def _check_scaling(model: ModelFields, scaling: Scaling) -> None:
    if model.is_placed and model.pipeline is None and scaling.max > len(model.devices):
        raise FieldError(
            f"model {model.name!r} asks for up to {scaling.max} replicas on "
            f"{len(model.devices)} devices; a device runs one replica of a model, so give at "
            f"most {len(model.devices)}, or more devices",
            ("replicas", "max"),
        )
    if model.pinned and not scaling.min:
        raise FieldError(
            f"model {model.name!r} is pinned, so it is never put away: make this 1, or leave "
            "pinned out",
            ("replicas", "min"),
        )


def _check_roles(model: ModelFields, roles: Roles) -> None:
    needed = roles.prefill + roles.decode
    least = model.replicas.min if isinstance(model.replicas, Scaling) else model.replicas
    there = len(model.devices) if least == "auto" else least
    if needed > there:
        raise FieldError(
            f"model {model.name!r} asks for {needed} replicas to prefill or decode, and has "
            f"{there} {'devices' if model.replicas == 'auto' else 'replicas'}",
            "roles",
        )


def _check_pipeline(model: ModelFields) -> None:
    if model.pipeline is None:
        return
    if model.replicas not in ("auto", 1):
        raise FieldError(
            f"model {model.name!r} is one pipeline over all its devices, so it has one "
            "replica: leave this out, or pipeline",
            "replicas",
        )
    if not model.is_placed:
        raise FieldError(
            f"model {model.name!r} has no devices for its stages: name them, or leave this out, "
            "and it is divided where no device holds it",
            "pipeline",
        )
    if model.pipeline.layers and len(model.pipeline.layers) != len(model.devices):
        raise FieldError(
            f"model {model.name!r} has {len(model.devices)} devices: give the layers of each, "
            "or leave this out",
            ("pipeline", "layers"),
        )
    for field, why in _REFUSED_WITH_PIPELINE.items():
        if getattr(model, field) is not None:
            raise FieldError(f"{why}: leave it out, or pipeline", field)
    for option in ("pipeline_parallel_size", "tensor_parallel_size"):
        if option in model.engine:
            raise FieldError("is set through 'pipeline'", ("engine", option))


def _check_idle(model: ModelFields) -> None:
    if model.pinned and model.idle is not None:
        raise FieldError(
            f"model {model.name!r} is pinned, so it is never put away: leave one of them out",
            "idle",
        )


def _check_adapters(model: ModelFields) -> None:
    if model.adapters is None:
        return
    if model.lending is not None:
        raise FieldError(
            "a model that lends or borrows has layers of ours, to which vLLM applies no "
            "adapter: leave it out, or lending",
            "adapters",
        )
    for option, why in _REFUSED_WITH_ADAPTERS.items():
        if model.engine.get(option):
            raise FieldError(f"{why}: leave it out", ("engine", option))


def _check_lending(model: ModelFields) -> None:
    if model.lending is None:
        return
    lent = model.lending.lend_memory
    if lent is not None and lent > model.kv_cache_memory:
        raise FieldError(
            f"model {model.name!r} has {model.kv_cache_memory} bytes of KV memory "
            "(kv_cache_memory) and cannot lend more",
            ("lending", "lend_memory"),
        )
    for option, (allowed, why) in _ALLOWED_WITH_LENDING.items():
        if option in model.engine and model.engine[option] not in allowed:
            raise FieldError(f"{why}: leave it out, or lending", ("engine", option))
    if model.lending.among_replicas and len(model.devices) == 1:
        raise FieldError(
            f"model {model.name!r} lends and borrows, which its replicas do among themselves, "
            "and has one device: give it another, or leave lend_memory or borrow_memory out",
            "devices",
        )
    if model.lending.borrow_memory is not None or model.lending.auto:
        _check_borrowers_scheduling(model)


def _check_borrowers_scheduling(model: ModelFields) -> None:
    for option, refused in (("preemption", "swap"), ("chunked_recompute", False)):
        if getattr(model.scheduling, option) == refused:
            raise FieldError(
                f"model {model.name!r} borrows memory, and KV that lies with a lender can "
                "only be computed again, in chunks: leave this out, or borrow_memory",
                ("scheduling", option),
            )


def _check_simulated(model: ModelFields) -> None:
    if not model.is_simulated:
        if model.simulated is not None:
            raise FieldError(
                f"model {model.name!r} has weights to compute with: leave this out, or set "
                "source: simulated",
                "simulated",
            )
        return
    for field, why in _REFUSED_WHEN_SIMULATED.items():
        if getattr(model, field) is not None:
            raise FieldError(f"a simulated model has no {why}: leave it out", field)


class Model(ModelFields):
    """One model as users see it: a name, where its weights are, and where it runs."""

    @model_validator(mode="after")
    def _fields_fit_each_other(self) -> Model:
        _check_replicas(self)
        _check_pipeline(self)
        _check_idle(self)
        _check_adapters(self)
        _check_lending(self)
        _check_simulated(self)
        return self
