"""Whatever is sent to the addresses around the wire: an answer below 500, in the protocol's form."""

import asyncio
import json

import httpx
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.server.harness import RunningServer, connected
from tests.server.scripted import ScriptedHost
from tests.server.test_audio_api import ToneListener, ToneMaker, recording
from tests.server.test_fuzz import json_values, likely, names
from vivavoce.server.app import build_app
from vivavoce.server.config import ServerOptions

ADDRESSES = ["/v1/audio/speech", "/v1/realtime/client_secrets", "/v1/realtime/sessions", "/v1/realtime/calls"]
quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
fields = names | st.sampled_from(["input", "session", "expires_after", "response_format", "stream_format"])
bodies = st.dictionaries(fields, likely, max_size=5) | json_values
FORM = ["language", "prompt", "temperature", "response_format", "stream", "timestamp_granularities[]"]
QUERY = ["model", "intent", "session_id", "resume_token", "last_event_id", "call_id"]
queries = st.dictionaries(
    st.sampled_from(QUERY), st.text(st.characters(exclude_categories=["Cs"]), max_size=12), max_size=4
)


def send(make_request) -> httpx.Response:
    """What the application answers, on this event loop, without a socket; what it raises is raised."""

    async def main() -> httpx.Response:
        app = build_app(ScriptedHost(), ServerOptions(max_upload_bytes=100_000), ToneMaker(), ToneListener())
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
            return await make_request(http)

    return asyncio.run(main())


def is_well_answered(answer: httpx.Response) -> None:
    assert answer.status_code < 500, answer.text
    if answer.status_code >= 400:
        error = answer.json()["error"]
        assert isinstance(error["message"], str) and error["message"] and "type" in error


@quick
@given(st.sampled_from(ADDRESSES), bodies)
@example("/v1/audio/speech", {"input": "hello", "voice": {"id": 3}, "speed": "fast"})
@example("/v1/audio/speech", {"input": "hello", "voice": ["ada"], "stream_format": {}})
@example("/v1/audio/speech", {"input": "hello", "response_format": ["wav"]})
@example("/v1/realtime/client_secrets", {"session": {"model": {}}})
@example("/v1/realtime/client_secrets", {"session": {"type": []}})
def test_any_json_in_a_body(address, body):
    data = json.dumps(body)
    is_well_answered(send(lambda http: http.post(address, content=data.encode("utf8", "surrogatepass"))))


@quick
@given(st.sampled_from([*ADDRESSES, "/v1/audio/transcriptions"]), st.binary(max_size=200), st.sampled_from(["", "x"]))
def test_any_bytes_in_a_body(address, data, boundary):
    kind = f"multipart/form-data; boundary={boundary}" if boundary else "application/json"
    is_well_answered(send(lambda http: http.post(address, content=data, headers={"Content-Type": kind})))


forms = st.dictionaries(
    st.sampled_from(FORM),
    st.text(max_size=8) | st.sampled_from(["verbose_json", "srt", "vtt", "true", "0.5", "word"]),
    max_size=4,
)


@quick
@given(forms, st.none() | st.binary(max_size=60))
@example({"temperature": "nan"}, None)
@example({"temperature": "inf"}, None)
def test_any_fields_of_a_form(asked, noise):
    name, data = recording()
    data = data if noise is None else noise
    is_well_answered(send(lambda http: http.post("/v1/audio/transcriptions", data=asked, files={"file": (name, data)})))


@settings(max_examples=6, deadline=None)
@given(st.lists(queries, min_size=6, max_size=12))
def test_any_query_of_a_socket(asked_for):
    async def main() -> None:
        async with RunningServer(ScriptedHost(), ServerOptions(opens_per_minute=1e6)) as server:
            for asked in asked_for:
                async with connected(server, f"?{httpx.QueryParams(asked)}") as client:
                    first = await client.next()
                    assert first["type"] in ("session.created", "error")
                    if first["type"] == "error":
                        assert await client.closed() == 1008

    asyncio.run(main())


@pytest.mark.parametrize("path", ["/v1/nothing", "/v1/models/nobody", "/v1/realtime/calls/rtc_x", "/../secrets"])
def test_addresses_that_are_none(path):
    answer = send(lambda http: http.get(path))
    is_well_answered(answer)
    assert answer.status_code in (404, 405)
