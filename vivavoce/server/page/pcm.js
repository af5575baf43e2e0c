// Sound as the wire has it: 16-bit little-endian samples at 24 kHz in base64.

export const WIRE_RATE = 24000;

export function toBase64(samples) {
  const view = new DataView(new ArrayBuffer(samples.length * 2));
  samples.forEach((sample, index) => {
    const clipped = Math.max(-1, Math.min(1, sample));
    view.setInt16(2 * index, Math.round(clipped < 0 ? clipped * 32768 : clipped * 32767), true);
  });
  return btoa(String.fromCharCode(...new Uint8Array(view.buffer)));
}

export function fromBase64(text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const view = new DataView(bytes.buffer);
  return Float32Array.from({ length: bytes.length >> 1 }, (_, index) => view.getInt16(2 * index, true) / 32768);
}

export function loudness(samples) {
  if (samples.length === 0) return 0;
  return Math.sqrt(samples.reduce((sum, sample) => sum + sample * sample, 0) / samples.length);
}
