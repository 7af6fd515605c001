"""The aliases that there are: those of the configuration, as operators have changed them since."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from loomserve.platform.base.errors import BadRequest, Conflict, NotFound
from loomserve.platform.config import Alias, Config, FieldError, check_alias
from loomserve.platform.state import AliasState


def no_such_alias(name: str, aliases: Iterable[str]) -> NotFound:
    known = ", ".join(aliases) or "none"
    return NotFound(f"there is no alias {name!r}; the aliases are: {known}", param="name")


class AliasTable:
    def __init__(
        self,
        configured: Mapping[str, Alias],
        *,
        models: Collection[str] = (),
        batch_only: Collection[str] = (),
    ) -> None:
        """``models``: configured names, loaded or not; ``batch_only``: offline models."""
        self._aliases = dict(configured)
        self._configured = frozenset(models)
        self._batch_only = frozenset(batch_only)

    @classmethod
    def of(cls, config: Config) -> AliasTable:
        return cls(
            config.aliases,
            models=[model.name for model in config.models],
            batch_only=[model.name for model in config.offline_models],
        )

    def __contains__(self, name: str) -> bool:
        return name in self._aliases

    def __iter__(self) -> Iterator[str]:
        return iter(self._aliases)

    @property
    def all(self) -> dict[str, Alias]:
        return dict(sorted(self._aliases.items()))

    @property
    def states(self) -> tuple[AliasState, ...]:
        return tuple(
            AliasState(name=name, models=alias.models, sticky=alias.sticky)
            for name, alias in self.all.items()
        )

    def put(self, name: str, alias: Alias, loaded: Collection[str]) -> None:
        """Make or change an alias; raises Conflict for a model's name, else BadRequest."""
        if name in {*self._configured, *self._batch_only, *loaded}:
            raise Conflict(
                f"a model is named {name!r} already; give the alias another name", param="name"
            )
        kept = self._aliases[name].models if name in self._aliases else ()
        # What it has stood for may be unloaded just now, and come back.
        models = {*loaded, *self._configured, *kept}
        try:
            check_alias(
                name, alias, models=models, batch_only=self._batch_only, aliases={*self, name}
            )
        except FieldError as error:
            raise BadRequest(str(error), param=".".join(map(str, error.field)) or "name") from None
        self._aliases[name] = alias

    def delete(self, name: str) -> None:
        """Raises NotFound if there is no such alias."""
        if name not in self._aliases:
            raise no_such_alias(name, sorted(self._aliases))
        del self._aliases[name]

    def check_model_name(self, name: str) -> None:
        """Raises Conflict if an alias has the name."""
        if name in self._aliases:
            raise Conflict(
                f"{name!r} is an alias; delete it first, or give the model another name",
                param="name",
            )

    def restore(self, aliases: Mapping[str, Alias]) -> None:
        self._aliases = dict(aliases)
