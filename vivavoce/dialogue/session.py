"""A live conversation: audio and commands in, events out; no socket.

`UserTurns` tracks the user, `Replies` the model, `InputTranscripts` what the user says; they share the history, the
backend state and the clock.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from vivavoce.audio.echo import EchoGuard
from vivavoce.audio.player import Clock, WallClock
from vivavoce.audio.vad import RATE, VoiceActivity, voice_activity
from vivavoce.dialogue.backend import ConversationBackend, ReplyTranscriber, TurnTranscript
from vivavoce.dialogue.barge_in import OverlapJudge, WatchedOverlap
from vivavoce.dialogue.call_limit import may_call_again
from vivavoce.dialogue.conversation import Announcement, ReplyRequest
from vivavoce.dialogue.events import Event
from vivavoce.dialogue.fillers import FillerVoice, FillerWatch, has_open_calls
from vivavoce.dialogue.front_end import AudioFrontEnd, AudioWindow, EchoRemover, FrontEnd, InlineFrontEnd
from vivavoce.dialogue.front_end_service import FrontEndService
from vivavoce.dialogue.history import History
from vivavoce.dialogue.input_transcripts import InputTranscripts
from vivavoce.dialogue.items import Content, HostedCall, Item, Samples, ToolCall
from vivavoce.dialogue.joined_turns import JOIN_WITHIN_MS, AnsweredTurn, OpenTurn
from vivavoce.dialogue.listening_options import ListeningOptions
from vivavoce.dialogue.model_barge_in import overlap_judge
from vivavoce.dialogue.output_timeline import OutputTimeline, PlayedOutput
from vivavoce.dialogue.replies import ConversationContext, Replies
from vivavoce.dialogue.reply import SpeakingOptions
from vivavoce.dialogue.settings import ConversationSettings
from vivavoce.dialogue.speaker import Answer, Embed, SpeakerWatch
from vivavoce.dialogue.turn_taker import LIKELY_END_MS
from vivavoce.dialogue.turns import UserTurns
from vivavoce.errors import InputError
from vivavoce.log import log_failure

logger = logging.getLogger(__name__)
Answered = TypeVar("Answered")


@dataclass(frozen=True)
class DialogueOptions:
    """How a conversation behaves beyond what its client may choose."""

    speaking: SpeakingOptions = field(default_factory=SpeakingOptions)
    ducked_gain: float = 0.25
    holds_replies: bool = True
    """Whether a reply is started at a likely end of turn and held."""
    likely_end_ms: int = LIKELY_END_MS
    join_within_ms: int = JOIN_WITHIN_MS
    """How long after its detected end a turn may go on, and takes back a reply of which hardly anything was heard."""
    activity: VoiceActivity | None = None
    """None: Silero's network."""
    echo: EchoRemover | None = field(default_factory=EchoGuard)
    """None: the client cancels its echo."""
    classifier: OverlapJudge = field(default_factory=overlap_judge)
    """Decides which sounds over a reply interrupt it."""
    turn_model: Callable[[Samples], float] | None = None
    """Probability that a turn, 16 kHz samples, is finished; used at likely ends by the semantic detector."""
    voices: Embed | None = None
    """Embeds voices; None: one voice is like another."""
    enrols_speaker: bool = False
    """Whether the first turns enrol the user's voice, and what others say is ignored."""
    ignores_side_talk: bool = True
    """Whether turns in silence that the classifier surely takes for a bystander's are dropped."""
    transcriber: ReplyTranscriber | None = None
    """Transcribes the user where the backend does not."""
    words_decide: bool = False
    """Whether speech over a reply is transcribed to classify it, by a transcriber that is fast on single words."""
    front_end: FrontEndService | None = None
    """Computes the audio front end beside the event loop; None: within `hear`."""
    fillers: FillerVoice | None = None
    """Speaks while a tool or a slow model works; None: no fillers."""


class LiveConversation:
    """A `Conversation` on a backend. Created and used on one event loop."""

    def __init__(
        self,
        pipeline: ConversationBackend,
        settings: ConversationSettings | None = None,
        options: DialogueOptions | None = None,
        input_rate: int = 24_000,
        clock: Clock | None = None,
    ) -> None:
        self.input_rate, self.output_rate = input_rate, pipeline.output_rate
        self._options = options = options or DialogueOptions()
        self._events: asyncio.Queue[Event | None] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self._is_attended = asyncio.Event()  # a client is connected
        self._is_attended.set()
        self._history = History()
        self._front_end, timeline = self._open_front_end()
        self._state = pipeline.open(self._on_transcript)
        self._context = ConversationContext(
            clock or WallClock(),
            self._state,
            self._history,
            settings or ConversationSettings(),
            self._emit,
            timeline,
            pipeline.output_rate,
        )
        self._context.set_history()
        if self.settings.noise_reduction is not None:
            self._reduce_noise()
        self._replies = Replies(self._context, options.speaking)
        self._transcripts = InputTranscripts(
            self._context,
            self._replies,
            options.transcriber,
            options.voices,
            pipeline.transcribes,
            self._is_attended,
            self._start,
        )
        self._listening = UserTurns(self._context, self._replies, self._listening_options())
        self._fillers = None if options.fillers is None else self._watch_waits(options.fillers)

    def _watch_waits(self, voice: FillerVoice) -> FillerWatch:
        """Let fillers be spoken while the user waits."""

        def is_waiting() -> bool:
            is_audible = self._replies.is_audible(self._context.clock.now())
            if self._listening.is_user_speaking or is_audible or not self._is_attended.is_set():
                return False
            generating = self._replies.generating
            if generating is None:
                return has_open_calls(self._history)
            return voice.covers_replies and not generating.has_output

        def start(text: str, sound: Samples) -> None:
            async def speak(_: str) -> AsyncGenerator[Samples, None]:
                yield sound

            self._replies.speak_filler(Announcement(text, speak))

        watch = FillerWatch(
            voice,
            self._context.clock,
            self._history,
            lambda: self.settings,
            is_waiting,
            lambda: self._replies.output_ends,
            start,
            self.output_rate,
        )
        self._replies.on_wait, self._replies.on_reply_end = watch.begin, watch.go_on
        return watch

    def _open_front_end(self) -> tuple[FrontEnd, PlayedOutput]:
        options = self._options
        if options.front_end is not None:
            rates = self.input_rate, self.output_rate
            served = options.front_end.open(options.activity, options.echo, rates, self._take_windows)
            return served, served
        timeline = OutputTimeline(self.output_rate, RATE)
        activity = options.activity or voice_activity()
        front_end = AudioFrontEnd(self.input_rate, activity, options.echo, timeline.read)
        return InlineFrontEnd(front_end, self._take_windows), timeline

    def _reduce_noise(self) -> None:
        reduction = self.settings.noise_reduction
        self._front_end.reduce_noise(None if reduction is None else reduction.strength)

    def _take_windows(self, windows: list[AudioWindow], quiet_ms: int) -> None:
        self._listening.take(windows, quiet_ms)

    def _listening_options(self) -> ListeningOptions:
        options = self._options
        return ListeningOptions(
            options.likely_end_ms,
            options.join_within_ms,
            options.holds_replies,
            options.ducked_gain,
            options.classifier,
            self._request_words if options.words_decide and options.transcriber is not None else None,
            self._request_turn_model if options.turn_model is not None else None,
            self._transcripts.turn_committed,
            self._transcripts.turn_grew,
            self._transcripts.end_partials,
            SpeakerWatch(self._request_voice) if options.enrols_speaker and options.voices is not None else None,
            options.ignores_side_talk,
        )

    @property
    def settings(self) -> ConversationSettings:
        """The current settings."""
        return self._context.settings

    @property
    def items(self) -> Sequence[Item]:
        """The history."""
        return self._history.items

    @property
    def gain(self) -> float:
        """The current gain of replies, for a caller that plays them itself."""
        return self._context.gain

    async def events(self) -> AsyncIterator[Event]:
        """The events, until the conversation is closed; for a single reader."""
        while (event := await self._events.get()) is not None:
            yield event

    def hear(self, samples: Samples) -> None:
        """Process the next samples of the user's audio, at `input_rate`."""
        self._require_open()
        self._front_end.hear(samples, self._context.clock.now())

    @property
    def unprocessed_seconds(self) -> float:
        """Seconds of the user's audio that are still to be processed."""
        return self._front_end.unprocessed_seconds

    async def drain_input(self, max_seconds: float = 0.0) -> None:
        """Wait until no more than these seconds of the user's audio are still to be processed."""
        await self._front_end.drain(max_seconds)

    def played(self, reply: str, milliseconds: int) -> None:
        """The client has played this much of a reply: if interrupted, the history keeps no more of it."""
        self._replies.played(reply, milliseconds / 1e3)

    def update(self, change: Callable[[ConversationSettings], ConversationSettings]) -> None:
        """Change the settings."""
        self._require_open()
        before, self._context.settings = self._context.settings, change(self._context.settings)
        if self._context.settings.turn != before.turn:
            self._listening.settle()
        if self._context.settings.noise_reduction != before.noise_reduction:
            self._reduce_noise()
        self._context.set_history()

    def commit(self) -> Item:
        """End the user's turn; `InputError` where there is no audio."""
        self._require_open()
        return self._listening.commit()

    def clear_input(self) -> None:
        """Discard the audio since the last turn."""
        self._require_open()
        self._transcripts.end_partials()
        self._listening.clear()

    def add(self, content: Content, id: str | None = None, after: str | None = None) -> tuple[Item, str | None]:
        """A new item and its predecessor; `after` "root" puts it first, None last."""
        self._require_open()
        added = self._history.add(content, id, after)
        self._context.set_history()
        return added

    def item(self, id: str) -> Item:
        """An item with its audio."""
        return self._history.find(id)

    def delete(self, id: str) -> None:
        """Remove an item from the history."""
        self._require_open()
        self._history.delete(id)
        self._context.set_history()

    def update_call(self, id: str, hosted: HostedCall) -> Item:
        """Store how far a call that the server makes has come."""
        self._require_open()
        item = self._history.find(id)
        if not isinstance(item.content, ToolCall):
            raise InputError(f"item {id!r} is not a call")
        self._history.replace(replace(item, content=replace(item.content, hosted=hosted)))
        self._context.set_history()
        return self._history.find(id)

    def answer_calls(self) -> None:
        """Reply to the outputs of calls as soon as no other reply is generated."""
        self._require_open()
        if self._listening.is_user_speaking:
            self._listening.drop_held()  # it was started without the outputs
        elif may_call_again(self._history):
            self._replies.request()
        else:
            self._replies.request(ReplyRequest(replace(self.settings, tool_choice="none")))

    def truncate(self, id: str, audio_end_ms: int) -> Item:
        """Cut a spoken reply to the part that was played: sound, words and the model's context."""
        self._require_open()
        if audio_end_ms < 0:
            raise InputError(f"a reply cannot be cut at {audio_end_ms} ms")
        generating = self._replies.generating
        if generating is not None and generating.spoken_item == id:
            self._history.find(id)
            generating.end("client_cancelled")
        item = self._history.cut(id, audio_end_ms / 1e3)
        self._replies.mute(id)
        self._context.set_history()
        return item

    def reply(self, request: ReplyRequest | None = None) -> str:
        """Start a reply; returns its id. `InputError` while another is generated."""
        self._require_open()
        self._listening.drop_held()
        return self._replies.ask(request or ReplyRequest())

    def cancel(self, reply: str | None = None) -> None:
        """Stop a reply; `InputError` where none is in progress."""
        self._require_open()
        self._replies.cancel(reply)

    def pause(self) -> None:
        """No client is connected: replies and transcripts wait until `resume`."""
        self._is_attended.clear()
        self._state.pause()

    def resume(self) -> None:
        """A client is connected again."""
        self._is_attended.set()
        self._state.resume()

    async def close(self) -> None:
        """End all replies and tasks, and close the backend's state."""
        if self._is_closed:
            return
        self._front_end.close()
        if self._fillers is not None:
            self._fillers.end()
        await self._replies.close()
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        try:
            await self._state.close()
        finally:
            self._events.put_nowait(None)

    def _on_transcript(self, item: str, heard: TurnTranscript | Exception) -> None:
        """Called by the backend, whose state is opened before `_transcripts` is made."""
        self._transcripts.take(item, heard)

    # Models that run concurrently with the audio

    def _request_words(self, watch: WatchedOverlap, sound: Samples) -> None:
        async def ask() -> None:
            assert self._options.transcriber is not None
            try:
                watch.words = await self._options.transcriber.transcribe(
                    sound, RATE, self.settings.recognition.language
                )
            except Exception as error:  # without a transcript the sound alone decides
                log_failure(logger, error, "transcription of an overlap failed")

        self._start(ask())

    def _request_turn_model(self, turn: OpenTurn | AnsweredTurn) -> None:
        async def ask() -> None:
            assert self._options.turn_model is not None
            # Without an answer silence alone ends the turn.
            probability = await _in_thread(self._options.turn_model, turn.sound, "the turn model failed")
            self._listening.set_finished_probability(turn, probability)

        self._start(ask())

    def _request_voice(self, sound: Samples, answer: Answer) -> None:
        async def ask() -> None:
            assert self._options.voices is not None
            # Without an embedding all voices are the user's.
            answer(await _in_thread(self._options.voices, sound, "the embedding of a voice failed"))
            self._listening.go_on()

        self._start(ask())

    def _emit(self, event: Event) -> None:
        if not self._is_closed:
            self._events.put_nowait(event)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _require_open(self) -> None:
        if self._is_closed:
            raise InputError("the conversation is closed")


async def _in_thread(model: Callable[[Samples], Answered], sound: Samples, failure: str) -> Answered | None:
    """A model's answer about a sound, computed beside the event loop; None where it fails, which is logged."""
    try:
        return await asyncio.to_thread(model, sound)
    except Exception as error:
        log_failure(logger, error, failure)
        return None
