// Plays audio on the audio thread.

import { PlaybackBuffer } from "./playback-buffer.js";

class Playback extends AudioWorkletProcessor {
  constructor() {
    super();
    this.buffer = new PlaybackBuffer(sampleRate, (happening) => this.port.postMessage({ ...happening, at: currentTime }));
    this.port.onmessage = ({ data }) => {
      if (data.type === "push") this.buffer.push(data.item, data.samples);
      else if (data.type === "end") this.buffer.end(data.item);
      else this.buffer.clear();
    };
  }

  process(_, [output]) {
    this.buffer.pull(output[0]);
    for (const channel of output.slice(1)) channel.set(output[0]);
    return true;
  }
}

registerProcessor("playback", Playback);
