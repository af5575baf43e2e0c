// The microphone: asks for it, and gives its sound in pieces of 20 ms at 24 kHz.

export class Microphone extends EventTarget {
  #context;
  #stream = null;
  #source = null;
  #node = null;
  lastVoicedAt = null; // in the audio context's time

  constructor(context) {
    super();
    this.#context = context;
  }

  async open() {
    if (!navigator.mediaDevices) throw new DOMException("only https and localhost have microphones", "SecurityError");
    this.#stream = await navigator.mediaDevices.getUserMedia({
      audio: { echoCancellation: true, noiseSuppression: true, autoGainControl: true, channelCount: 1 },
    });
    await this.#context.audioWorklet.addModule("capture-worklet.js");
    this.#source = this.#context.createMediaStreamSource(this.#stream);
    this.#node = new AudioWorkletNode(this.#context, "capture", { numberOfOutputs: 0, channelCount: 1, channelCountMode: "explicit" });
    this.#node.port.onmessage = ({ data }) => this.#heard(data);
    this.#source.connect(this.#node);
    this.#stream.getAudioTracks()[0].addEventListener("ended", () => this.dispatchEvent(new Event("lost")));
  }

  // A muted microphone gives silence, so that the server still hears time pass.
  set isMuted(isMuted) {
    for (const track of this.#stream?.getAudioTracks() ?? []) track.enabled = !isMuted;
  }

  close() {
    this.#source?.disconnect();
    if (this.#node) this.#node.port.onmessage = null;
    for (const track of this.#stream?.getTracks() ?? []) track.stop();
  }

  #heard(piece) {
    if (piece.isVoiced) this.lastVoicedAt = piece.at;
    this.dispatchEvent(new CustomEvent("sound", { detail: piece }));
  }
}
