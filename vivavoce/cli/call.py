"""`viva call`: let a running server place a telephone call, and follow it to its end."""

import http.client
import json
import time
import urllib.error
import urllib.request
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from vivavoce.cli.options import Json, print_json
from vivavoce.errors import InputError, UnreachableEndpointError

LOOK_SECONDS = 0.3
REQUEST_SECONDS = 30.0


def call(
    target: Annotated[str, typer.Argument(help="sip:user@host or tel:+number, within the server's --sip-dial.")],
    url: Annotated[str, typer.Option(help="The server.")] = "http://127.0.0.1:8000",
    api_key: Annotated[str | None, typer.Option(envvar="VIVA_API_KEY", help="The server's key.")] = None,
    instructions: Annotated[str | None, typer.Option(help="What the model is told to be.")] = None,
    voice: Annotated[str | None, typer.Option(help="The voice of the replies.")] = None,
    keys: Annotated[str, typer.Option(help="Telephone keys that are pressed once the call is answered.")] = "",
    ring_seconds: Annotated[float, typer.Option(min=1, max=300, help="How long it rings at most.")] = 45.0,
    max_seconds: Annotated[float | None, typer.Option(min=1, help="How long the call lasts at most.")] = None,
    answering_machine: Annotated[
        str, typer.Option(help="report, hang_up, leave_message (after the beep) or ignore.")
    ] = "report",
    as_json: Json = False,
) -> None:
    """Call someone through a running `viva serve --sip … --sip-dial …`. Ctrl-C hangs up."""
    session: dict[str, Any] = {"type": "realtime"}
    if instructions is not None:
        session["instructions"] = instructions
    if voice is not None:
        session["audio"] = {"output": {"voice": voice}}
    body = {
        "target_uri": target,
        "session": session,
        "dtmf": keys,
        "ringing_timeout": ring_seconds,
        "answering_machine": answering_machine,
    }
    if max_seconds is not None:
        body["max_call_duration"] = max_seconds
    api = CallsClient(url, api_key)
    found = api.request("POST", "/v1/realtime/calls/dial", body)
    console = Console(stderr=as_json, highlight=False, soft_wrap=True)
    try:
        found = _follow(api, found, console)
    except KeyboardInterrupt:
        api.request("POST", f"/v1/realtime/calls/{found['id']}/hangup")
        found = _follow(api, found, console)
    if as_json:
        print_json(found)
    if not found["duration_seconds"]:
        code = f" ({found['status_code']})" if "status_code" in found else ""
        raise InputError(f"the call was not answered: {found['reason']}{code}")


def _follow(api: "CallsClient", found: dict[str, Any], console: Console) -> dict[str, Any]:
    """Print each status of a call until it has ended."""
    shown = ""
    while True:
        line = found["status"] if found["status"] != "ended" else f"ended: {found['reason']}"
        line += f", answered by {found['answered_by']}" if found.get("answered_by") else ""
        if line != shown:
            shown = line
            console.print(f"{escape(found['called'])}: {line}")
        if found["status"] == "ended":
            return found
        time.sleep(LOOK_SECONDS)
        found = api.request("GET", f"/v1/realtime/calls/{found['id']}")


class CallsClient:
    """Requests to the calls of a server."""

    def __init__(self, url: str, api_key: str | None) -> None:
        if not url.startswith(("http://", "https://")):
            raise InputError(f"--url is http:// or https://, not {url!r}")
        self._url = url.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def request(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """The JSON of a response; InputError with the server's message where it refuses."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, self._headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=REQUEST_SECONDS) as response:
                answered: dict[str, Any] = json.loads(response.read() or b"{}")
                return answered
        except urllib.error.HTTPError as error:
            raise InputError(_message(error)) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise UnreachableEndpointError(f"no server answers at {self._url}", str(error)) from error


def _message(error: urllib.error.HTTPError) -> str:
    try:
        with error:
            return str(json.loads(error.read())["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server has answered with {error.code}"
