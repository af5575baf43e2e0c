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
Head = dict[str, Any]
ANSWER_SECONDS = 30.0
SPEECH_ENCODER, VOCODER = "ear", "voice"  # the last path segments of their URLs


@dataclass(eq=False)
class RemoteState:
    """What a state is called at the codec that has it; none yet, or a voice to begin in, before the first job."""

    place: EndpointRef | None = None
    name: str = ""
    voice: str | None = None


def packed(head: Head, payload: bytes) -> bytes:
    """A head of names and values, and numbers behind it."""
    text = json.dumps(head).encode()
    return struct.pack("<I", len(text)) + text + payload


def unpacked(data: bytes) -> tuple[Head, bytes]:
    """What `packed` put together."""
    (size,) = struct.unpack_from("<I", data)
    return json.loads(data[4 : 4 + size]), data[4 + size :]


class RemoteBatcher(Generic[Result]):
    """Does jobs as a `Gathering` does, elsewhere."""

    def __init__(self, find: Resolver, what: str) -> None:
        self._find, self._what = find, what
        self._http: ClientSession | None = None
        self._left: dict[str, list[str]] = {}
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
        state, numbers, is_last = job
        self.waiting += 1
        try:
            place = state.place or await self._find()
            following = RemoteState(place, secrets.token_hex(8))
            head: Head = {"state": state.name, "voice": state.voice, "next": following.name, "is_last": is_last}
            head |= {"urgency": urgency, "left": self._left.pop(place.name, [])}
            answer = await self._asked(place, packed(head, numbers.numpy().tobytes()))
        finally:
            self.waiting -= 1
        weakref.finalize(following, self._leave, place.name, following.name)
        return self._read(answer), following

    def _leave(self, place: str, state: str) -> None:
        self._left.setdefault(place, []).append(state)

    async def _asked(self, place: EndpointRef, body: bytes) -> bytes:
        import aiohttp

        if self._http is None:
            raise VivaError(f"the {self._what} is not running")
        headers = {"Authorization": f"Bearer {place.key}"}
        try:
            async with self._http.post(f"{place.url}/codec/{self._what}", data=body, headers=headers) as answer:
                data = await answer.read()
                if answer.status != 200:
                    raise VivaError(f"the codec answered {answer.status}: {data[:200].decode('utf8', 'replace')}")
                return data
        except (aiohttp.ClientError, TimeoutError) as error:
            await self._find(place)
            raise VivaError(f"the codec that had this {self._what} does not answer: {error}") from error

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
class RemoteGrain:
    """Codes in a chunk of the voice, and those it looks ahead."""

    chunk: int
    lookahead: int


@dataclass(frozen=True)
class RemoteFlowInfo:
    """The flow decoder, as far as a backend needs it."""

    config: RemoteGrain


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

    find: Resolver
    speech_encoder: RemoteStream
    flow: RemoteFlowInfo
    samples_per_code: int
    voices: Mapping[str, RemoteState]

    @classmethod
    def from_description(cls, find: Resolver, description: Head) -> "RemoteCodec":
        """The codec that describes itself so."""
        grain = RemoteGrain(description["chunk"], description["lookahead"])
        voices = {name: RemoteState(voice=name) for name in description["voices"]}
        speech_encoder = RemoteStream(description["ear_samples_per_code"])
        return cls(find, speech_encoder, RemoteFlowInfo(grain), description["samples_per_code"], voices)
