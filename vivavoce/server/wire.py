"""What the Realtime and the HTTP protocol share: the error object, and the name of JSON that has no type."""

from typing import Any, TypeAlias

from msgspec import UNSET, Struct, UnsetType

from vivavoce.errors import VivaError

JsonObject: TypeAlias = dict[str, Any]
"""A JSON object that the server passes on without reading it: the JSON schema of a tool, the messages of a chat model,
a session object with the extra fields of the beta protocol. Every object that the server reads has a class instead."""


class ErrorDetail(Struct, kw_only=True):
    """The error object of the protocol, in events and in HTTP responses."""

    type: str
    code: str | None = None
    message: str
    param: str | UnsetType | None = UNSET
    event_id: str | UnsetType | None = UNSET


class ErrorBody(Struct):
    """The body of an HTTP error response."""

    error: ErrorDetail


class WireError(VivaError):
    """A refused event or request: an `error` event on a socket, an error response over HTTP. The session continues."""

    def __init__(
        self,
        message: str,
        code: str | None = "invalid_value",
        param: str | None = None,
        status: int = 400,
        kind: str = "invalid_request_error",
        event_id: str | None = None,
    ) -> None:
        super().__init__(message)
        self.code, self.param, self.status, self.kind, self.event_id = code, param, status, kind, event_id

    def detail(self, event_id: str | None = None) -> ErrorDetail:
        """The protocol's error object; `event_id` is that of the client event at fault."""
        return ErrorDetail(
            type=self.kind,
            code=self.code,
            message=str(self),
            param=self.param,
            event_id=UNSET if event_id is None else event_id,
        )
