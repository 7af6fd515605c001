"""What Ray, and all processes that it starts, read from their environment."""

from __future__ import annotations

import os

from loomserve.platform.run.folder import RunFolder

# Ray looks at these ten times a second, and Serve at its metrics, which nobody reads. Without Ray's
# own statistics of events (RAY_event_stats=0) its GCS takes a whole core.
_AT_REST = {
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "60000",
    "REPORTER_UPDATE_INTERVAL_MS": "60000",
    "RAY_raylet_check_gc_period_milliseconds": "1000",
    "RAY_local_fs_monitor_interval_ms": "2000",
    "RAY_object_manager_timer_freq_ms": "1000",
    "RAY_kill_idle_workers_interval_ms": "1000",
    "RAY_gcs_pull_resource_loads_period_milliseconds": "5000",
    "RAY_io_context_monitor_probe_interval_ms": "10000",
}

# Ray reads these in every process of the cluster; they must be set before it is imported.
_RAY_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_enable_metrics_collection": "0",
    # Ray would run engines at niceness 15, behind everything else on the machine.
    "RAY_worker_niceness": "0",
    # One that has handed a model to Serve has imported vLLM; Ray would keep it, half a gigabyte.
    "RAY_num_workers_soft_limit": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    # It would end as many workers as bring memory below its threshold, the controller, gateways and
    # stores among them, and does not count engines. The controller has replicas give theirs back.
    "RAY_memory_monitor_refresh_ms": "0",
    # Else the kernel would end them before engines.
    "RAY_worker_oom_score_adjustment": "0",
    # An engine's processes end with its replica, even if that is killed while they start.
    "RAY_process_group_cleanup_enabled": "1",
    # Serve looks ten times a second whether replicas should come or go: 4 % of a core, at rest.
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",
    # On a busy machine an answer takes longer than Serve's 0.1 s, and each that does is logged.
    "RAY_SERVE_QUEUE_LENGTH_RESPONSE_DEADLINE_S": "2",
    "RAY_SERVE_MAX_QUEUE_LENGTH_RESPONSE_DEADLINE_S": "10",
    **_AT_REST,
    "VLLM_LOGGING_LEVEL": "ERROR",
}

_PATIENCE = {
    # A busy machine takes longer than Ray would wait for its agents.
    "RAY_agent_register_timeout_ms": "200000",
    # What runs on a node goes on for so long while GCS is away, or until its streams have ended.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "300",
}

# Of a machine that is all there is: Ray would turn loopback into an address that others reach.
_LONE_ENVIRONMENT = {
    **_PATIENCE,
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # The command sees its raylet's process end; one that only answers late takes all down.
    "RAY_health_check_failure_threshold": "1000",
}

# Of a node that is kept.
_NODE_ENVIRONMENT = {
    **_PATIENCE,
    # The head gives a node up that is silent five times so long, some 28 s; with Ray's 10 s it were
    # 53, until which nothing of that node is started elsewhere, or on the node once it is back.
    "RAY_health_check_timeout_ms": "5000",
    # Ray's dashboard would show its own metrics to everybody; at no such port it cannot.
    "DASHBOARD_METRIC_PORT": "-1",
}

_COMMAND_ENVIRONMENT = {
    # A command handles signals, and Ray would have it abort 3 s after a SIGTERM.
    "RAY_DISABLE_FAILURE_SIGNAL_HANDLER": "1",
    # A call of one who has not joined would start another Ray, with Ray's own options.
    "RAY_ENABLE_AUTO_CONNECT": "0",
}
DAEMONS_ENVIRONMENT = {"RAY_DISABLE_FAILURE_SIGNAL_HANDLER": "0", "RAY_ENABLE_AUTO_CONNECT": "1"}
"""Ray's own of both, for what a command starts: their logs say where they have failed."""

LOGICAL_CPUS = 128
"""Ray's CPUs only count actors here: engines are bound to cores by their devices."""
OBJECT_STORE_BYTES = 128 * 2**20
"""Ray's own store, through which neither requests nor KV blocks pass."""


def set_environment(run: RunFolder) -> None:
    """Set what Ray and all processes of the run read, whatever the user's environment says."""
    os.environ.update(
        _RAY_ENVIRONMENT | _LONE_ENVIRONMENT | _COMMAND_ENVIRONMENT | run.environment()
    )
    # Ray would take it before the run's own token.
    os.environ.pop("RAY_AUTH_TOKEN", None)


def driver_environment(token_file: str) -> dict[str, str]:
    """What a process has that only joins a cluster, with the cluster's token."""
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": token_file}
    return _RAY_ENVIRONMENT | _COMMAND_ENVIRONMENT | token


def node_environment(run: RunFolder) -> dict[str, str]:
    """The whole environment of a node's processes."""
    theirs = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
    return theirs | kept_node_environment() | run.environment()


def kept_node_environment() -> dict[str, str]:
    """Environment of a kept node's processes beside that of its run."""
    return _RAY_ENVIRONMENT | _NODE_ENVIRONMENT


# Ray would take the one before the cluster's token, and the other for the cluster to join.
_NOT_INHERITED = frozenset({"RAY_AUTH_TOKEN", "RAY_ADDRESS"})
