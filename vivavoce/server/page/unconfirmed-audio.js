// The last seconds of microphone audio, stored until the server has confirmed them.

import { toBase64 } from "./pcm.js";

const STORED_MS = 10000;
const PIECE_MS = 20;
const RESAMPLER_MS = 10;

export class UnconfirmedAudio {
  #pieces = []; // { endMs, audio }, oldest first
  #endMs = 0;

  // Stores a chunk; returns its base64 encoding.
  add(samples) {
    const audio = toBase64(samples);
    this.#endMs += PIECE_MS;
    this.#pieces.push({ endMs: this.#endMs, audio });
    while (this.#pieces[0].endMs < this.#endMs - STORED_MS) this.#pieces.shift();
    return audio;
  }

  // Chunks after the milliseconds that the server has received. A few milliseconds may still be in its resampler.
  after(receivedMs) {
    const missing = this.#pieces.filter((piece) => piece.endMs > receivedMs + RESAMPLER_MS);
    this.#closeGap(missing, receivedMs);
    return missing.map((piece) => piece.audio);
  }

  // After a long disconnect the oldest audio is no longer stored: both sides continue without it.
  #closeGap(missing, receivedMs) {
    const lostMs = this.#endMs - receivedMs - missing.length * PIECE_MS;
    if (lostMs < PIECE_MS) return;
    this.#endMs -= lostMs;
    for (const piece of this.#pieces) piece.endMs -= lostMs;
  }
}
