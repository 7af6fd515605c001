"""The whole configuration, and checks between its sections."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field, model_validator

from loomserve.platform.base.loopback import is_loopback
from loomserve.platform.config.aliases import Alias, check_alias
from loomserve.platform.config.base import AUTO, FieldError, Section, plain_name
from loomserve.platform.config.batch import Batch, OfflineModel
from loomserve.platform.config.cluster import Cluster
from loomserve.platform.config.devices import Device
from loomserve.platform.config.elastic import Elastic
from loomserve.platform.config.kvstore import KvStore
from loomserve.platform.config.lending import Lending
from loomserve.platform.config.model import Model
from loomserve.platform.config.rebalancing import Rebalancing
from loomserve.platform.config.server import Server

_EVERYWHERE = ("0.0.0.0", "::")
# vLLM's options that set a KV connector, where the store's own is.
_KV_TRANSFER_OPTIONS = ("kv_transfer_config", "kv_offloading_size")

# vLLM's options that divide an engine among several GPUs.
_PARALLEL_OPTIONS = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")

# Values that lending allows on GPUs for options of vLLM's engine, and why.
_ALLOWED_WITH_LENDING_ON_GPUS: dict[str, tuple[tuple[object, ...], str]] = {
    "async_scheduling": ((False,), "a step is planned once it is known that its loans still hold"),
    "enable_sleep_mode": ((False,), "KV memory that is lent by the page would stay in sleep"),
    "attention_backend": (("FLASH_ATTN",), "FlashAttention alone leaves rows to lenders"),
}


class Config(Section):
    """The whole configuration file."""

    devices: Annotated[tuple[Device, ...], AUTO] = Field(
        (),
        description="Where engines may run; auto: all cores, or GPUs where there are any, of this "
        "machine or of the cluster's nodes.",
    )
    cluster: Cluster | None = Field(
        None, description="Engines run on several nodes; without it all is on this machine."
    )
    models: tuple[Model, ...] = Field(
        description="What is served from the start: a list, or NAME: SOURCE, or NAME: {...} with "
        "the fields below."
    )
    aliases: dict[str, Alias] = Field(
        default_factory=dict,
        description="Names that stand for models: NAME: MODEL, NAME: {MODEL: WEIGHT, ...}, or the "
        "fields below.",
    )
    kvstore: KvStore | None = Field(
        None, description="The store of KV blocks; without it engines forget theirs when full."
    )
    batch: Batch | None = Field(
        None, description="The batch lane; without it there are no files and no batches."
    )
    server: Server = Field(default_factory=Server, description="The HTTP server.")
    elastic: Elastic = Field(
        default_factory=Elastic, description="How models come and go with their requests."
    )
    rebalancing: Rebalancing = Field(
        default_factory=Rebalancing, description="What moves from hot devices to cold ones."
    )

    @model_validator(mode="after")
    def _models_fit_the_kv_store(self) -> Config:
        for index, model in enumerate(self.models):
            in_store = self.kvstore is not None and model.kvstore
            if model.kvstore_quota is not None and not in_store:
                raise FieldError(
                    f"model {model.name!r} keeps nothing in a KV store: add a kvstore section to "
                    "the file and do not set the model's kvstore to false, or set no quota",
                    ("models", index, "kvstore_quota"),
                )
            if model.pipeline is not None and in_store:
                raise FieldError(
                    f"model {model.name!r} is a pipeline, whose stages' blocks the KV store does "
                    "not keep: set its kvstore to false",
                    ("models", index, "pipeline"),
                )
            if model.roles is not None and not in_store:
                raise FieldError(
                    f"model {model.name!r} hands its KV from prefill to decode through the KV "
                    "store: add a kvstore section to the file and do not set the model's kvstore "
                    "to false, or set no roles",
                    ("models", index, "roles"),
                )
            for option in ("preemption", "swap_space") if not in_store else ():
                if getattr(model.scheduling, option) not in (None, "recompute"):
                    raise FieldError(
                        f"model {model.name!r} has no KV store to swap to: add a kvstore section "
                        "to the file and do not set the model's kvstore to false, or leave this "
                        "out",
                        ("models", index, "scheduling", option),
                    )
            for option in _KV_TRANSFER_OPTIONS if in_store else ():
                if option in model.engine:
                    raise FieldError(
                        f"model {model.name!r} keeps its KV blocks in the store: set its kvstore "
                        "to false to use another connector",
                        ("models", index, "engine", option),
                    )
        return self

    @model_validator(mode="after")
    def _borrowers_have_lenders(self) -> Config:
        lend = {each.name: each.lending and each.lending.lends_to_others for each in self.models}
        for index, model in enumerate(self.models):
            lending = model.lending
            if lending is None or lending.borrow_memory is None or lending.among_replicas:
                continue
            if not any(lend.values()):
                raise FieldError(
                    f"model {model.name!r} has nobody to borrow from: give another model "
                    "lending.lend_memory, and no borrow_memory",
                    ("models", index, "lending", "borrow_memory"),
                )
            for position, name in enumerate(lending.lenders):
                if not lend.get(name):
                    what = "lends nothing" if name in lend else "is not under models"
                    raise FieldError(
                        f"model {model.name!r} cannot borrow from {name!r}, which {what}; "
                        f"those that lend: {', '.join(n for n in lend if lend[n])}",
                        ("models", index, "lending", "lenders", position),
                    )
        return self

    @model_validator(mode="after")
    def _names_agree(self) -> Config:
        _refuse_duplicates("devices", [device.name for device in self.devices])
        # By which files and Serve's applications are named.
        _refuse_duplicates("models", [plain_name(model.name) for model in self.models])
        for index, model in enumerate(self.models):
            _check_model_devices(self, index, model)
        self._check_offline_models()
        self._check_aliases()
        self._check_predictors()
        self._check_nodes()
        owner: dict[tuple[str, str, int], str] = {}
        for index, device in enumerate(self.devices):
            places = [("cores", core) for core in device.cores]
            places += [("gpu", device.gpu)] if device.gpu is not None else []
            for field, number in places:
                place = (device.on, field, number)
                if place in owner:
                    raise FieldError(
                        f"devices {owner[place]!r} and {device.name!r} both claim "
                        f"{field.removesuffix('s')} {number}"
                        + (f" of node {device.node!r}" if device.node else ""),
                        ("devices", index, field),
                    )
                owner[place] = device.name
        return self

    @property
    def nodes(self) -> tuple[str, ...]:
        """The names of the nodes that have devices."""
        return tuple(dict.fromkeys(device.on for device in self.devices))

    @property
    def has_gateways_on_each_node(self) -> bool:
        return self.cluster is not None and self.cluster.gateways == "each_node"

    def _check_nodes(self) -> None:
        host = self.server.host
        if self.has_gateways_on_each_node and not (is_loopback(host) or host in _EVERYWHERE):
            raise FieldError(
                f"{host!r} is an address of one node, and cluster.gateways asks for a gateway on "
                "each: listen on 0.0.0.0 or ::, or set cluster.gateways to one_node",
                ("server", "host"),
            )
        for index, device in enumerate(self.devices):
            if self.cluster is None and device.node is not None:
                raise FieldError(
                    f"device {device.name!r} names a node, and there is but this machine: add a "
                    "cluster section to the file, or leave this out",
                    ("devices", index, "node"),
                )
            if self.cluster is not None and device.node is None:
                raise FieldError(
                    f"device {device.name!r} is on none of the cluster's nodes: give it the name "
                    "of one (loomserve node --name)",
                    ("devices", index, "node"),
                )
        on = {device.name: device.on for device in self.devices}
        for index, model in enumerate(self.models):
            if model.pipeline is not None and len({on[name] for name in model.devices}) > 1:
                raise FieldError(
                    f"model {model.name!r} is one engine, whose stages pass tensors through shared "
                    "memory: give it devices of one node",
                    ("models", index, "devices"),
                )

    @property
    def isolates_tenants(self) -> bool:
        """Whether no API key reads another's KV blocks, in the store and in engines."""
        if self.kvstore is not None and self.kvstore.isolate_tenants is not None:
            return self.kvstore.isolate_tenants
        return len(self.server.api_keys) > 1 or self.server.api_keys_file is not None

    @property
    def offline_models(self) -> tuple[OfflineModel, ...]:
        return self.batch.offline_models if self.batch is not None else ()

    def _check_offline_models(self) -> None:
        kinds = {device.name: device.kind for device in self.devices}
        taken = [plain_name(model.name) for model in self.models]
        for index, model in enumerate(self.offline_models):
            place = ("batch", "offline_models", index)
            name = plain_name(model.name)
            if name in taken:
                raise FieldError(
                    f"two models are named {model.name!r}; names must differ, under models too",
                    (*place, "name"),
                )
            taken.append(name)
            if kinds.get(model.device) != "cpu":
                there = ", ".join(sorted(name for name, kind in kinds.items() if kind == "cpu"))
                raise FieldError(
                    f"model {model.name!r} names device {model.device!r}, which is no CPU device "
                    f"under devices ({there or 'there is none'})",
                    (*place, "device"),
                )

    def _check_aliases(self) -> None:
        models = _models_and_adapters(self.models, self.offline_models)
        offline = [model.name for model in self.offline_models]
        for name, alias in self.aliases.items():
            try:
                check_alias(name, alias, models=models, batch_only=offline, aliases=self.aliases)
            except FieldError as error:
                raise FieldError(str(error), ("aliases", name, *error.field)) from None

    def _check_predictors(self) -> None:
        predictors: dict[str, str] = {}
        models: list[tuple[tuple[str | int, ...], Model | OfflineModel]] = [
            *((("models", index), model) for index, model in enumerate(self.models)),
            *(
                (("batch", "offline_models", index), model)
                for index, model in enumerate(self.offline_models)
            ),
        ]
        for place, model in models:
            if model.lengths is None:
                continue
            name = model.lengths.name_for(model.name)
            if model.lengths.predictor is None and isinstance(model, OfflineModel):
                raise FieldError(
                    f"name one: nothing is learnt from what the offline model {model.name!r} "
                    "answers, so run loomserve lengths train",
                    (*place, "lengths", "predictor"),
                )
            if name in predictors:
                raise FieldError(
                    f"models {predictors[name]!r} and {model.name!r} both name it: answers of two "
                    "models differ in length, so train a predictor for each",
                    (*place, "lengths", "predictor"),
                )
            predictors[name] = model.name

    def device(self, name: str) -> Device:
        return next(device for device in self.devices if device.name == name)


def _check_model_devices(config: Config, index: int, model: Model) -> None:
    kinds = {device.name: device.kind for device in config.devices}
    if model.is_placed and not config.devices:
        raise FieldError(
            f"model {model.name!r} names a device, and devices is auto, whose names are found "
            "out only when the platform starts: list the devices, or leave this out",
            ("models", index, "devices"),
        )
    for position, name in enumerate(model.devices):
        if name not in kinds:
            raise FieldError(
                f"model {model.name!r} names device {name!r}, which is not under devices "
                f"({', '.join(sorted(kinds))})",
                ("models", index, "devices", position),
            )
    if len({kinds[name] for name in model.devices}) > 1:
        raise FieldError(
            f"model {model.name!r} mixes CPU and GPU devices; use one kind",
            ("models", index, "devices"),
        )
    _check_model_memory(config, index, model)
    if "cuda" in (kinds[name] for name in model.devices):
        _check_on_gpus(index, model)
    elif model.is_placed and model.model_runner is not None:
        raise FieldError(
            f"model {model.name!r} runs on CPU devices, where vLLM has its first model runner "
            "alone: leave it out",
            ("models", index, "model_runner"),
        )


def _check_on_gpus(index: int, model: Model) -> None:
    """What works on CPU devices only, or would fail when vLLM starts."""
    if model.lending is not None:
        _check_lending_on_gpus(index, model, model.lending)
    for option in _PARALLEL_OPTIONS:
        if model.engine.get(option, 1) != 1:
            raise FieldError(
                f"an engine of model {model.name!r} has one GPU, that of its device, and no other "
                "to divide itself among: leave it out, or give the model several devices and "
                "pipeline",
                ("models", index, "engine", option),
            )


def _check_lending_on_gpus(index: int, model: Model, lending: Lending) -> None:
    """What lending lacks between GPUs; layers are refused as a plan is made, and GPUs that do not
    reach each other's memory when the platform starts."""
    place = ("models", index, "lending")
    on = f"model {model.name!r} runs on GPUs"
    if lending.auto:
        raise FieldError(
            f"{on}, where no gain has been measured yet, without which nothing is lent by itself: "
            "name lend_memory or borrow_memory, with experimental: true, or leave lending out",
            place,
        )
    if not lending.experimental:
        raise FieldError(
            f"{on}, between which lending has not shown a gain yet, and costs CUDA graphs and "
            "asynchronous scheduling: set lending.experimental: true to try it, or leave it out",
            place,
        )
    if model.idle_rules is not None:
        raise FieldError(
            f"{on}, and KV memory that is lent by the page is not given back in sleep: set pinned: "
            "true, or leave lending out",
            place,
        )
    if model.model_runner == 2:
        raise FieldError(
            "vLLM's second model runner does not sort requests by lender: leave it out, or lending",
            ("models", index, "model_runner"),
        )
    for option, (allowed, why) in _ALLOWED_WITH_LENDING_ON_GPUS.items():
        if option in model.engine and model.engine[option] not in allowed:
            raise FieldError(
                f"{why}: leave it out, or lending", ("models", index, "engine", option)
            )


def _check_model_memory(config: Config, index: int, model: Model) -> None:
    kv_bytes = model.largest_share * model.kv_bytes
    for device in (config.device(name) for name in model.devices):
        if device.memory is not None and kv_bytes >= device.memory:
            raise FieldError(
                f"model {model.name!r} alone would take all of device {device.name!r}'s "
                f"memory ({device.memory} bytes): lower it, or raise the device's memory",
                ("models", index, "kv_cache_memory"),
            )


def _refuse_duplicates(field: str, names: list[str]) -> None:
    for index, name in enumerate(names):
        if name in names[:index]:
            message = f"two {field} are named {name!r}; names must differ"
            raise FieldError(message, (field, index, "name"))


def _models_and_adapters(models: Sequence[Model], offline: Sequence[OfflineModel]) -> list[str]:
    """The names that clients may ask for, of which adapters have none that another has."""
    taken = {model.name: "a model" for model in models}
    taken |= {model.name: "an offline model" for model in offline}
    for index, model in enumerate(models):
        for position, name in enumerate(model.adapter_names):
            if name in taken:
                raise FieldError(
                    f"{taken[name]} is named {name!r} already; clients ask for adapters as for "
                    "models, so names must differ",
                    ("models", index, "adapters", "load", position, "name"),
                )
            taken[name] = f"an adapter of model {model.name!r}"
    return [name for model in models for name in (model.name, *model.adapter_names)]
