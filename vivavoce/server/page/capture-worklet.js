// Captures microphone audio on the audio thread, in chunks of 20 ms at the rate of the protocol.

import { Resampler } from "./resampler.js";
import { WIRE_RATE, loudness } from "./pcm.js";
import { VoiceGate } from "./voice-gate.js";

const PIECE = WIRE_RATE / 50;

class Capture extends AudioWorkletProcessor {
  constructor() {
    super();
    this.resampler = new Resampler(sampleRate, WIRE_RATE);
    this.gate = new VoiceGate();
    this.piece = new Float32Array(PIECE);
    this.filled = 0;
  }

  process([input]) {
    if (!input[0]) return true;
    for (const sample of this.resampler.step(input[0])) {
      this.piece[this.filled++] = sample;
      if (this.filled === PIECE) this.#give();
    }
    return true;
  }

  #give() {
    const level = loudness(this.piece);
    const at = currentTime;
    this.port.postMessage({ samples: this.piece, level, isVoiced: this.gate.hears(level), at }, [this.piece.buffer]);
    this.piece = new Float32Array(PIECE);
    this.filled = 0;
  }
}

registerProcessor("capture", Capture);
