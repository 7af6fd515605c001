"""What a client is told whose request could not go on."""

from __future__ import annotations

from http import HTTPStatus

from vllm.exceptions import GracefulHTTPError

from loomserve.platform.base.errors import (
    ENGINE_STALLED,
    QUERY_OF_DEATH,
    EngineGone,
    RequestError,
)
from loomserve.platform.front_end.policy.continuation import Fate
from loomserve.platform.http.engine_errors import no_replica


class LostRequestError(GracefulHTTPError):  # type: ignore[misc]
    """An error of the platform's in the shape in which vLLM's serving layer takes one.

    Attributes:
        error: the platform's own.
    """

    def __init__(self, error: RequestError) -> None:
        super().__init__(error.message, HTTPStatus(error.status))
        self.error = error


def lost_request(fate: Fate, model: str, request_id: str) -> LostRequestError:
    """The error of a request that ends so."""
    if fate is Fate.END_SUSPECT:
        return LostRequestError(
            EngineGone(
                f"engines of model {model!r} ended while they worked on this very request, so no "
                "other is asked. Change the request, or give the operator its id, "
                f"{request_id}",
                reason=QUERY_OF_DEATH,
            )
        )
    if fate is Fate.END_STALLED:
        return LostRequestError(
            EngineGone(
                f"engines of model {model!r} stood still while they worked on this very request, "
                "so no other is asked. Change the request, or give the operator its id, "
                f"{request_id}",
                reason=ENGINE_STALLED,
            )
        )
    if fate is Fate.END_TOO_OFTEN:
        return LostRequestError(
            EngineGone(
                f"the engines of model {model!r} ended again and again while they worked on this "
                f"request; send it again. If that happens again, give the operator its id, "
                f"{request_id}"
            )
        )
    if fate is Fate.END_RETURNED:
        return LostRequestError(
            EngineGone(
                f"the engine of model {model!r} ended while it worked on this request; send it "
                f"again. If that happens again, give the operator its id, {request_id}"
            )
        )
    return LostRequestError(no_replica(model))
