// The last seconds of microphone sound, kept until the server has surely heard them.

import { toBase64 } from "./pcm.js";

const KEPT_MS = 10000;
const PIECE_MS = 20;
const RESAMPLER_MS = 10;

export class UnheardSound {
  #pieces = []; // { endMs, audio }, oldest first
  #endMs = 0;

  // Keeps a piece; its form on the wire.
  add(samples) {
    const audio = toBase64(samples);
    this.#endMs += PIECE_MS;
    this.#pieces.push({ endMs: this.#endMs, audio });
    while (this.#pieces[0].endMs < this.#endMs - KEPT_MS) this.#pieces.shift();
    return audio;
  }

  // Pieces that the server lacks, which has heard so much. A few milliseconds may still be in its resampler.
  after(heardMs) {
    const missing = this.#pieces.filter((piece) => piece.endMs > heardMs + RESAMPLER_MS);
    this.#forgetGap(missing, heardMs);
    return missing.map((piece) => piece.audio);
  }

  // After a long break its beginning is not here any more: the sound goes on without it, for the server and for us.
  #forgetGap(missing, heardMs) {
    const lostMs = this.#endMs - heardMs - missing.length * PIECE_MS;
    if (lostMs < PIECE_MS) return;
    this.#endMs -= lostMs;
    for (const piece of this.#pieces) piece.endMs -= lostMs;
  }
}
