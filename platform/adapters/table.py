"""Adapters of the configuration, as operators have changed them since."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pydantic import BaseModel, ConfigDict, Field

from loomserve.platform.adapters.messages import Adapter
from loomserve.platform.base.errors import Conflict, NotFound
from loomserve.platform.config import Model

# Of a replaced adapter, requests that have begun go on: an engine has room for as many again.
ROOM = 2


class AdapterWish(BaseModel):
    """An adapter as it is kept for the next controller."""

    model_config = ConfigDict(frozen=True)

    adapter: Adapter
    leaves_at: float | None = Field(
        None, description="It leaves, with what it has, by then, in monotonic seconds; None: no."
    )


def no_such_adapter(model: str, name: str, known: Iterable[str]) -> NotFound:
    names = ", ".join(known) or "none"
    return NotFound(
        f"model {model!r} has no adapter {name!r}; its adapters are: {names}", param="name"
    )


class AdapterTable:
    """All adapters; times are monotonic seconds of the caller's one clock.

    An adapter with other weights is another one with another number, also under the same name. The
    one before *leaves*: no new request gets it, and engines keep it for ``leave_s``, for the
    requests that they are answering.
    """

    def __init__(self, leave_s: float) -> None:
        self._leave_s = leave_s
        self._adapters: dict[str, Adapter] = {}
        self._tried: Adapter | None = None
        self._leaving: dict[int, tuple[Adapter, float]] = {}
        self._problems: dict[tuple[str, str], tuple[str, str]] = {}
        self._last_id = 0

    def __contains__(self, name: str) -> bool:
        return name in self._adapters

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._adapters))

    def of(self, model: str) -> tuple[Adapter, ...]:
        """Adapters of a model that clients may ask for, by name."""
        return tuple(one for _, one in sorted(self._adapters.items()) if one.model == model)

    def wanted(self, model: str, now: float) -> tuple[Adapter, ...]:
        """Adapters that a replica of the model loads: also one that is tried, or leaves."""
        tried = (self._tried,) if self._tried is not None and self._tried.model == model else ()
        return (*self.of(model), *tried, *self.leaving(model, now))

    def leaving(self, model: str, now: float) -> tuple[Adapter, ...]:
        """Adapters of a model that only go on with the requests that they have."""
        self._leaving = {n: (one, at) for n, (one, at) in self._leaving.items() if now < at}
        return tuple(one for one, _ in self._leaving.values() if one.model == model)

    def problems(self, model: str) -> dict[str, tuple[str, str]]:
        """Adapters of the configuration that the model could not get: sources, and why."""
        return {name: said for (of, name), said in self._problems.items() if of == model}

    def note_problem(self, model: str, name: str, source: str, problem: str) -> None:
        self._problems[model, name] = source, problem

    def check(self, model: Model, name: str, taken: Mapping[str, str], now: float) -> None:
        """Check that a model may get an adapter of this name. ``taken`` maps other names that
        clients ask for to what has each. Raises Conflict if another has the name, or the model
        takes no adapters, or no more of them."""
        if model.adapters is None:
            raise Conflict(
                f"model {model.name!r} takes no adapters: write models[].adapters into the "
                "configuration and start again, or load the model with adapters",
                param="model",
            )
        other = self._adapters.get(name)
        if other is not None and other.model != model.name:
            raise Conflict(
                f"an adapter of model {other.model!r} is named {name!r} already; give it another "
                "name",
                param="name",
            )
        if name in taken:
            raise Conflict(
                f"{taken[name]} is named {name!r} already; give the adapter another name",
                param="name",
            )
        most = model.adapters.max_cpu_loras
        if other is None and len(self.of(model.name)) >= most:
            raise Conflict(
                f"model {model.name!r} has {most} adapters, as many as its adapters.max_cpu_loras "
                "allows: unload one first",
                param="name",
            )
        if len(self.wanted(model.name, now)) >= ROOM * most:
            raise Conflict(
                f"engines of model {model.name!r} still have adapters that were replaced or "
                "unloaded lately, for requests that they answer: try again shortly",
                param="name",
            )

    def try_out(self, model: str, name: str, source: str, digest: str, rank: int) -> Adapter | None:
        """An adapter that engines are to be given first; None: the model has the very same. It is
        either :meth:`put` or :meth:`give_up` afterwards."""
        before = self._adapters.get(name)
        if before is not None and before.digest == digest:
            self._adapters[name] = before.model_copy(update={"source": source})
            return None
        self._last_id += 1
        self._tried = Adapter(
            name=name, model=model, id=self._last_id, digest=digest, source=source, rank=rank
        )
        return self._tried

    def put(self, adapter: Adapter, now: float) -> None:
        """Have clients get it from now on; one that had its name leaves."""
        self._tried = None
        if adapter.name in self._adapters:
            self._leave(adapter.name, now)
        self._adapters[adapter.name] = adapter
        self._problems.pop((adapter.model, adapter.name), None)

    def give_up(self) -> None:
        self._tried = None

    def delete(self, model: str, name: str, now: float) -> None:
        """Unload an adapter; raises ``NotFound`` if the model has no such."""
        adapter = self._adapters.get(name)
        if adapter is None or adapter.model != model:
            raise no_such_adapter(model, name, [one.name for one in self.of(model)])
        self._leave(name, now)

    def check_free(self, names: Iterable[str]) -> None:
        """Raises ``Conflict`` if an adapter has one of these names."""
        for name in names:
            if name in self._adapters:
                raise Conflict(
                    f"{name!r} is an adapter of model {self._adapters[name].model!r}; unload it "
                    "first, or choose another name",
                    param="name",
                )

    def forget(self, model: str) -> None:
        self._adapters = {name: one for name, one in self._adapters.items() if one.model != model}
        self._leaving = {
            n: (one, at) for n, (one, at) in self._leaving.items() if one.model != model
        }
        self._problems = {key: said for key, said in self._problems.items() if key[0] != model}

    @property
    def wishes(self) -> tuple[AdapterWish, ...]:
        """All that the next controller has to know."""
        stay = [AdapterWish(adapter=one) for one in self._adapters.values()]
        leave = [AdapterWish(adapter=one, leaves_at=at) for one, at in self._leaving.values()]
        return (*stay, *leave)

    @property
    def last_id(self) -> int:
        return self._last_id

    def restore(self, wishes: Iterable[AdapterWish], last_id: int) -> None:
        """Take over what an earlier controller had; numbers go on after its last."""
        self._last_id = last_id
        for wish in wishes:
            if wish.leaves_at is None:
                self._adapters[wish.adapter.name] = wish.adapter
            else:
                self._leaving[wish.adapter.id] = wish.adapter, wish.leaves_at

    def _leave(self, name: str, now: float) -> None:
        adapter = self._adapters.pop(name)
        self._leaving[adapter.id] = adapter, now + self._leave_s
