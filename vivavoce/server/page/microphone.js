// The microphone: requests access, and emits its audio in chunks of 20 ms at 24 kHz.

export class Microphone extends EventTarget {
  #context;
  #device; // its id; undefined: the browser's choice
  #stream = null;
  #source = null;
  #node = null;
  lastVoicedAt = null; // in the time of the audio context

  constructor(context, device) {
    super();
    this.#context = context;
    this.#device = device;
  }

  async open() {
    if (!navigator.mediaDevices) throw new DOMException("only https and localhost have microphones", "SecurityError");
    this.#stream = await navigator.mediaDevices.getUserMedia({
      audio: { echoCancellation: true, noiseSuppression: true, autoGainControl: true, channelCount: 1, ...(this.#device && { deviceId: { ideal: this.#device } }) },
    });
    await this.#context.audioWorklet.addModule("capture-worklet.js");
    this.#source = this.#context.createMediaStreamSource(this.#stream);
    this.#node = new AudioWorkletNode(this.#context, "capture", { numberOfOutputs: 0, channelCount: 1, channelCountMode: "explicit" });
    this.#node.port.onmessage = ({ data }) => this.#onAudio(data);
    this.#source.connect(this.#node);
    this.#stream.getAudioTracks()[0].addEventListener("ended", () => this.dispatchEvent(new Event("lost")));
  }

  // A muted microphone emits silence, so that the audio clock of the server advances.
  set isMuted(isMuted) {
    for (const track of this.#stream?.getAudioTracks() ?? []) track.enabled = !isMuted;
  }

  close() {
    this.#source?.disconnect();
    if (this.#node) this.#node.port.onmessage = null;
    for (const track of this.#stream?.getTracks() ?? []) track.stop();
  }

  #onAudio(piece) {
    if (piece.isVoiced) this.lastVoicedAt = piece.at;
    this.dispatchEvent(new CustomEvent("sound", { detail: piece }));
  }
}
