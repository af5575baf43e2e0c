// Whether 20 ms of microphone audio are above the noise floor. Used only to show latency; the server detects turns.

const SILENCE = 0.003; // about -50 dBFS
const ABOVE_ROOM = 4; // 12 dB
const ROOM_RISES = 1.01; // per 20 ms: the noise floor adapts within seconds

export class VoiceGate {
  constructor() {
    this.room = SILENCE;
  }

  hears(level) {
    this.room = Math.max(1e-5, Math.min(this.room * ROOM_RISES, level, 0.02));
    return level > Math.max(SILENCE, this.room * ABOVE_ROOM);
  }
}
