"""The fleet: which models there should be, and what their replicas last said of themselves.

Plain state without Ray; the controller deployment feeds it and asks it. Everything but the
operator's wishes is rebuilt from the replicas' reports, so a restarted controller knows the fleet
within one report period.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from loomserve.platform.base.errors import Conflict, NotFound, UnknownModel
from loomserve.platform.config import Device, Model
from loomserve.platform.devices.claims import place
from loomserve.platform.fleet.desired_loans import DesiredLoans, DesiredShard, Place, place_of
from loomserve.platform.fleet.lending_pairs import lenders_of
from loomserve.platform.fleet.messages import (
    DesiredState,
    Heartbeat,
    LenderReplica,
    LiveReplica,
    ModelEngines,
    ModelRoute,
    ReplicaRoute,
    ServedEngines,
    model_app,
)
from loomserve.platform.state import (
    DeviceState,
    LendingModelState,
    LendingPairState,
    LendingState,
    LoanState,
    ModelState,
    ModelStatus,
    ReplicaState,
)
from loomserve.platform.state.lending_options import ShardSpec
from loomserve.platform.state.roles import Role

# Four reports missed in a row: the replica is gone or hangs, and must not count as an answer. Less
# would take one for gone whose machine is merely busy, as while three engines start there.
REPORT_EXPIRES_S = 10.0
# So long requests still wait for the only replicas of a model, which may merely be stalled. Serve
# ends those that hang, and what refuses a connection is answered at once.
SILENCE_ENDS_S = 60.0


@dataclass
class _ModelRecord:
    model: Model
    target_replicas: int
    unload_deadline: float | None = None
    failure: str | None = None
    roles: dict[str, Role] = field(default_factory=dict)
    """By device, where an operator has changed it."""


@dataclass
class _ReplicaRecord:
    report: Heartbeat
    seen_at: float
    draining: bool

    @property
    def stops(self) -> bool:
        return self.draining or self.report.stats.draining

    @property
    def host(self) -> str:
        return self.report.address.rpartition(":")[0]


@dataclass(frozen=True)
class EngineRecord:
    """
    Attributes:
        report: The replica's last.
        role: As it is told with its next report.
        lenders: With whom it may keep requests' KV, an operator's switches considered.
        limits: Of these loans, bytes by the lender's model; those without one have none.
        shard_lenders: Replicas that may compute heads or layers of it.
    """

    report: Heartbeat
    role: Role
    lenders: tuple[LenderReplica, ...]
    limits: Mapping[str, int]
    shard_lenders: frozenset[str]


@dataclass
class Fleet:
    """Times are monotonic seconds of the caller's one clock."""

    devices: tuple[Device, ...]
    drain_timeout_s: float
    _models: dict[str, _ModelRecord] = field(default_factory=dict)
    _replicas: dict[str, _ReplicaRecord] = field(default_factory=dict)
    _desired_loans: DesiredLoans = field(default_factory=DesiredLoans)

    @property
    def models(self) -> list[Model]:
        return [record.model for record in self._models.values()]

    def add(self, model: Model, target_replicas: int) -> None:
        """
        Raises:
            Conflict: a model of that name (or of the same application name) is there.
        """
        for name in self._models:
            if model_app(name) == model_app(model.name):
                raise Conflict(f"model {name!r} is already loaded; unload it first", param="name")
        self._models[model.name] = _ModelRecord(model, target_replicas)

    def remove(self, name: str) -> None:
        self._models.pop(name, None)
        for replica_id in [r for r, rec in self._replicas.items() if rec.report.model.name == name]:
            del self._replicas[replica_id]

    def model(self, name: str) -> Model:
        return self._record(name).model

    def set_target(self, name: str, replicas: int) -> None:
        self._record(name).target_replicas = replicas

    def set_failure(self, name: str, failure: str | None) -> None:
        """Why the model's application cannot start, or None; unknown names are ignored."""
        if name in self._models:
            self._models[name].failure = failure

    def begin_unload(self, name: str, deadline: float) -> None:
        """
        Raises:
            Conflict: the model is already being unloaded.
        """
        record = self._record(name)
        if record.unload_deadline is not None:
            raise Conflict(f"model {name!r} is already being unloaded")
        record.unload_deadline = deadline

    def unload_may_finish(self, name: str, now: float) -> bool:
        """True when nothing runs on the model or lies with it, or its deadline has passed."""
        record = self._record(name)
        assert record.unload_deadline is not None
        busy = any(r.report.in_flight or r.report.lent for r in self._live(name, now))
        return not busy or now >= record.unload_deadline

    def set_draining(self, replica_id: str, draining: bool) -> None:
        """
        Raises:
            NotFound: no replica of that id has reported.
        """
        self._replica(replica_id).draining = draining

    def model_of(self, replica_id: str) -> Model:
        """
        Raises:
            NotFound: no replica of that id has reported.
        """
        return self._replica(replica_id).report.model

    def set_role(self, replica_id: str, role: Role) -> None:
        """Also for the replicas that will come after it on its device.

        Raises:
            NotFound: no replica of that id has reported.
        """
        report = self._replica(replica_id).report
        self._record(report.model.name).roles[report.device] = role

    def report(self, report: Heartbeat, now: float) -> DesiredState:
        """Take in a replica's report and tell it what to do."""
        before = self._replicas.get(report.replica_id)
        draining = report.stats.draining if before is None else before.draining
        if before is None:
            self._desired_loans.recover(report)
        else:
            self._desired_loans.observe(before.report, report)
        replica = self._replicas[report.replica_id] = _ReplicaRecord(report, now, draining)
        self._forget_silent(now)
        record = self._models.get(report.model.name)
        if record is None:
            # A restarted controller meets a model that was loaded at run time.
            record = _ModelRecord(report.model, target_replicas=1)
            self._models[report.model.name] = record
        unloading = record.unload_deadline is not None
        role = self._role(record, report)
        return DesiredState(
            draining=draining or unloading,
            stop_timeout_s=self.drain_timeout_s
            if record.unload_deadline is None
            else max(0.0, record.unload_deadline - now),
            role=role,
            peers=self._peers(record, now) if role is Role.DECODE else (),
            lenders=tuple(self._lenders(replica, now)),
            lenders_off=tuple(
                lender
                for lender in lenders_of(report.model, self.models)
                if self._desired_loans.is_off(report.model.name, lender)
            ),
            lender_limits=self._desired_loans.limits(place_of(report)),
            shards=self._desired_loans.shards(place_of(report)),
            drain_loans=tuple(
                loan.name
                for loan in replica.report.loans
                if loan.name in self._desired_loans.draining or self._must_leave(loan, replica)
            ),
            loans=tuple(
                loan.name for loan in self._loans(now) if loan.lender_replica == report.replica_id
            ),
        )

    def set_pair(self, pair: str, enabled: bool) -> None:
        """Let a model borrow from another, or end what it has borrowed; ``borrower/lender``.

        Where it may, it may without the limits that plans have set.

        Raises:
            NotFound: these are no two models of which one may borrow from the other.
        """
        known = {f"{borrower}/{lender}": (borrower, lender) for borrower, lender in self._pairs()}
        if pair not in known:
            names = ", ".join(sorted(known)) or "none"
            raise NotFound(f"there is no pair {pair!r} of borrower/lender; the pairs are: {names}")
        self._desired_loans.switch(*known[pair], enabled)

    def drain_loan(self, name: str, now: float) -> None:
        """
        Raises:
            NotFound: no live replica has borrowed under that name.
        """
        known = {loan.name for loan in self._loans(now)}
        if name not in known:
            names = ", ".join(sorted(known)) or "none"
            raise NotFound(f"there is no loan {name!r}; the loans are: {names}")
        # Those of loans that have ended meanwhile are of no use any more.
        self._desired_loans.draining = self._desired_loans.draining & known | {name}

    def limit_loans(self, replica_id: str, lender: str, most_bytes: int | None) -> None:
        """What a replica may have with a lender's model, also for replicas after it on its device.

        Raises:
            NotFound: no replica of that id has reported.
        """
        self._desired_loans.limit(self._place(replica_id), lender, most_bytes)

    def move_shard(
        self, replica_id: str, lender: str, shard: ShardSpec | None, device: str | None = None
    ) -> None:
        """Heads or layers of a replica that a lender's model is to compute; None: none, any more.

        Args:
            replica_id: whose they are.
            lender: the model.
            shard: of all of the replica's requests.
            device: on which the lender's replica is; None: on whichever suits.

        Raises:
            NotFound: no replica of that id has reported.
        """
        order = DesiredShard(shard, device) if shard else None
        self._desired_loans.move_shard(self._place(replica_id), lender, order)

    def shards(self, replica_id: str) -> dict[str, ShardSpec]:
        """
        Raises:
            NotFound: no replica of that id has reported.
        """
        return self._desired_loans.shards(self._place(replica_id))

    def loan_limits(self, replica_id: str) -> dict[str, int]:
        """
        Raises:
            NotFound: no replica of that id has reported.
        """
        return self._desired_loans.limits(self._place(replica_id))

    def _place(self, replica_id: str) -> Place:
        return place_of(self._replica(replica_id).report)

    def engine_records(self, now: float) -> tuple[EngineRecord, ...]:
        """Live replicas, for those who decide what moves between them."""
        return tuple(
            self._engine_record(replica, now)
            for name in self._models
            for replica in self._live(name, now)
        )

    def engine_record(self, replica_id: str, now: float) -> EngineRecord:
        """
        Raises:
            NotFound: no replica of that id reports.
        """
        replica = self._replicas.get(replica_id)
        if replica is None or now - replica.seen_at >= REPORT_EXPIRES_S:
            raise NotFound(f"replica {replica_id!r} does not report any more")
        return self._engine_record(replica, now)

    def _engine_record(self, replica: _ReplicaRecord, now: float) -> EngineRecord:
        report = replica.report
        return EngineRecord(
            report=report,
            role=self._role(self._record(report.model.name), report),
            lenders=tuple(self._lenders(replica, now)),
            limits=self._desired_loans.limits(place_of(report)),
            shard_lenders=frozenset(
                each.report.replica_id
                for lender in lenders_of(report.model, self.models)
                for each in self._may_lend_to(replica, lender, now)
            ),
        )

    def model_targets(self) -> dict[str, int]:
        """How many replicas there should be of each model that is not being unloaded."""
        return {
            name: record.target_replicas
            for name, record in self._models.items()
            if record.unload_deadline is None
        }

    def lending_state(self, now: float) -> LendingState:
        return LendingState(
            models=tuple(
                LendingModelState(
                    model=model.name,
                    lend_memory=lending.lend_memory,
                    borrow_memory=lending.borrow_memory,
                    tpot_budget=lending.tpot_budget if lending.lend_memory else None,
                )
                for model in self.models
                if (lending := model.lending) is not None
            ),
            pairs=tuple(
                LendingPairState(
                    borrower=borrower,
                    lender=lender,
                    enabled=not self._desired_loans.is_off(borrower, lender),
                    problem=self._problem(borrower, lender, now),
                    limits=self._desired_loans.limits_of_pair(borrower, lender),
                )
                for borrower, lender in self._pairs()
            ),
            loans=tuple(self._loans(now)),
            lent=tuple(
                lent
                for name in self._models
                for replica in self._live(name, now)
                for lent in replica.report.lent
            ),
        )

    def _pairs(self) -> Iterator[tuple[str, str]]:
        for model in self.models:
            for lender in lenders_of(model, self.models):
                yield model.name, lender

    def _loans(self, now: float) -> Iterator[LoanState]:
        for name in self._models:
            for replica in self._live(name, now):
                yield from replica.report.loans

    def _problem(self, borrower: str, lender: str, now: float) -> str | None:
        """Of the first replica that has one."""
        for replica in self._live(borrower, now):
            said = replica.report.borrowing
            if said is not None and lender in said.problems:
                return said.problems[lender]
            if self._desired_loans.limits(place_of(replica.report)).get(lender) == 0:
                return "a plan moved home what lay there, and lets nothing go there"
            if not any(self._may_lend(other, replica) for other in self._live(lender, now)):
                return f"no other device of {replica.report.device}'s node has it ready to lend"
        return None

    def _lenders(self, borrower: _ReplicaRecord, now: float) -> Iterator[LenderReplica]:
        """One replica of each lender's model: that which was ordered, that of the loan there is,
        or the least asked."""
        mine = {loan.lender_replica for loan in borrower.report.loans}
        asked = Counter(loan.lender_replica for loan in self._loans(now))
        name, place = borrower.report.model.name, place_of(borrower.report)
        for lender in lenders_of(borrower.report.model, self.models):
            if lender == name and lender not in self._desired_loans.shards(place):
                continue  # requests are shared out among replicas by their router
            ordered = self._desired_loans.device_of(place, lender)
            best = min(
                self._may_lend_to(borrower, lender, now),
                key=lambda r: (
                    r.report.device != ordered,
                    r.report.replica_id not in mine,
                    asked[r.report.replica_id],
                    r.report.device,
                ),
                default=None,
            )
            if best is not None:
                yield LenderReplica(
                    model=lender, id=best.report.replica_id, address=best.report.address
                )

    def _may_lend_to(
        self, borrower: _ReplicaRecord, lender: str, now: float
    ) -> list[_ReplicaRecord]:
        """Replicas of the lender's model."""
        if self._desired_loans.is_off(borrower.report.model.name, lender):
            return []
        return [each for each in self._live(lender, now) if self._may_lend(each, borrower)]

    def _must_leave(self, loan: LoanState, borrower: _ReplicaRecord) -> bool:
        # One that has not reported yet is unknown to a controller that was started anew.
        lender = self._replicas.get(loan.lender_replica)
        return lender is not None and not self._may_lend(lender, borrower)

    def _may_lend(self, lender: _ReplicaRecord, borrower: _ReplicaRecord) -> bool:
        # On one device, the borrower would wait for a lender whose core it holds.
        return (
            lender.host == borrower.host
            and lender.report.device != borrower.report.device
            and not lender.stops
            and self._record(lender.report.model.name).unload_deadline is None
        )

    def _role(self, record: _ModelRecord, report: Heartbeat) -> Role:
        return record.roles.get(report.device, report.stats.role)

    def _peers(self, record: _ModelRecord, now: float) -> tuple[LiveReplica, ...]:
        return tuple(
            LiveReplica(
                id=replica.report.replica_id,
                address=replica.report.address,
                # As they will be told with their next report.
                stats=replica.report.stats.model_copy(
                    update={
                        "role": self._role(record, replica.report),
                        "draining": replica.stops,
                    }
                ),
            )
            for replica in self._live(record.model.name, now)
        )

    def routes(self, now: float) -> tuple[ModelRoute, ...]:
        return tuple(
            ModelRoute(
                name=name,
                app=model_app(name),
                status=self._status(record, now)[0],
                policy=record.model.router.policy,
                max_concurrent_requests=record.model.max_concurrent_requests,
                max_model_len=self._max_model_len(name, now),
                kvstore=record.model.kvstore,
                predictor=record.model.lengths.predictor if record.model.lengths else None,
                replicas=tuple(
                    ReplicaRoute(
                        id=r.report.replica_id, device=r.report.device, address=r.report.address
                    )
                    for r in self._reachable(name, now)
                ),
            )
            for name, record in self._models.items()
        )

    def engines(self, now: float) -> ServedEngines:
        return ServedEngines(
            models={
                name: ModelEngines(
                    max_model_len=self._max_model_len(name, now),
                    predictor=lengths.predictor if (lengths := record.model.lengths) else None,
                    replicas=() if record.unload_deadline else self._peers(record, now),
                )
                for name, record in self._models.items()
            }
        )

    def model_states(self, now: float) -> tuple[ModelState, ...]:
        return tuple(self._model_state(name, record, now) for name, record in self._models.items())

    def device_states(self, now: float) -> tuple[DeviceState, ...]:
        on_device: Mapping[str, set[str]] = {device.name: set() for device in self.devices}
        for name in self._models:
            for replica in self._live(name, now):
                report = replica.report
                for used in [stage.device for stage in report.stages] or [report.device]:
                    on_device[used].add(name)
        return tuple(
            DeviceState(
                name=device.name,
                kind=device.kind,
                place=place(device),
                models=tuple(sorted(on_device[device.name])),
            )
            for device in self.devices
        )

    def _record(self, name: str) -> _ModelRecord:
        if name not in self._models:
            raise UnknownModel(unknown_model_message(name, self._models))
        return self._models[name]

    def _replica(self, replica_id: str) -> _ReplicaRecord:
        if replica_id not in self._replicas:
            known = ", ".join(sorted(self._replicas)) or "none"
            raise NotFound(f"there is no replica {replica_id!r}; the replicas are: {known}")
        return self._replicas[replica_id]

    def _live(self, name: str, now: float) -> list[_ReplicaRecord]:
        return [
            record
            for record in self._replicas.values()
            if record.report.model.name == name and now - record.seen_at < REPORT_EXPIRES_S
        ]

    def _reachable(self, name: str, now: float) -> list[_ReplicaRecord]:
        """Those that are heard of, else those that were until lately."""
        return self._live(name, now) or [
            record
            for record in self._replicas.values()
            if record.report.model.name == name and now - record.seen_at < SILENCE_ENDS_S
        ]

    def _forget_silent(self, now: float) -> None:
        self._replicas = {
            replica_id: record
            for replica_id, record in self._replicas.items()
            if now - record.seen_at < SILENCE_ENDS_S
        }

    def _max_model_len(self, name: str, now: float) -> int | None:
        return next((r.report.max_model_len for r in self._reachable(name, now)), None)

    def _status(self, record: _ModelRecord, now: float) -> tuple[ModelStatus, str]:
        live = len(self._live(record.model.name, now))
        if record.unload_deadline is not None:
            return ModelStatus.UNLOADING, "finishes its running requests"
        if live >= record.target_replicas:
            return ModelStatus.READY, ""
        if live:
            return ModelStatus.DEGRADED, f"{live} of {record.target_replicas} replicas answer"
        if record.failure is not None:
            return ModelStatus.FAILED, record.failure
        if silent := self._reachable(record.model.name, now):
            silence_s = now - max(replica.seen_at for replica in silent)
            return ModelStatus.LOADING, (
                f"nothing was heard of its replicas for {silence_s:.0f} s: they stall, or start "
                "anew; requests wait for them"
            )
        return ModelStatus.LOADING, "its engine is starting"

    def _model_state(self, name: str, record: _ModelRecord, now: float) -> ModelState:
        status, message = self._status(record, now)
        return ModelState(
            name=name,
            source=record.model.source,
            status=status,
            message=message,
            target_replicas=record.target_replicas,
            router=record.model.router.policy,
            max_model_len=self._max_model_len(name, now),
            replicas=tuple(
                ReplicaState(
                    id=r.report.replica_id,
                    device=r.report.device,
                    stages=r.report.stages,
                    address=r.report.address,
                    pid=r.report.pid,
                    draining=r.stops,
                    role=self._role(record, r.report),
                    in_flight=r.report.in_flight,
                    load=r.report.stats.load,
                    borrowing=r.report.borrowing,
                )
                for r in sorted(self._live(name, now), key=lambda r: r.report.device)
            ),
        )


def unknown_model_message(name: str, known: Iterable[str]) -> str:
    names = ", ".join(sorted(known)) or "none is loaded"
    return f"The model {name!r} does not exist here. Models: {names}."
