"""TLS: the unmodified clients over `https` and `wss`, in one process and through door processes."""

import asyncio
import datetime
import ipaddress
import json
import os
import ssl
import subprocess
from pathlib import Path

import httpx
import openai
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.server.harness import DEADLINE, drop_connections
from tests.server.node_packages import installed
from tests.server.test_openai_python import says, until
from vivavoce.errors import InputError
from vivavoce.server.config import ServerOptions


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A certificate of 127.0.0.1 that signs itself, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "vivavoce test")])
    now = datetime.datetime.now(datetime.UTC)
    built = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        .sign(key, hashes.SHA256())
    )
    cert_file, key_file = folder / "cert.pem", folder / "key.pem"
    cert_file.write_bytes(built.public_bytes(serialization.Encoding.PEM))
    key_file.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return {"tls_cert": str(cert_file), "tls_key": str(key_file)}


@pytest.mark.parametrize("doors", [0, 1])
async def test_a_turn_of_the_python_client_over_tls(running, certificate, doors):
    server = await running(doors=doors, **certificate)
    trust = ssl.create_default_context(cafile=certificate["tls_cert"])
    async with (
        httpx.AsyncClient(verify=trust) as http,
        openai.AsyncOpenAI(base_url=f"{server.http}/v1", api_key="unused", http_client=http) as client,
    ):
        assert server.http.startswith("https://")
        assert [model.id async for model in client.models.list()] == ["scripted-1", "scripted-2"]
        options = {"ssl": trust}
        async with client.realtime.connect(model="any", websocket_connection_options=options) as connection:
            await connection.session.update(session={"type": "realtime", "output_modalities": ["text"]})
            await connection.conversation.item.create(item=says("good morning"))
            await connection.response.create()
            assert (await until(connection, "response.output_text.done")).text == "You said: good morning"


@pytest.mark.npm("node", "npm")
@pytest.mark.parametrize(
    ("scenario", "expected"),
    [
        ("text", {"text": "You said: good evening", "status": "completed"}),
        ("tool", {"call": "weather", "arguments": '{"place": "here"}', "text": "You said: sunny"}),
        ("bargeIn", {"status": "cancelled", "reason": "turn_detected", "words": "You said: a long"}),
        ("reconnect", {"isNew": True, "text": "You said: good evening"}),
    ],
)
async def test_the_javascript_client_which_only_knows_wss(running, certificate, scenario, expected):
    server = await running(**certificate)
    script = installed("openai_turns.mjs")
    process = await asyncio.create_subprocess_exec(
        *("node", str(script), f"{server.http}/v1", scenario),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"NODE_EXTRA_CA_CERTS": certificate["tls_cert"]},
    )
    assert process.stdout is not None and process.stderr is not None
    try:
        seen = await asyncio.wait_for(process.stdout.readline(), DEADLINE)
        if seen == b'"connected"\n':
            drop_connections(server)
            seen = await asyncio.wait_for(process.stdout.readline(), DEADLINE)
        problems = await asyncio.wait_for(process.stderr.read(), DEADLINE)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert seen, problems.decode()
    assert json.loads(seen) == expected


def test_files_that_are_no_certificate_are_refused_before_models_are_loaded(certificate, tmp_path):
    with pytest.raises(InputError, match="--tls-cert"):
        ServerOptions(tls_key=certificate["tls_key"]).check()
    with pytest.raises(InputError, match=r"no certificate and key in .*missing"):
        ServerOptions(tls_cert=str(tmp_path / "missing.pem")).check()
    with pytest.raises(InputError, match="no certificate and key"):  # the key of nobody
        ServerOptions(tls_cert=certificate["tls_cert"]).check()
    both = tmp_path / "both.pem"
    both.write_bytes(b"".join(Path(file).read_bytes() for file in certificate.values()))
    ServerOptions(tls_cert=str(both)).check()
