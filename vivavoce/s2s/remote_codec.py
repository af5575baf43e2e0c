"""Clients for MOSS-Speech's codec as a separate deployment, with the interface of the local batchers.

Streaming states stay on the codec's machine and are known here by name. A job names the state it continues, the name of
the next state, and the states that are no longer referenced here.
"""

import json
import secrets
import struct
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from vivavoce.dialogue.backend import EndpointRef, Resolver
from vivavoce.errors import MissingDependencyError, VivaError

if TYPE_CHECKING:
    from aiohttp import ClientSession

Result = TypeVar("Result", list[int], Tensor)
Header = dict[str, Any]
ANSWER_SECONDS = 30.0
SPEECH_ENCODER, VOCODER = "encoder", "voice"  # the last path segments of their URLs


@dataclass(eq=False)
class RemoteState:
    """The name of a state and the endpoint that has it; before the first job only the voice, if any."""

    endpoint: EndpointRef | None = None
    name: str = ""
    voice: str | None = None


def pack(header: Header, payload: bytes) -> bytes:
    """A JSON header with its length before it, then the payload."""
    text = json.dumps(header).encode()
    return struct.pack("<I", len(text)) + text + payload


def unpack(data: bytes) -> tuple[Header, bytes]:
    """The header and payload of a packed message."""
    (size,) = struct.unpack_from("<I", data)
    return json.loads(data[4 : 4 + size]), data[4 + size :]


class RemoteBatcher(Generic[Result]):
    """Runs jobs on a remote codec, with the interface of a `DynamicBatcher`."""

    name: ClassVar[str]

    def __init__(self, resolve: Resolver, path: str) -> None:
        self._resolve, self._path = resolve, path
        self._http: ClientSession | None = None
        self._released: dict[str, list[str]] = {}
        self.waiting = 0

    def start(self) -> None:
        """Open the HTTP session."""
        try:
            import aiohttp
        except ImportError as error:
            raise MissingDependencyError("a remote codec needs aiohttp: pip install 'vivavoce[ray]'") from error
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(ANSWER_SECONDS))

    async def close(self) -> None:
        """Close the HTTP session."""
        if self._http is not None:
            await self._http.close()

    async def do(self, job: tuple[RemoteState, Tensor, bool], urgency: float = 0.0) -> tuple[Result, RemoteState]:
        """The result of one job, and the name of the state after it."""
        state, values, is_last = job
        self.waiting += 1
        try:
            endpoint = state.endpoint or await self._resolve()
            next_state = RemoteState(endpoint, secrets.token_hex(8))
            header: Header = {"state": state.name, "voice": state.voice, "next": next_state.name, "is_last": is_last}
            header |= {"urgency": urgency, "left": self._released.pop(endpoint.name, [])}
            answer = await self._request(endpoint, pack(header, values.numpy().tobytes()))
        finally:
            self.waiting -= 1
        weakref.finalize(next_state, self._release, endpoint.name, next_state.name)
        return self._read(answer), next_state

    def _release(self, endpoint: str, state: str) -> None:
        self._released.setdefault(endpoint, []).append(state)

    async def _request(self, endpoint: EndpointRef, body: bytes) -> bytes:
        import aiohttp

        if self._http is None:
            raise VivaError(f"the remote {self.name} is not running")
        headers = {"Authorization": f"Bearer {endpoint.key}"}
        try:
            async with self._http.post(f"{endpoint.url}/codec/{self._path}", data=body, headers=headers) as answer:
                data = await answer.read()
                if answer.status != 200:
                    raise VivaError(f"the codec answered {answer.status}: {data[:200].decode('utf8', 'replace')}")
                return data
        except (aiohttp.ClientError, TimeoutError) as error:
            await self._resolve(endpoint)
            raise VivaError(f"the codec that has the state of this {self.name} does not answer: {error}") from error

    def _read(self, answer: bytes) -> Result:
        raise NotImplementedError


class RemoteSpeechEncoder(RemoteBatcher[list[int]]):
    """The remote speech encoder: sound to codes."""

    name = "speech encoder"

    def _read(self, answer: bytes) -> list[int]:
        return np.frombuffer(answer, np.int64).tolist()


class RemoteVocoder(RemoteBatcher[Tensor]):
    """The remote vocoder: codes to sound."""

    name = "vocoder"

    def _read(self, answer: bytes) -> Tensor:
        return torch.from_numpy(np.frombuffer(answer, np.float32).copy())


@dataclass(frozen=True)
class RemoteChunkUnit:
    """Codes in a chunk of the flow decoder, and its lookahead."""

    chunk: int
    lookahead: int


@dataclass(frozen=True)
class RemoteFlowInfo:
    """What a backend needs of the flow decoder."""

    config: RemoteChunkUnit


@dataclass(frozen=True)
class RemoteStream:
    """What a backend needs of the speech encoder."""

    samples_per_code: int
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def initial_state(self) -> RemoteState:
        """The state before the first sample of a turn."""
        return RemoteState()


@dataclass(frozen=True)
class RemoteCodec:
    """What a backend needs of a `MossSpeechCodec` that is remote."""

    resolve: Resolver
    speech_encoder: RemoteStream
    flow: RemoteFlowInfo
    samples_per_code: int
    voices: Mapping[str, RemoteState]

    @classmethod
    def from_description(cls, resolve: Resolver, description: Header) -> "RemoteCodec":
        """The codec of a description, which its endpoint serves as JSON."""
        unit = RemoteChunkUnit(description["chunk"], description["lookahead"])
        voices = {name: RemoteState(voice=name) for name in description["voices"]}
        speech_encoder = RemoteStream(description["encoder_samples_per_code"])
        return cls(resolve, speech_encoder, RemoteFlowInfo(unit), description["samples_per_code"], voices)
