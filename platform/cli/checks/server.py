"""The server as ``loomserve serve`` prepares it, warns of it and asks it on this machine."""

from __future__ import annotations

import ssl
import time
from collections.abc import Iterator
from pathlib import Path

from loomserve.platform.access.live_keys import read_keys, with_absolute_path
from loomserve.platform.base.descriptors import connections_that_fit, limit
from loomserve.platform.base.errors import StartError
from loomserve.platform.config import Config, Server
from loomserve.platform.devices.shortage import has_room, memory_bounds, threshold, used_share
from loomserve.platform.http import tls
from loomserve.platform.http.audit_log import audit_log_path, check_audit_log
from loomserve.platform.usage.files import check_usage_folder, usage_folder_path

_DAY_S = 24 * 3600
_EXPIRES_SOON_S = 14 * _DAY_S
_FEWEST_CONNECTIONS = 16
_FEWEST_DESCRIPTORS = 256


def with_absolute_files(config: Config, base: Path) -> Config:
    """The configuration with the server's files found from anywhere; ``base`` is its folder. Raises
    ConfigError if the keys file is wrong; StartError if clients could not connect with the
    certificate, or the audit log or usage cannot be written."""
    server = config.server
    audit_log = audit_log_path(server, base)
    check_audit_log(audit_log)
    usage = usage_folder_path(server, base)
    check_usage_folder(usage)
    pair = tls.beside(server.tls, base) if server.tls is not None else None
    if pair is not None:
        tls.load(pair)
    server = with_absolute_path(server, base)
    read_keys(server)
    kept = server.usage.model_copy(update={"folder": str(usage)})
    server = server.model_copy(update={"audit_log": str(audit_log), "tls": pair, "usage": kept})
    return config.model_copy(update={"server": server})


def warnings(server: Server) -> Iterator[str]:
    """What an operator should know of the server before it starts, a line each."""
    if server.tls is not None:
        left_s = tls.expires_at(server.tls) - time.time()
        if left_s < _EXPIRES_SOON_S:
            yield (
                f"warning: the certificate {server.tls.certificate} expires in "
                f"{left_s / _DAY_S:.0f} days; put a new one in its place, a restart is not needed"
            )
    elif not server.is_loopback:
        yield (
            f"warning: {server.host} is served without TLS, so keys and prompts can be read on "
            "the way: set server.tls, unless a proxy before it does so (docs/tls.md)"
        )


def sizes(config: Config) -> Iterator[str]:
    """What an operator should know of sizes that do not suit each other, a line each."""
    store = config.kvstore
    if store is not None and store.ssd is not None and store.ssd < 2 * store.memory:
        yield (
            "warning: kvstore.ssd is less than twice kvstore.memory: half of it is for blocks that "
            "are still in memory, so it adds little; give it more, or leave it out"
        )
    if not has_room(bounds := memory_bounds(), 0):
        yield (
            f"warning: memory is short, of which {used_share(bounds):.0%} are used: engines wait "
            f"until it is {threshold():.0%} at most (docs/operate.md)"
        )


def descriptors(server: Server) -> Iterator[str]:
    """What an operator should know of connections, a line each; StartError: too few fit."""
    fit = connections_that_fit(server.max_connections, len(server.ports))
    if fit < min(server.max_connections, _FEWEST_CONNECTIONS):
        raise StartError(
            f"a process may have {limit()} file descriptors here, too few for a gateway and its "
            "clients: allow more (ulimit -Hn; LimitNOFILE= of a service), at least "
            f"{_FEWEST_DESCRIPTORS}"
        )
    if fit < server.max_connections:
        yield (
            f"warning: a process may have {limit()} file descriptors here, so that there is room "
            f"for {fit} connections instead of server.max_connections, {server.max_connections}: "
            "allow more (ulimit -Hn; LimitNOFILE= of a service), or set it lower"
        )


def tenancy(config: Config) -> Iterator[str]:
    """What an operator should know of what API keys share, a line each."""
    if config.isolates_tenants:
        yield (
            "API keys share no KV blocks, so that none can tell what another asked; kvstore: "
            "{isolate_tenants: false} lets them"
        )
    elif len(config.server.api_keys) > 1 or config.server.api_keys_file:
        yield (
            "warning: API keys share KV blocks, so response times tell one what another asked: "
            "leave kvstore.isolate_tenants out, if they do not trust each other"
        )


def url_of(server: Server, port: int | None = None) -> str:
    """URL at which this machine reaches the server; ``port`` is that of clients without one."""
    host = server.host
    if host in {"0.0.0.0", "::"}:
        host = "127.0.0.1"
    scheme = "http" if server.tls is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port or server.port}"


def trust_of(server: Server) -> ssl.SSLContext | None:
    """What this machine trusts the server at :func:`url_of` by; None: it speaks HTTP."""
    return tls.trust_in(Path(server.tls.certificate)) if server.tls is not None else None
