// The playback buffer: starts when enough audio is buffered, fades at the edges of gaps, and tracks the position.
//
// Every change is emitted as { type, item, ... }:
//   started   the first sample of the item is played now
//   progress  milliseconds of the item played so far, and their level
//   underrun  the audio was late; the next start waits for a larger buffer
//   dropped   milliseconds that exceeded the buffer and are not played
//   finished  the item was played to its end
//   cleared   the item was cut after these milliseconds

import { Resampler } from "./resampler.js";
import { WIRE_RATE, loudness } from "./pcm.js";

const START_MS = 80;
const MORE_PER_UNDERRUN_MS = 5;
const MOST_START_MS = 400;
const MOST_MS = 4000;
const FADE_MS = 8;
const REPORT_MS = 40;

export class PlaybackBuffer {
  constructor(rate, emit) {
    this.rate = rate;
    this.emit = emit;
    this.startMs = START_MS;
    this.fadeStep = 1000 / (FADE_MS * rate);
    this.items = []; // in the order of playback; the first one is being played
    this.isFlowing = false;
    this.gain = 1;
    this.tail = new Float32Array(0); // fade-out of audio that was cut
  }

  push(item, samples) {
    const track = this.#track(item);
    track.add(track.resampler.step(samples));
    this.#dropTooMuch();
  }

  end(item) {
    const track = this.items.find((known) => known.item === item);
    if (!track) return;
    track.add(track.resampler.flush());
    track.isWhole = true;
  }

  clear() {
    const [first] = this.items;
    if (!first) return;
    const fade = Math.min(first.waiting, Math.round(this.gain / this.fadeStep));
    this.tail = this.isFlowing ? first.take(fade).map((sample, index) => sample * (this.gain - index * this.fadeStep)) : this.tail;
    for (const track of this.items) this.emit({ type: "cleared", item: track.item, ms: this.#ms(track.position) });
    this.items = [];
    this.isFlowing = false;
    this.gain = 1;
  }

  // The next block of output.
  pull(out) {
    out.fill(0);
    out.set(this.tail.subarray(0, out.length));
    this.tail = this.tail.slice(out.length);
    let filled = 0;
    while (filled < out.length && this.items.length > 0 && this.#mayFlow()) {
      filled += this.#flow(out.subarray(filled));
    }
  }

  get waitingMs() {
    return this.#ms(this.items.reduce((sum, track) => sum + track.waiting, 0));
  }

  #mayFlow() {
    const [track] = this.items;
    if (!this.isFlowing && (track.isWhole || this.#ms(track.waiting) >= this.startMs)) {
      this.isFlowing = true;
      if (!track.hasStarted) this.emit({ type: "started", item: track.item });
      track.hasStarted = true;
    }
    return this.isFlowing;
  }

  // Writes into `out`; the number of samples written. Stops where the audio ends or underruns.
  #flow(out) {
    const [track] = this.items;
    const fadeSamples = 1 / this.fadeStep;
    const begin = track.position;
    let written = 0;
    while (written < out.length && track.waiting > 0) {
      const isDrying = !track.isWhole && track.waiting <= fadeSamples;
      this.gain = Math.min(1, Math.max(0, this.gain + (isDrying ? -this.fadeStep : this.fadeStep)));
      if (isDrying && this.gain === 0) break;
      out[written] = track.next() * this.gain;
      written += 1;
    }
    this.#report(track, begin, out.subarray(0, written));
    if (track.isWhole && track.waiting === 0) this.#finish(track);
    else if (written < out.length) this.#runDry(track);
    return written;
  }

  #finish(track) {
    this.items.shift();
    this.isFlowing = false;
    this.gain = 1;
    this.emit({ type: "progress", item: track.item, ms: this.#ms(track.position), level: 0 });
    this.emit({ type: "finished", item: track.item, ms: this.#ms(track.position) });
  }

  #runDry(track) {
    this.isFlowing = false;
    this.gain = 0;
    this.startMs = Math.min(this.startMs + MORE_PER_UNDERRUN_MS, MOST_START_MS);
    this.emit({ type: "underrun", item: track.item, ms: this.#ms(track.position) });
  }

  #report(track, begin, sound) {
    const step = (REPORT_MS * this.rate) / 1000;
    if (Math.floor(begin / step) === Math.floor(track.position / step)) return;
    this.emit({ type: "progress", item: track.item, ms: this.#ms(track.position), level: loudness(sound) });
  }

  #dropTooMuch() {
    for (const track of this.items) {
      const excess = Math.round(((this.waitingMs - MOST_MS) * this.rate) / 1000);
      if (excess <= 0) return;
      const dropped = track.take(Math.min(excess, track.waiting)).length;
      this.gain = 0;
      this.emit({ type: "dropped", item: track.item, ms: this.#ms(dropped) });
    }
  }

  #track(item) {
    const known = this.items.find((track) => track.item === item);
    if (known) return known;
    const track = new Track(item, new Resampler(WIRE_RATE, this.rate));
    this.items.push(track);
    return track;
  }

  #ms(samples) {
    return (samples * 1000) / this.rate;
  }
}

// The audio of one item.
class Track {
  constructor(item, resampler) {
    this.item = item;
    this.resampler = resampler;
    this.chunks = [];
    this.offset = 0; // in the first chunk
    this.waiting = 0;
    this.position = 0; // samples played or dropped
    this.isWhole = false;
    this.hasStarted = false;
  }

  add(samples) {
    if (samples.length > 0) this.chunks.push(samples);
    this.waiting += samples.length;
  }

  next() {
    const sample = this.chunks[0][this.offset];
    this.offset += 1;
    this.waiting -= 1;
    this.position += 1;
    if (this.offset === this.chunks[0].length) {
      this.chunks.shift();
      this.offset = 0;
    }
    return sample;
  }

  take(count) {
    return Float32Array.from({ length: count }, () => this.next());
  }
}
