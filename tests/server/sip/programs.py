"""Unmodified SIP programs of Debian as peers: sipp, baresip, linphone and kamailio."""

import asyncio
import contextlib
import json
import os
import shutil
import wave
from pathlib import Path

import numpy as np

from tests.must_run import leave_out
from tests.server.harness import DEADLINE, eventually
from tests.server.scripted import tone
from vivavoce.audio.io import float_to_pcm16
from vivavoce.evaluation.machine import free_port

BARESIP_CONFIG = """
sip_listen {address}
rtp_ports 31000-31999
module_path /usr/lib/baresip/modules
audio_player sndfile,default
audio_source aufile,{folder}/question.wav
audio_alert aufile,/dev/null
snd_path {folder}
ctrl_tcp_listen 127.0.0.1:{control}
module g711.so
module g722.so
module opus.so
module srtp.so
module aufile.so
module sndfile.so
module ctrl_tcp.so
module_tmp uuid.so
module_tmp account.so
module_app menu.so
"""

LINPHONE_CONFIG = """
[sip]
sip_port={port}
use_ipv6=0
contact="Ann" <sip:ann@127.0.0.1>
[rtp]
audio_rtp_port={media_port}
"""

KAMAILIO_CONFIG = """
debug=0
log_stderror=yes
fork=yes
children=1
listen=udp:127.0.0.1:{port}
loadmodule "tm.so"
loadmodule "sl.so"
loadmodule "rr.so"
loadmodule "pv.so"
loadmodule "maxfwd.so"
loadmodule "textops.so"
loadmodule "siputils.so"
loadmodule "usrloc.so"
loadmodule "registrar.so"
loadmodule "auth.so"
request_route {{
    if (is_method("REGISTER")) {{
        if (!pv_www_authenticate("$td", "sesame", "0")) {{
            www_challenge("$td", "1");
            exit;
        }}
        save("location");
        exit;
    }}
    if (has_totag()) {{
        if (loose_route() || is_method("ACK")) {{ t_relay(); }} else {{ sl_send_reply("404", "Not Found"); }}
        exit;
    }}
    if (is_method("CANCEL")) {{ if (t_check_trans()) t_relay(); exit; }}
    record_route();
    if (!lookup("location")) {{ sl_send_reply("404", "Not Found"); exit; }}
    t_relay();
}}
"""


def program(name: str) -> str:
    """The path of a program; without it the test is left out."""
    path = shutil.which(name) or shutil.which(name, path="/usr/sbin")
    if path is None:
        leave_out("debian", f"{name} is not installed")
    return path


@contextlib.asynccontextmanager
async def running_program(folder: Path, *command: str, **options):
    """Run a program until the end of the block; its output goes to a file."""
    with (folder / "output.log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(*command, cwd=folder, stdout=log, stderr=log, **options)
        try:
            yield process
        finally:
            if process.returncode is None:
                process.terminate()
            await asyncio.wait_for(process.wait(), DEADLINE)


async def sipp(folder: Path, target: str, *arguments: str) -> None:
    """Run sipp to its end; it fails where a call did."""
    options = ("-i", "127.0.0.1", "-nostdin", "-timeout", f"{DEADLINE:g}s", "-timeout_error", "-trace_err")
    async with running_program(folder, program("sipp"), target, *options, *arguments) as process:
        code = await asyncio.wait_for(process.wait(), 2 * DEADLINE)
    errors = "\n".join(file.read_text() for file in folder.glob("*errors.log"))
    assert code == 0, f"sipp ended with {code}: {errors or (folder / 'output.log').read_text()[-3000:]}"


def write_question(file: Path, rate: int, channels: int = 1) -> None:
    """A second of silence, a tone, and six seconds of silence."""
    question = np.concatenate([np.zeros(rate), tone(500, 0.5, rate), np.zeros(6 * rate)]).astype(np.float32)
    with wave.open(str(file), "wb") as audio:
        audio.setnchannels(channels)
        audio.setsampwidth(2)
        audio.setframerate(rate)
        audio.writeframes(float_to_pcm16(np.repeat(question, channels)).tobytes())


def read_heard(file: Path) -> tuple[np.ndarray, int]:
    """The first channel of a recording, and its rate."""
    with wave.open(str(file)) as audio:
        samples = np.frombuffer(audio.readframes(audio.getnframes()), np.int16).astype(np.float32) / 32768
        return samples.reshape(-1, audio.getnchannels())[:, 0], audio.getframerate()


class Baresip:
    """A softphone that is told what to do over its control port."""

    def __init__(self, folder: Path, codec: str = "PCMU/8000/1", parameters: str = "") -> None:
        """A codec is NAME/RATE/CHANNELS; the parameters are those of its account."""
        self.folder, self._control = folder, free_port()
        self.address = f"127.0.0.1:{free_port()}"
        config = BARESIP_CONFIG.format(address=self.address, folder=folder, control=self._control)
        (folder / "config").write_text(config)
        (folder / "accounts").write_text(f"<sip:ann@127.0.0.1>;regint=0;audio_codecs={codec}{parameters}\n")
        (folder / "contacts").write_text("")
        write_question(folder / "question.wav", *map(int, codec.split("/")[1:]))

    async def __aenter__(self):
        self._stack = contextlib.AsyncExitStack()
        await self._stack.enter_async_context(running_program(self.folder, program("baresip"), "-f", str(self.folder)))
        async with asyncio.timeout(DEADLINE):
            while True:
                try:
                    self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._control)
                    return self
                except OSError:
                    await asyncio.sleep(0.02)

    async def __aexit__(self, *error) -> None:
        self._writer.close()
        await self._stack.aclose()

    async def command(self, name: str, params: str = "") -> None:
        """Give a command, and wait for its answer."""
        body = json.dumps({"command": name, "params": params, "token": name}).encode()
        self._writer.write(f"{len(body)}:".encode() + body + b",")
        while not (message := await self._message()).get("response"):
            pass
        assert message["ok"], message

    async def event(self, kind: str) -> dict:
        """The next event of this kind."""
        while (message := await self._message()).get("type") != kind:
            pass
        return message

    async def _message(self) -> dict:
        async with asyncio.timeout(DEADLINE):
            size = int((await self._reader.readuntil(b":"))[:-1])
            return json.loads((await self._reader.readexactly(size + 1))[:-1])

    def heard(self) -> tuple[np.ndarray, int]:
        """What it has decoded, and its rate; complete once the call has ended."""
        (file,) = self.folder.glob("dump-*-dec.wav")
        return read_heard(file)


class Linphone:
    """linphonec, with files in place of a sound card; it takes commands from its standard input."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "linphonerc").write_text(LINPHONE_CONFIG.format(port=free_port(), media_port=free_port()))
        (folder / ".local/share/linphone").mkdir(parents=True)
        write_question(folder / "question.wav", 8_000)

    async def __aenter__(self):
        self._stack = contextlib.AsyncExitStack()
        command = program("linphonec"), "-c", str(self.folder / "linphonerc")
        options = {"stdin": asyncio.subprocess.PIPE, "env": {**os.environ, "HOME": str(self.folder)}}
        self._process = await self._stack.enter_async_context(running_program(self.folder, *command, **options))
        await self.until("linphonec>")
        self.command("soundcard use files")
        self.command(f"play {self.folder / 'question.wav'}")
        self.command(f"record {self.folder / 'heard.wav'}")
        return self

    async def __aexit__(self, *error) -> None:
        self.command("quit")
        await asyncio.wait_for(self._process.wait(), DEADLINE)
        await self._stack.aclose()

    def command(self, text: str) -> None:
        """Give a command."""
        self._process.stdin.write(f"{text}\n".encode())

    async def until(self, text: str) -> None:
        """Wait until it has printed a text."""
        output = self.folder / "output.log"
        await eventually(lambda: text in output.read_text(errors="replace"), f"linphone prints {text!r}")

    def heard(self) -> tuple[np.ndarray, int]:
        """What it has recorded, and its rate; complete once the call has ended."""
        return read_heard(self.folder / "heard.wav")
