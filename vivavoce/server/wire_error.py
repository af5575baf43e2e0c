"""What a client did wrong, as the protocol says it."""

from typing import Any

from vivavoce.errors import VivaError


class WireError(VivaError):
    """Becomes an `error` event on a socket and an error body over HTTP; the session goes on."""

    def __init__(
        self,
        message: str,
        code: str = "invalid_value",
        param: str | None = None,
        status: int = 400,
        kind: str = "invalid_request_error",
        event_id: str | None = None,
    ) -> None:
        super().__init__(message)
        self.code, self.param, self.status, self.kind, self.event_id = code, param, status, kind, event_id

    def as_error(self, event_id: str | None = None) -> dict[str, Any]:
        """The protocol's error object."""
        fields = {"type": self.kind, "code": self.code, "message": str(self), "param": self.param}
        return fields if event_id is None else fields | {"event_id": event_id}
