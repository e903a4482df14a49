"""Every error that crosses a boundary, with its code, HTTP status and whether a retry can help.

    RollArtError
    ├── Invalid                 422  a field is wrong; names the field and the fix
    │   └── UnknownPlugin       422  a name that is in no table
    ├── Unauthorized            401
    ├── NotFound                404
    ├── Conflict                409
    │   └── LeaseLost           409  another owner holds the lease now
    ├── CapacityReached         429  retryable
    ├── Unavailable             503  retryable: broker, state or a worker is away
    │   └── NoWorker            503  retryable: no live worker for a device class
    ├── DeadlineExceeded        504  retryable
    ├── StorageFull             507  no room for results; names the folder
    └── Internal                500
        ├── EventsLost          500  an offset jumped over events we never read
        ├── WeightsInvalid      500  a checksum, name or shape of published weights is wrong
        └── ConservationViolated 500 groups issued are not trained + dropped + in flight

`code` is the wire name. `from_problem` turns a response body back into the same class, so an error
survives an HTTP round trip. To add one: subclass, set the three class attributes, draw it above.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import BaseModel, ConfigDict


class FieldProblem(BaseModel):
    """One wrong field of an input."""

    model_config = ConfigDict(extra="forbid")
    field: str
    """Dotted path, as the user wrote it: `training.learning_rate`."""
    message: str
    """What is wrong and what would be right."""


class ProblemDetail(BaseModel):
    """The inside of an error body."""

    code: str
    message: str
    retryable: bool = False
    fields: list[FieldProblem] = []


class Problem(BaseModel):
    """The body of every error response of every service."""

    error: ProblemDetail


class RollArtError(Exception):
    """Root of all errors that have a meaning outside the function that raised them."""

    code: ClassVar[str] = "internal"
    status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, fields: list[FieldProblem] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.fields = fields or []

    def to_problem(self) -> Problem:
        """The wire form."""
        return Problem(
            error=ProblemDetail(
                code=self.code, message=self.message, retryable=self.retryable, fields=self.fields
            )
        )


class Invalid(RollArtError):
    """Input that cannot be accepted; `fields` names each wrong one."""

    code = "invalid"
    status = 422


class UnknownPlugin(Invalid):
    """A plug-in name that is neither in its table nor an importable `package.module:Class`."""

    code = "unknown_plugin"


class Unauthorized(RollArtError):
    """No bearer key, or a wrong one."""

    code = "unauthorized"
    status = 401


class NotFound(RollArtError):
    """No such run, task or trajectory."""

    code = "not_found"
    status = 404


class Conflict(RollArtError):
    """The request contradicts what exists."""

    code = "conflict"
    status = 409


class LeaseLost(Conflict):
    """A lease was taken over; whoever raises this must stop writing."""

    code = "lease_lost"


class CapacityReached(RollArtError):
    """Too much is in flight; try again after a while."""

    code = "capacity_reached"
    status = 429
    retryable = True


class Unavailable(RollArtError):
    """Something this needs is away right now."""

    code = "unavailable"
    status = 503
    retryable = True


class NoWorker(Unavailable):
    """No live worker serves the device class, nor a compatible one."""

    code = "no_worker"


class DeadlineExceeded(RollArtError):
    """The deadline of a turn or a trajectory passed."""

    code = "deadline_exceeded"
    status = 504
    retryable = True


class StorageFull(RollArtError):
    """No room on disk for what was asked."""

    code = "storage_full"
    status = 507


class Internal(RollArtError):
    """A fault of ours."""


class EventsLost(Internal):
    """The broker dropped events that were never read."""

    code = "events_lost"


class WeightsInvalid(Internal):
    """Published weights fail their manifest."""

    code = "weights_invalid"


class ConservationViolated(Internal):
    """Groups issued ≠ trained + dropped + in flight."""

    code = "conservation_violated"


def _all_errors(root: type[RollArtError]) -> dict[str, type[RollArtError]]:
    # A subclass that inherits its code is a detail of whoever raises it: on the wire it is its parent.
    found = {root.code: root} if "code" in vars(root) else {}
    for sub in root.__subclasses__():
        found.update(_all_errors(sub))
    return found


def from_problem(problem: Problem) -> RollArtError:
    """The error a service raised, rebuilt from its response body."""
    kind = _all_errors(RollArtError).get(problem.error.code, RollArtError)
    return kind(problem.error.message, fields=problem.error.fields)
