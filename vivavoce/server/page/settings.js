// The controls, their session fields, and the stored choices. All other fields have the defaults of the server.

const STORE = "vivavoce.settings";

export class Settings extends EventTarget {
  #form;
  #strings;
  #chosen = stored(); // by the control's name

  constructor(form, strings) {
    super();
    this.#form = form;
    this.#strings = strings;
    for (const [name, value] of Object.entries(this.#chosen)) this.#set(name, value);
    form.addEventListener("input", () => this.#showSilence());
    form.addEventListener("change", ({ target }) => this.#choose(target));
    form.addEventListener("submit", (event) => event.preventDefault());
    this.#showSilence();
  }

  get model() {
    return this.#field("model").value;
  }

  get announces() {
    return this.#field("announce").checked;
  }

  // The choices as fields of a session object. Captions need the transcription of the input.
  get wanted() {
    const { voice, turnEnd, silence } = this.#chosen;
    const hasTurn = turnEnd !== undefined || silence !== undefined;
    return {
      output_modalities: [this.#field("answers").value],
      audio: {
        input: { transcription: { model: "default" }, ...(hasTurn && { turn_detection: this.#turnDetection() }) },
        ...(voice && { output: { voice } }),
      },
    };
  }

  // Sets the values that a control offers on this server.
  offer(name, values) {
    const select = this.#field(name);
    select.replaceChildren(...values.map((value) => new Option(value, value)));
    if (values.includes(this.#chosen[name])) select.value = this.#chosen[name];
    else delete this.#chosen[name];
    select.closest(".field").hidden = values.length === 0;
  }

  // The devices of a kind, by id and label; browsers name them once the microphone was allowed.
  offerDevices(name, devices) {
    const named = devices.filter(({ deviceId, label }) => deviceId && label);
    const select = this.#field(name);
    select.replaceChildren(...named.map(({ deviceId, label }) => new Option(label, deviceId)));
    if (named.some(({ deviceId }) => deviceId === this.#chosen[name])) select.value = this.#chosen[name];
    select.closest(".field").hidden = named.length === 0;
  }

  // The id of a chosen device; undefined: the browser's choice.
  device(name) {
    return this.#chosen[name];
  }

  translate() {
    this.#showSilence();
  }

  // Shows the values in force for controls without a choice.
  adopt(session) {
    const { turn_detection: turn } = session.audio.input;
    const inForce = { voice: session.audio.output?.voice };
    if (turn?.type === "server_vad") Object.assign(inForce, { turnEnd: "silence", silence: turn.silence_duration_ms });
    if (turn?.type === "semantic_vad") inForce.turnEnd = turn.eagerness === "auto" ? "medium" : turn.eagerness;
    for (const [name, value] of Object.entries(inForce)) {
      const isOption = this.#field(name).type === "range" || [...this.#field(name).options].some((option) => option.value === value);
      if (isOption && this.#chosen[name] === undefined) this.#set(name, value);
    }
    this.#showSilence();
  }

  #turnDetection() {
    const end = this.#field("turnEnd").value;
    return end === "silence"
      ? { type: "server_vad", silence_duration_ms: Number(this.#field("silence").value) }
      : { type: "semantic_vad", eagerness: end };
  }

  #showSilence() {
    const silence = this.#field("silence");
    silence.disabled = this.#field("turnEnd").value !== "silence";
    const text = this.#strings.say("milliseconds", { ms: silence.value });
    silence.setAttribute("aria-valuetext", text);
    this.#form.querySelector("output").textContent = text;
  }

  #choose(field) {
    this.#chosen[field.name] = field.type === "checkbox" ? field.checked : field.value;
    store(this.#chosen);
    this.#showSilence();
    const isOwn = ["model", "microphone", "loudspeaker"].includes(field.name);
    this.dispatchEvent(new Event(isOwn ? field.name : "change"));
  }

  #set(name, value) {
    const field = this.#field(name);
    if (field?.type === "checkbox") field.checked = value;
    else if (field) field.value = value;
  }

  #field(name) {
    return this.#form.elements[name];
  }
}

function store(chosen) {
  try {
    localStorage.setItem(STORE, JSON.stringify(chosen));
  } catch {
    // a browser without storage: the choice lasts as long as the page
  }
}

function stored() {
  try {
    return JSON.parse(localStorage.getItem(STORE)) ?? {};
  } catch {
    return {};
  }
}
