"""Which answer an error becomes: the one table of statuses."""

from __future__ import annotations

from m3compile.errors import InputError, M3CompileError, RequestError, ServiceError, TooLargeError

# By kind, the first that fits; told in docs/serving.md.
_STATUSES: tuple[tuple[type[M3CompileError], int], ...] = (
    (TooLargeError, 413),
    (InputError, 400),
    (RequestError, 400),
    (M3CompileError, 500),
)
# How soon a refused client should come back, where nothing better is known.
RETRY_AFTER_S = 1


class Refused(ServiceError):
    """A request that the server does not serve now, or not in this form.

    Attributes:
        kind: what the answer calls it.
        status: of HTTP.
    """

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind

    def __reduce__(self) -> tuple[type[Refused], tuple[int, str, str]]:
        return Refused, (self.status, self.kind, str(self))

    @property
    def may_be_retried(self) -> bool:
        return self.status in (429, 503)

    @classmethod
    def draining(cls) -> Refused:
        return cls(503, "Draining", "the server is stopping; send the request to another one")

    @classmethod
    def full(cls, limit: int) -> Refused:
        return cls(429, "QueueFull", f"{limit} requests are waiting, as many as may; retry later")

    @classmethod
    def late(cls, seconds: float) -> Refused:
        return cls(
            504, "Timeout", f"not answered within {seconds:g} s; retry, or send less at once"
        )

    @classmethod
    def media_type(cls, found: str, allowed: str) -> Refused:
        shown = found or "missing"
        return cls(415, "MediaType", f"the content type is {shown}; allowed: {allowed}")


def status_of(error: M3CompileError) -> int:
    if isinstance(error, Refused):
        return error.status
    return next(status for kind, status in _STATUSES if isinstance(error, kind))


def kind_of(error: M3CompileError) -> str:
    return error.kind if isinstance(error, Refused) else type(error).__name__


def check_size(what: str, found: int, allowed: int) -> None:
    """Raises: TooLargeError: more than allowed."""
    if found > allowed:
        raise TooLargeError(f"the request has {found} {what}; allowed: at most {allowed}")
