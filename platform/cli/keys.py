"""``loomserve key``: makes keys and tokens, and keeps the file of API keys."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
import yaml
from rich.text import Text

from loomserve.platform import config as configuration
from loomserve.platform.access.keys import hash_key, new_key
from loomserve.platform.access.live_keys import read_keys, with_absolute_path
from loomserve.platform.base.errors import ConfigError, StartError
from loomserve.platform.base.files import replace_private
from loomserve.platform.cli.tables import display, table
from loomserve.platform.config import ApiKey

keys = typer.Typer(no_args_is_help=True, help="API keys and admin tokens.")

_HEAD = "# API keys. `loomserve key` writes this file anew; comments in it are lost.\n"

Name = Annotated[str, typer.Argument(help="Who will use it.")]
ConfigPath = Annotated[Path, typer.Argument(help="The configuration file.")]


@keys.command()
def create(
    name: Name,
    add: Annotated[
        Path | None,
        typer.Option(help="Configuration, to whose server.api_keys_file the key is added."),
    ] = None,
) -> None:
    """Make an API key or admin token; only its hash goes into the configuration."""
    key, digest = new_key()
    if add is not None:
        file = _KeysOf(add)
        file.refuse_known(name)
        file.write([*file.keys, file.checked({"name": name, "hash": digest})])
    _show(key)
    if add is None:
        print(f"for the configuration: {{name: {name}, hash: {hash_key(key)!r}}}")


@keys.command("list")
def list_keys(path: ConfigPath) -> None:
    """Show the API keys of a configuration and its keys file: what they may, and no secrets."""
    config = configuration.load(path)
    rows = (
        {
            "KEY": key.name,
            "MODELS": ", ".join(key.models) or "all",
            "LIMITS": ", ".join(_limits(key)) or "-",
            "EXPIRES": key.expires_at.isoformat(" ", "minutes") if key.expires_at else "-",
            "WHERE": "configuration" if key in config.server.api_keys else "keys file",
        }
        for key in read_keys(with_absolute_path(config.server, path.parent))
    )
    display(table(None, rows) or Text("no API keys"))


@keys.command()
def revoke(name: Name, path: ConfigPath) -> None:
    """Take a key out of the keys file: a running platform refuses it within a second."""
    file = _KeysOf(path)
    key = file.find(name)
    file.write([each for each in file.keys if each is not key])
    typer.echo(f"{name} is revoked; answers that have begun go on to their end")


@keys.command()
def rotate(
    name: Name,
    path: ConfigPath,
    finish: Annotated[bool, typer.Option(help="Refuse the former key from now on.")] = False,
) -> None:
    """Make a second key for NAME, as good as the first; with --finish, drop the first."""
    file = _KeysOf(path)
    key = file.find(name)
    if finish:
        if key.next_hash is None:
            raise StartError(f"{name} has one key only: call this without --finish first")
        changed = key.model_copy(update={"hash": key.next_hash, "next_hash": None})
    elif key.next_hash is not None:
        raise StartError(f"{name} has two keys already: call this with --finish first")
    else:
        secret, digest = new_key()
        changed = key.model_copy(update={"next_hash": digest})
    file.write([changed if each is key else each for each in file.keys])
    if finish:
        typer.echo(f"the former key of {name} is refused")
    else:
        _show(secret)


class _KeysOf:
    """The keys file of a configuration, to be changed; raises ConfigError if it is wrong."""

    def __init__(self, path: Path) -> None:
        config = configuration.load(path)
        server = with_absolute_path(config.server, path.parent)
        if server.api_keys_file is None:
            raise ConfigError(
                f"{path}: server.api_keys_file: names no file, so keys change with the "
                "configuration and a restart only: set it, for instance to keys.yaml"
            )
        self._path = Path(server.api_keys_file)
        self._configured = server.api_keys
        self.keys: tuple[ApiKey, ...] = ()
        if self._path.exists():
            self.keys = read_keys(server)[len(server.api_keys) :]

    def refuse_known(self, name: str) -> None:
        for key in (*self._configured, *self.keys):
            if key.name == name:
                raise StartError(f"there is a key {name!r} already: choose another name")

    def find(self, name: str) -> ApiKey:
        for key in self.keys:
            if key.name == name:
                return key
        if any(key.name == name for key in self._configured):
            raise StartError(
                f"the key {name!r} stands in the configuration itself: change it there and start "
                "anew; only those of server.api_keys_file change while the platform runs"
            )
        there = ", ".join(key.name for key in self.keys) or "none"
        raise StartError(f"{self._path} has no key {name!r}; it has: {there}")

    def checked(self, entry: dict[str, str]) -> ApiKey:
        try:
            return ApiKey.model_validate(entry)
        except ValueError:
            raise StartError(
                f"{entry['name']!r} is no name of a key: use up to 63 letters, digits, dots, "
                "underscores and hyphens"
            ) from None

    def write(self, keys: list[ApiKey]) -> None:
        shown = [key.model_dump(mode="json", exclude_defaults=True) for key in keys]
        try:
            replace_private(
                self._path, _HEAD + yaml.safe_dump({"api_keys": shown}, sort_keys=False)
            )
        except OSError as error:
            raise StartError(f"{self._path} cannot be written ({error.strerror})") from None


def _limits(key: ApiKey) -> Iterator[str]:
    for value, what in (
        (key.requests_per_minute, "requests a minute"),
        (key.max_concurrent, "at once"),
        (key.tokens_per_minute, "tokens a minute"),
        (key.tokens_per_day, "tokens a day"),
    ):
        if value is not None:
            yield f"{value} {what}"


def _show(key: str) -> None:
    print(f"key (shown once, keep it safe): {key}")
