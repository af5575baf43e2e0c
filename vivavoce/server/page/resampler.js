// A streaming resampler: a windowed-sinc filter for every phase of the two rates.

const LOBES = 24; // zero crossings on each side; at 24 kHz the filter looks one millisecond ahead
const CUTOFF = 0.9; // of the lower rate's half, so that the filter is closed where aliases would begin
const KAISER_BETA = 7;

export class Resampler {
  constructor(from, to) {
    const divisor = greatestCommonDivisor(from, to);
    this.up = to / divisor;
    this.down = from / divisor;
    this.reach = Math.ceil(LOBES * Math.max(1, from / to));
    this.filters = from === to ? null : phaseFilters(this.up, this.reach, Math.min(1, to / from) * CUTOFF);
    this.reset();
  }

  reset() {
    this.held = new Float32Array(this.reach); // silence before the first sample
    this.position = 0; // of the next output sample, in steps of 1/up input samples after `held`'s centre
  }

  // All output samples that the input so far determines.
  step(samples) {
    if (!this.filters) return samples;
    const sound = joined(this.held, samples);
    const room = sound.length - 2 * this.reach;
    const count = Math.max(0, Math.ceil((room * this.up - this.position) / this.down));
    const out = new Float32Array(count);
    for (let index = 0; index < count; index++) {
      const phase = this.position % this.up;
      out[index] = dot(this.filters[phase], sound, (this.position - phase) / this.up);
      this.position += this.down;
    }
    const used = Math.min(Math.floor(this.position / this.up), Math.max(room, 0));
    this.position -= used * this.up;
    this.held = sound.slice(used);
    return out;
  }

  // The last output samples, after the end of the input.
  flush() {
    return this.filters ? this.step(new Float32Array(this.reach)) : new Float32Array(0);
  }
}

function phaseFilters(phases, reach, cutoff) {
  return Array.from({ length: phases }, (_, phase) => {
    const taps = new Float32Array(2 * reach);
    let sum = 0;
    for (let tap = 0; tap < taps.length; tap++) {
      const distance = tap - reach - phase / phases;
      taps[tap] = sinc(cutoff * distance) * kaiser(distance / reach);
      sum += taps[tap];
    }
    return taps.map((value) => value / sum);
  });
}

function dot(taps, sound, begin) {
  let sum = 0;
  for (let tap = 0; tap < taps.length; tap++) sum += taps[tap] * sound[begin + tap];
  return sum;
}

function joined(first, second) {
  const all = new Float32Array(first.length + second.length);
  all.set(first);
  all.set(second, first.length);
  return all;
}

function sinc(x) {
  return x === 0 ? 1 : Math.sin(Math.PI * x) / (Math.PI * x);
}

function kaiser(x) {
  return Math.abs(x) > 1 ? 0 : bessel(KAISER_BETA * Math.sqrt(1 - x * x)) / bessel(KAISER_BETA);
}

function bessel(x) {
  let sum = 1;
  for (let k = 1, term = 1; term > sum * 1e-12; k++) sum += term *= (x / (2 * k)) ** 2;
  return sum;
}

function greatestCommonDivisor(a, b) {
  return b === 0 ? a : greatestCommonDivisor(b, a % b);
}
