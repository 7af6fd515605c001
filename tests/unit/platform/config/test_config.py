from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loomserve.platform.base.errors import ConfigError
from loomserve.platform.config import Model, load, parse, parse_bytes
from loomserve.platform.scheduling.options import SchedulerOptions, scheduler_options
from loomserve.platform.state.roles import Role, configured_role

EXAMPLES = sorted((Path(__file__).parents[4] / "examples").glob("*.yaml"))
HASH = "sha256:" + "0" * 64
OTHER_HASH = "sha256:" + "1" * 64

# Each field on a line of its own: an error has to find the line.
GOOD = f"""\
devices:
  - name: core0
    kind: cpu
    cores: [0]
  - name: core1
    kind: cpu
    cores: [1]
  - name: gpu0
    kind: cuda
    gpu: 0
models:
  - name: hot
    source: demo
    devices: [core0, core1]
    replicas: 2
    kv_cache_memory: 512MiB
    engine:
      max_model_len: 4096
    router:
      policy: load_aware
      load_limit: 1.6
  - name: cold
    source: demo
    devices: [core1]
    kvstore_quota: 128MiB
kvstore:
  memory: 256MiB
  ssd: 1GiB
  ssd_path: blocks
  eviction: lru
server:
  host: 127.0.0.1
  port: 8000
  request_timeout_s: 600
  allow_unauthenticated: false
  api_keys:
    - name: alice
      hash: {HASH}
    - name: bob
      hash: {OTHER_HASH}
"""


def error_of(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(text, "my.yaml")
    return str(caught.value)


def line_of(text: str, old: str) -> int:
    return text[: text.index(old)].count("\n") + 1


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_the_examples_load(path: Path) -> None:
    assert load(path).models


def test_there_are_examples() -> None:
    assert EXAMPLES


def test_a_good_file_is_read_as_written() -> None:
    config = parse(GOOD)
    assert [device.name for device in config.devices] == ["core0", "core1", "gpu0"]
    assert config.device("core1").cores == (1,)
    hot, cold = config.models
    assert (hot.replicas, hot.kv_cache_memory) == (2, 512 * 2**20)
    assert hot.engine == {"max_model_len": 4096}
    assert cold.replicas == "auto"
    assert config.kvstore is not None
    assert (config.kvstore.memory, config.kvstore.ssd) == (256 * 2**20, 2**30)
    assert (hot.kvstore, hot.kvstore_quota, cold.kvstore_quota) == (True, None, 128 * 2**20)
    assert config.server.request_timeout_s == 600.0
    assert [key.hash for key in config.server.api_keys] == [HASH, OTHER_HASH]


# What is written, what is written instead, the field the error names, and words it must have.
# The error's line is the one where the new text ends.
BAD_FIELDS = [
    # Names that are not ours
    ("  port: 8000", "  ports: 8000", "server.ports", "unknown field"),
    ("    kind: cpu", "    colour: red", "devices[0].colour", "unknown field"),
    ("      load_limit: 1.6", "      int: 1", "models[0].router.int", "unknown field"),
    ("    source: demo", "    gpus: 1", "models[0].gpus", "unknown field"),
    # Types
    ("  port: 8000", "  port: '8000'", "server.port", "integer"),
    ("  port: 8000", "  port: true", "server.port", "integer"),
    ("  port: 8000", "  port: 80.5", "server.port", "integer"),
    ("  port: 8000", "  port:", "server.port", "integer"),
    ("  port: 8000", "  port: [8000]", "server.port", "integer"),
    ("name: hot", "name: 1234", "models[0].name", "must be text; put it in quotes"),
    ("name: hot", "name: no", "models[0].name", "must be text; put it in quotes"),
    ("cores: [0]", "cores: 0", "devices[0].cores", "must be a list"),
    ("cores: [0]", "cores: ['0']", "devices[0].cores[0]", "integer"),
    ("devices: [core1]", "devices: core1", "models[1].devices", "must be a list"),
    ("allow_unauthenticated: false", "allow_unauthenticated: 'no'",
     "server.allow_unauthenticated", "must be true or false"),
    ("replicas: 2", "replicas: many", "models[0].replicas", "integer, or .*'auto'"),
    ("load_limit: 1.6", "load_limit: much", "models[0].router.load_limit", "number"),
    # Values
    ("  port: 8000", "  port: 0", "server.port", "greater than or equal to 1"),
    ("  port: 8000", "  port: 65536", "server.port", "less than or equal to 65535"),
    ("cores: [0]", "cores: [-1]", "devices[0].cores[0]", "greater than or equal to 0"),
    ("kind: cpu", "kind: tpu", "devices[0].kind", "'cpu' or 'cuda'"),
    ("policy: load_aware", "policy: random", "models[0].router.policy", "'round_robin'"),
    ("load_limit: 1.6", "load_limit: 0", "models[0].router.load_limit", "greater than 0"),
    ("load_limit: 1.6", "load_limit: .nan", "models[0].router.load_limit", "finite"),
    ("s: 600", "s: .inf", "server.request_timeout_s", "finite"),
    ("s: 600", "s: -1", "server.request_timeout_s", "greater than 0"),
    ("name: hot", "name: ''", "models[0].name", "is no name"),
    ("name: hot", "name: 'a b'", "models[0].name", "is no name"),
    ("name: core0", "name: '../x'", "devices[0].name", "match"),
    (f"hash: {HASH}", "hash: secret", "server.api_keys[0].hash", "match"),
    ("512MiB", "-512MiB", "models[0].kv_cache_memory", "positive"),
    ("512MiB", "-1", "models[0].kv_cache_memory", "positive"),
    ("512MiB", "0", "models[0].kv_cache_memory", "more than zero"),
    ("512MiB", "512 apples", "models[0].kv_cache_memory", "512MiB or 2GiB"),
    ("512MiB", "true", "models[0].kv_cache_memory", "512MiB or 2GiB"),
    ("512MiB", "1.5", "models[0].kv_cache_memory", "512MiB or 2GiB"),
    ("512MiB", "9" * 400 + "GiB", "models[0].kv_cache_memory", "512MiB or 2GiB"),
    # Names that must differ
    ("name: cold", "name: hot", "models[1].name", "two models are named 'hot'"),
    ("name: core1", "name: core0", "devices[1].name", "two devices are named 'core0'"),
    ("name: bob", "name: alice", "server.api_keys[1].name", "same name"),
    (OTHER_HASH, HASH, "server.api_keys[1].hash", "same hash"),
    (OTHER_HASH, f"{OTHER_HASH}\n      next_hash: {HASH}", "server.api_keys[1].next_hash",
     "same hash"),
    (HASH, f"{HASH}\n      next_hash: {HASH}", "server.api_keys[0].next_hash", "same hash"),
    # Dates
    ("name: bob", "name: bob\n      expires_at: '2027-01-31T00:00:00'",
     "server.api_keys[1].expires_at", "must end with its zone"),
    ("name: bob", "name: bob\n      expires_at: soon", "server.api_keys[1].expires_at", "datetime"),
    # Devices and replicas
    ("[core0, core1]", "[core0, core0]", "models[0].devices", "a device twice"),
    ("[core0, core1]", "[core0, moon]", "models[0].devices[1]",
     r"'moon', which is not under devices \(core0, core1, gpu0\)"),
    ("[core0, core1]", "[core0, gpu0]", "models[0].devices", "mixes CPU and GPU"),
    ("[core0, core1]", "[]", "models[0].devices", "is empty: name one at least, or write auto"),
    ("replicas: 2", "replicas: 3", "models[0].replicas", "3 replicas on 2 devices.*1 to 2"),
    ("replicas: 2", "replicas: 0", "models[0].replicas", "1 to 2"),
    ("cores: [1]", "cores: [0]", "devices[1].cores", "'core0' and 'core1' both claim core 0"),
    ("cores: [0]", "cores: [2, 2]", "devices[0].cores", "a core twice"),
    ("cores: [0]", "cores: []", "devices[0].cores", "give it cores"),
    ("cores: [0]", "gpu: 1", "devices[0].gpu", "give it cores, and no gpu"),
    ("    gpu: 0", "    cores: [2]", "devices[2].cores", "give it gpu, and no cores"),
    ("    gpu: 0", "    gpu: 0\n  - name: gpu1\n    kind: cuda\n    gpu: 0", "devices[3].gpu",
     "'gpu0' and 'gpu1' both claim gpu 0"),
    ("devices: [core0, core1]\n    replicas: 2\n    kv_cache_memory: 512MiB\n    engine:\n"
     "      max_model_len: 4096",
     "devices: [gpu0]\n    engine:\n      tensor_parallel_size: 2",
     "models[0].engine.tensor_parallel_size", "has one GPU, that of its device"),
    ("replicas: 2", "replicas: 2\n    model_runner: 2", "models[0].model_runner",
     "its first model runner alone"),
    # Options of the engine that we set
    ("max_model_len: 4096", "port: 9000", "models[0].engine.port", "'server.port'"),
    ("max_model_len: 4096", "model: x", "models[0].engine.model", "'source'"),
    ("max_model_len: 4096", "served_model_name: x", "models[0].engine.served_model_name", "'name'"),
    ("max_model_len: 4096", "gpu_memory_utilization: 0.9",
     "models[0].engine.gpu_memory_utilization", "'kv_cache_memory'"),
    # The KV store
    ("256MiB", "63MiB", "kvstore.memory", "at least 64MiB"),
    ("1GiB", "lots", "kvstore.ssd", "512MiB or 2GiB"),
    ("ssd: 1GiB\n  ssd_path: blocks", "ssd_path: blocks", "kvstore.ssd_path", "without ssd"),
    ("eviction: lru", "eviction: fifo", "kvstore.eviction", "'cost' or 'lru'"),
    ("eviction: lru", "evict: lru", "kvstore.evict", "unknown field"),
    ("128MiB", "0", "models[1].kvstore_quota", "more than zero"),
    ("kvstore_quota: 128MiB", "kvstore: false\n    kvstore_quota: 128MiB",
     "models[1].kvstore_quota", "set no quota"),
    ("max_model_len: 4096", "kv_transfer_config: {}", "models[0].engine.kv_transfer_config",
     "set its kvstore to false"),
    ("max_model_len: 4096", "kv_offloading_size: 4", "models[0].engine.kv_offloading_size",
     "set its kvstore to false"),
    # Scheduling
    ("max_model_len: 4096", "scheduler_cls: x", "models[0].engine.scheduler_cls", "'scheduling'"),
    ("max_model_len: 4096", "scheduling_policy: priority", "models[0].engine.scheduling_policy",
     "'scheduling.queue'"),
    ("replicas: 2", "scheduling: {queue: lifo}", "models[0].scheduling.queue", "'fair', 'fcfs'"),
    ("replicas: 2", "kvstore: false\n    scheduling: {preemption: swap}",
     "models[0].scheduling.preemption", "no KV store to swap to"),
    ("replicas: 2", "kvstore: false\n    scheduling: {swap_space: 1GiB}",
     "models[0].scheduling.swap_space", "no KV store to swap to"),
    # Prefill and decode
    ("replicas: 2", "roles: {prefill: 2, decode: 1}", "models[0].roles", "and has 2 devices"),
    ("replicas: 2", "replicas: 1\n    roles: {prefill: 1, decode: 1}", "models[0].roles",
     "and has 1 replicas"),
    ("replicas: 2", "roles: {prefill: 0, decode: 1}", "models[0].roles.prefill", "equal to 1"),
    ("replicas: 2", "roles: {prefill: 1}", "models[0].roles.decode", "must be given"),
    ("replicas: 2", "kvstore: false\n    roles: {prefill: 1, decode: 1}", "models[0].roles",
     "through the KV store"),
    ("port: 8000", "front_ends: 17", "server.front_ends", "less than or equal to 16"),
    ("port: 8000", "port: 8000\n  admin_port: 8000", "server.admin_port", "where clients ask"),
    ("port: 8000", "port: 8000\n  admin_port: 0", "server.admin_port", "equal to 1"),
    # Doors open to the network
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "field", "says"), BAD_FIELDS)
def test_a_wrong_field_is_named_with_its_line(old: str, new: str, field: str, says: str) -> None:
    text = GOOD.replace(old, new, 1)
    line = line_of(GOOD, old) + new.count("\n")
    message = error_of(text)
    where = re.escape(f"my.yaml:{line}: {field}: ")
    assert re.search(rf"^{where}.*{says}", message, re.MULTILINE), message


def test_a_bare_date_is_to_be_quoted() -> None:
    message = error_of(GOOD.replace("name: bob", "name: bob\n      expires_at: 2027-01-31"))
    assert "put text in quotes" in message


@pytest.mark.parametrize(
    ("field", "removed", "line"),
    [
        ("models[1].name", "name: cold\n    ", 22),
        ("models[0].source", "    source: demo\n", 12),
        ("devices[1].cores", "    cores: [1]\n", 5),
        ("devices[2].gpu", "    gpu: 0\n", 8),
        ("server.api_keys[1].hash", f"      hash: {OTHER_HASH}\n", 39),
    ],
)
def test_a_missing_field_is_named_with_the_line_of_what_lacks_it(
    field: str, removed: str, line: int
) -> None:
    assert removed in GOOD
    message = error_of(GOOD.replace(removed, "", 1))
    assert message.startswith(f"my.yaml:{line}: {field}: "), message


BAD_FILES = [
    ("", 1, "must be a mapping with models, devices and server"),
    ("# only a comment\n", 1, "must be a mapping"),
    ("- devices\n", 1, "must be a mapping"),
    ("just text\n", 1, "must be a mapping"),
    ("devices: [\n", 2, "not valid YAML"),
    ("devices:\n\t- name: x\n", 2, "indent with spaces"),
    ("devices: []\n---\ndevices: []\n", 2, "another document"),
    ("devices: *nowhere\n", 1, "undefined alias"),
    ("devices: &again [*again]\n", 1, "nested too deeply"),
    ("models: []\nserver: {}\nmodels: []\n", 3, "'models' is given twice"),
    ("server:\n  port: 1\n  port: 2\n", 3, "'port' is given twice"),
    ("models:\n  - engine:\n      seed: 1\n      seed: 2\n", 4, "'seed' is given twice"),
    ("devices: []\n? [a, b]\n: 1\n", 2, "the name of a field must be text"),
    ("devices: []\nmodels: 2024-13-45\n", 2, "put text in quotes"),
    ("devices: []\nmodels: 0b_\n", 2, "put text in quotes"),
    ("devices: []\nmodels: !!python/object:os.system {}\n", 2, "no valid value"),
    ("devices: []\nmodels: \x07\n", 2, r"U\+0007"),
    ('devices: []\nmodels: "\\ud800"\n', 2, "no valid value"),
]


@pytest.mark.parametrize(("text", "line", "says"), BAD_FILES)
def test_a_file_that_is_no_configuration_is_refused_with_the_line(
    text: str, line: int, says: str
) -> None:
    assert re.search(rf"^my.yaml:{line}: .*{says}", error_of(text), re.MULTILINE)


def test_every_wrong_field_is_told_at_once() -> None:
    text = GOOD.replace("port: 8000", "port: 0").replace("name: hot", "name: 1")
    assert [line.split(": ")[1] for line in error_of(text).splitlines()] == [
        "models[0].name",
        "server.port",
    ]


def test_model_names_that_differ_only_in_how_a_slash_is_written_are_refused() -> None:
    text = GOOD.replace("name: hot", "name: a/b").replace("name: cold", "name: a--b")
    assert "my.yaml:22: models[1].name: two models" in error_of(text)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.yaml: cannot be read: No such file"):
        load(tmp_path / "missing.yaml")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"name: \xe9")
    with pytest.raises(ConfigError, match=r"latin\.yaml: is not UTF-8 text"):
        load(tmp_path / "latin.yaml")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "localhost", "::1"])
def test_loopback_needs_no_keys(host: str) -> None:
    text = GOOD[: GOOD.index("server:")] + f"server: {{host: '{host}'}}\n"
    assert parse(text).server.is_loopback


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "example.org"])
def test_an_open_address_is_served_with_keys_or_when_told_so(host: str) -> None:
    opened = GOOD.replace("host: 127.0.0.1", f"host: '{host}'")
    assert not parse(opened).server.is_loopback
    without_keys = opened[: opened.index("  api_keys:")]
    message = error_of(without_keys)
    assert "server.host: " in message
    assert "api_keys must be set" in message
    assert "allow_unauthenticated: true" in message
    assert not parse(without_keys.replace(": false", ": true")).server.is_loopback
    assert parse(without_keys + "  api_keys_file: keys.yaml\n").server.asks_for_keys


@pytest.mark.parametrize("wish", [None, True, False])
@pytest.mark.parametrize("store", [True, False])
@pytest.mark.parametrize(
    ("keys", "several"), [("none", False), ("one", False), ("two", True), ("file", True)]
)
def test_two_keys_are_kept_apart_unless_told_otherwise(
    keys: str, several: bool, store: bool, wish: bool | None
) -> None:
    text = GOOD
    if keys != "two":
        text = text[: text.index("    - name: bob" if keys == "one" else "  api_keys:")]
    if keys == "file":
        text += "  api_keys_file: keys.yaml\n"
    if not store:
        without = text[: text.index("kvstore:\n")] + text[text.index("server:") :]
        text = without.replace("    kvstore_quota: 128MiB\n", "")
    elif wish is not None:
        text = text.replace("  eviction: lru", f"  isolate_tenants: {str(wish).lower()}")
    asked = wish if store else None
    assert parse(text).isolates_tenants == (several if asked is None else asked)


def test_without_a_kv_store_a_quota_is_refused_and_any_connector_may_be_used() -> None:
    without = GOOD[: GOOD.index("kvstore:\n")] + GOOD[GOOD.index("server:") :]
    assert "models[1].kvstore_quota: model 'cold' keeps nothing" in error_of(without)
    unbounded = without.replace("    kvstore_quota: 128MiB\n", "")
    text = unbounded.replace("max_model_len: 4096", "kv_transfer_config: {kv_connector: Other}")
    assert parse(text).models[0].engine == {"kv_transfer_config": {"kv_connector": "Other"}}


def test_a_model_that_keeps_nothing_in_the_kv_store_may_use_another_connector() -> None:
    text = GOOD.replace("    replicas: 2\n", "    replicas: 2\n    kvstore: false\n")
    text = text.replace("max_model_len: 4096", "kv_transfer_config: {kv_connector: Other}")
    assert parse(text).models[0].engine == {"kv_transfer_config": {"kv_connector": "Other"}}


def test_roles_go_to_devices_in_their_order_and_what_is_left_does_both() -> None:
    devices = ("a", "b", "c", "d")
    model = Model(name="m", source="demo", devices=devices, roles={"prefill": 1, "decode": 2})
    assert [configured_role(model, device) for device in devices] == [
        Role.PREFILL,
        Role.DECODE,
        Role.DECODE,
        Role.UNIFIED,
    ]
    alone = Model(name="m", source="demo", devices=devices)
    assert {configured_role(alone, device) for device in devices} == {Role.UNIFIED}


def test_merge_keys_and_anchors_of_yaml_work() -> None:
    text = GOOD.replace("  - name: hot\n", "  - &base\n    name: hot\n")
    start = text.index("  - name: cold")
    text = text[:start] + "  - <<: *base\n    name: cold\n" + text[text.index("server:") :]
    assert parse(text).models[1].devices == ("core0", "core1")


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (1, 1), ("1", 1), ("7B", 7), ("512MiB", 512 * 2**20), ("1.5 GiB", 3 * 2**29),
        (" 2KB ", 2000), ("3TB", 3 * 10**12), ("1KiB", 1024), ("1MB", 10**6), ("1GB", 10**9),
        ("1TiB", 2**40),
    ],
)  # fmt: skip
def test_sizes_are_read(size: object, expected: int) -> None:
    assert parse_bytes(size) == expected


@given(st.integers(1, 2**53))
def test_a_size_is_the_same_as_a_number_and_as_text(size: int) -> None:
    assert parse_bytes(size) == parse_bytes(str(size)) == size


@settings(deadline=None)
@given(st.text() | st.text("[]{}:-,&*!#|>'\" \n\tab01<="))
def test_any_text_is_refused_with_an_error_of_ours(text: str) -> None:
    with pytest.raises(ConfigError):
        parse(text)


@settings(deadline=None)
@given(st.data())
def test_any_change_of_a_line_is_read_or_refused_with_an_error_of_ours(data: st.DataObject) -> None:
    lines = GOOD.splitlines()
    index = data.draw(st.integers(0, len(lines) - 1))
    lines[index] = data.draw(st.just("") | st.text("[]{}:-,&*!#|>'\" ab01<=", max_size=12))
    try:
        answer = repr(parse("\n".join(lines), "my.yaml"))
    except ConfigError as error:
        answer = str(error)
    assert re.fullmatch(r"Config\(devices=.*|(my\.yaml:\d+: .+\n?)+", answer)


def test_preemption_is_adaptive_with_a_store_that_is_shared_among_the_replicas() -> None:
    config = parse(GOOD)
    hot, cold = (scheduler_options(model, config.kvstore) for model in config.models)
    assert (hot.preemption, cold.preemption) == ("adaptive", "adaptive")
    # Half of the store's 256 MiB on two devices; half of the quota of 128 MiB.
    assert (hot.swap_bytes, cold.swap_bytes) == (64 * 2**20, 64 * 2**20)
    without = scheduler_options(config.models[0], None)
    assert (without.preemption, without.swap_bytes) == ("recompute", 0)


def test_what_is_said_of_scheduling_reaches_the_engine() -> None:
    said = "{queue: sjf, preemption: swap, swap_space: 8MiB, chunked_recompute: false}"
    config = parse(GOOD.replace("replicas: 2", f"replicas: 2\n    scheduling: {said}"))
    options = scheduler_options(config.models[0], config.kvstore)
    assert options == SchedulerOptions(
        queue="sjf",
        preemption="swap",
        swap_bytes=8 * 2**20,
        chunked_recompute=False,
    )


def test_a_model_names_the_predictor_of_its_answers_and_no_two_share_one() -> None:
    named = GOOD.replace("    replicas: 2", "    replicas: 2\n    lengths: {predictor: hot-v1}")
    config = parse(named)
    assert [m.lengths and m.lengths.predictor for m in config.models] == ["hot-v1", None]
    twice = named.replace(
        "    kvstore_quota", "    lengths: {predictor: hot-v1}\n    kvstore_quota"
    )
    with pytest.raises(
        ConfigError, match=r"models\[1\].lengths.predictor: models 'hot' and 'cold'"
    ):
        parse(twice)
    with pytest.raises(ConfigError, match=r"models\[0\].lengths.predictor"):
        parse(named.replace("hot-v1", "../elsewhere"))


def test_a_model_whose_predictor_needs_no_training_has_one_of_its_name() -> None:
    named = GOOD.replace("    replicas: 2", "    replicas: 2\n    lengths: {}")
    lengths = parse(named).models[0].lengths
    assert lengths is not None
    assert (lengths.predictor, lengths.name_for("org/hot")) == (None, "org--hot")
    twice = named.replace("    kvstore_quota", "    lengths: {predictor: hot}\n    kvstore_quota")
    with pytest.raises(ConfigError, match="models 'hot' and 'cold' both name it"):
        parse(twice)


def test_only_a_key_that_says_so_has_late_requests_refused() -> None:
    keys = parse(GOOD.replace("name: bob", "name: bob\n      refuse_late: true")).server.api_keys
    assert [key.refuse_late for key in keys] == [False, True]


OFFLINE = """\
batch:
  offline_models:
    - name: old
      source: demo
      device: core1
      kv_cache_memory: 64MiB
      lengths: {predictor: old-v1}
"""


def test_offline_models_are_read_as_written() -> None:
    (model,) = parse(GOOD + OFFLINE).offline_models
    assert (model.name, model.device, model.kv_cache_memory) == ("old", "core1", 64 * 2**20)
    assert parse(GOOD).offline_models == ()


@pytest.mark.parametrize(
    ("old", "new", "field", "words"),
    [
        ("name: old", "name: hot", "name", "two models are named 'hot'"),
        ("device: core1", "device: gpu0", "device", "no CPU device .*core0, core1"),
        ("device: core1", "device: core7", "device", "no CPU device"),
        ("device: core1", "devices: [core1]", "devices", "unknown field"),
        ("old-v1", "hot-v1", "lengths.predictor", "'hot' and 'old' both name it"),
        ("{predictor: old-v1}", "{}", "lengths.predictor", "run loomserve lengths train"),
        ("64MiB", "0", "kv_cache_memory", "more than zero"),
    ],
)
def test_a_wrong_offline_model_is_named_with_its_field(
    old: str, new: str, field: str, words: str
) -> None:
    named = GOOD.replace("    replicas: 2", "    lengths: {predictor: hot-v1}\n    replicas: 2")
    section = OFFLINE.replace(old, new)
    line = named.count("\n") + line_of(section, new)
    place = re.escape(f"my.yaml:{line}: batch.offline_models[0].{field}: ")
    assert re.search(place + ".*" + words, error_of(named + section))
