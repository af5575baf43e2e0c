"""MOSS-Speech whose codec is a deployment of its own: only the language model is here.

States stay with the codec that made them; here is what they are called. A job says which state it goes on from and how
the next one is to be called, and names those that nobody here holds any more.
"""

import json
import secrets
import struct
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

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
SPEECH_ENCODER, VOCODER = "ear", "voice"  # the last path segments of their URLs


@dataclass(eq=False)
class RemoteState:
    """What a state is called at the codec that has it; none yet, or a voice to begin in, before the first job."""

    endpoint: EndpointRef | None = None
    name: str = ""
    voice: str | None = None


def pack(header: Header, payload: bytes) -> bytes:
    """A head of names and values, and numbers behind it."""
    text = json.dumps(header).encode()
    return struct.pack("<I", len(text)) + text + payload


def unpack(data: bytes) -> tuple[Header, bytes]:
    """What `packed` put together."""
    (size,) = struct.unpack_from("<I", data)
    return json.loads(data[4 : 4 + size]), data[4 + size :]


class RemoteBatcher(Generic[Result]):
    """Does jobs as a `Gathering` does, elsewhere."""

    def __init__(self, resolve: Resolver, path: str) -> None:
        self._resolve, self._path = resolve, path
        self._http: ClientSession | None = None
        self._released: dict[str, list[str]] = {}
        self.waiting = 0

    def start(self) -> None:
        """Begin to work."""
        try:
            import aiohttp
        except ImportError as error:
            raise MissingDependencyError("a codec elsewhere needs aiohttp: pip install 'vivavoce[ray]'") from error
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(ANSWER_SECONDS))

    async def close(self) -> None:
        """Stop."""
        if self._http is not None:
            await self._http.close()

    async def do(self, job: tuple[RemoteState, Tensor, bool], urgency: float = 0.0) -> tuple[Result, RemoteState]:
        """The result of one job, and what the state after it is called."""
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
            raise VivaError(f"the {self._path} is not running")
        headers = {"Authorization": f"Bearer {endpoint.key}"}
        try:
            async with self._http.post(f"{endpoint.url}/codec/{self._path}", data=body, headers=headers) as answer:
                data = await answer.read()
                if answer.status != 200:
                    raise VivaError(f"the codec answered {answer.status}: {data[:200].decode('utf8', 'replace')}")
                return data
        except (aiohttp.ClientError, TimeoutError) as error:
            await self._resolve(endpoint)
            raise VivaError(f"the codec that had this {self._path} does not answer: {error}") from error

    def _read(self, answer: bytes) -> Result:
        raise NotImplementedError


class RemoteSpeechEncoder(RemoteBatcher[list[int]]):
    """Sound becomes codes."""

    def _read(self, answer: bytes) -> list[int]:
        return np.frombuffer(answer, np.int64).tolist()


class RemoteVocoder(RemoteBatcher[Tensor]):
    """Codes become sound."""

    def _read(self, answer: bytes) -> Tensor:
        return torch.from_numpy(np.frombuffer(answer, np.float32).copy())


@dataclass(frozen=True)
class RemoteChunkUnit:
    """Codes in a chunk of the voice, and those it looks ahead."""

    chunk: int
    lookahead: int


@dataclass(frozen=True)
class RemoteFlowInfo:
    """The flow decoder, as far as a backend needs it."""

    config: RemoteChunkUnit


@dataclass(frozen=True)
class RemoteStream:
    """The speech encoder, as far as a backend needs it."""

    samples_per_code: int
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def initial_state(self) -> RemoteState:
        """The state before the first sample of a turn."""
        return RemoteState()


@dataclass(frozen=True)
class RemoteCodec:
    """A remote `MossSpeechCodec`, as far as a backend needs it."""

    resolve: Resolver
    speech_encoder: RemoteStream
    flow: RemoteFlowInfo
    samples_per_code: int
    voices: Mapping[str, RemoteState]

    @classmethod
    def from_description(cls, resolve: Resolver, description: Header) -> "RemoteCodec":
        """The codec that describes itself so."""
        unit = RemoteChunkUnit(description["chunk"], description["lookahead"])
        voices = {name: RemoteState(voice=name) for name in description["voices"]}
        speech_encoder = RemoteStream(description["ear_samples_per_code"])
        return cls(resolve, speech_encoder, RemoteFlowInfo(unit), description["samples_per_code"], voices)
