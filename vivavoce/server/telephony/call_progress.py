"""What is heard on an outgoing call: tones of the telephone network before and after the answer, and what has answered.

It has no clock but the audio: 20 ms of it are 20 ms.
"""

from collections.abc import Callable
from typing import Literal

import numpy as np

from vivavoce.audio.answering_machine import Answer, AnsweringMachineDetector
from vivavoce.audio.tone_detection import CallProgressDetector
from vivavoce.dialogue.items import Samples

AnsweringMachinePolicy = Literal["ignore", "report", "hang_up", "leave_message"]

TONE_SECONDS = 30.0  # after the answer, in which tones of the network are looked for
PERSON_SECONDS = 30.0  # after the answer, in which a beep still shows a machine
BEEP_SECONDS = 60.0  # after which a message is spoken without a beep


class CallProgress:
    """Follows the audio of a call that we have placed.

    With the policies `hang_up` and `leave_message` the session hears nothing until it is known what has answered; the
    greeting of a person is then heard at once, the recording of a machine never. `leave_message` opens the call to the
    session after the beep.
    """

    def __init__(
        self,
        rate: int,
        policy: AnsweringMachinePolicy,
        feed: Callable[[Samples], None],
        on_tone: Callable[[str], None],
        on_answer: Callable[[Answer], None],
    ) -> None:
        """`on_tone` gets ringback, busy, congestion and special information, each time that one is certain."""
        self._rate, self._policy = rate, policy
        self._feed, self._on_tone, self._on_answer = feed, on_tone, on_answer
        self._tones = CallProgressDetector(rate)
        self._machine = AnsweringMachineDetector(rate)
        self._is_answered, self._seconds = False, 0.0
        self._held: list[Samples] = []
        self.answer: Answer | None = None
        """What has answered; `beep` once a machine records."""
        self.is_open = policy in ("ignore", "report")
        """Whether the session hears the call, and may speak."""

    def note_answer(self) -> None:
        """The call was answered; what was heard before is early media."""
        self._is_answered = True
        self._tones = CallProgressDetector(self._rate)

    def hear(self, samples: Samples) -> None:
        """Follow the next samples of the peer."""
        self._seconds += self._is_answered * len(samples) / self._rate
        if self._seconds < TONE_SECONDS:
            for tone in self._tones.step(samples):
                self._on_tone(tone)
        if not self._is_answered:
            return
        if self._policy != "ignore" and self._seconds < self._watch_seconds:
            self._watch(samples)
        self._pass_on(samples)

    @property
    def _watch_seconds(self) -> float:
        return BEEP_SECONDS if self.answer == "machine" else PERSON_SECONDS

    def _watch(self, samples: Samples) -> None:
        """Look for speech and a beep. A telephone that rings on after the answer is no greeting."""
        is_ringing = self._tones.is_sounding and not self._machine.has_heard_speech
        for answer in self._machine.step(np.zeros_like(samples) if is_ringing else samples):
            if self.answer == "beep":
                return
            self.answer = answer
            if answer in ("person", "silence"):
                self.is_open = True
            elif answer == "machine":
                self._held.clear()
            elif self._policy == "leave_message":
                self._held.clear()
                self.is_open = True
            self._on_answer(answer)

    def _pass_on(self, samples: Samples) -> None:
        if not self.is_open and self._policy == "leave_message" and self._seconds >= BEEP_SECONDS:
            self.is_open = True
            self._on_answer("beep")
        if not self.is_open:
            if self.answer is None:
                self._held.append(samples)
            return
        for each in self._held:
            self._feed(each)
        self._held.clear()
        self._feed(samples)
