// What a visitor is told before the conversation: who answers, what may be asked, and whether it is recorded.

import { welcome } from "./welcome.js";

export class Visitor extends EventTarget {
  #parts; // { welcome, about, examples, recorded }
  #strings;
  #about = null;

  constructor(parts, strings) {
    super();
    this.#parts = parts;
    this.#strings = strings;
  }

  // The answer of `/about`, and the model that is chosen.
  show(about, chosen) {
    this.#about = { about, chosen };
    const models = about.models ?? [];
    const model = models.find(({ id }) => id === chosen) ?? models[0];
    this.#parts.recorded.hidden = !about.is_recorded;
    for (const part of [this.#parts.welcome, this.#parts.about]) part.hidden = !model;
    if (!model) return;
    const { text, examples } = welcome(model, this.#strings);
    this.#parts.welcome.textContent = text;
    this.#parts.about.textContent = this.#strings.say("about", {
      model: model.parts?.length ? model.parts.join(" → ") : model.id,
      stack: model.stack ? this.#strings.say("aboutStack", { stack: model.stack }) : "",
      size: model.parameters ? this.#strings.say("aboutSize", { size: this.#count(model.parameters) }) : "",
      languages: model.languages?.length ? this.#strings.say("aboutLanguages", { languages: this.#names(model.languages) }) : "",
    });
    this.#parts.examples.replaceChildren(...examples.map((example) => this.#chip(example)));
  }

  translate() {
    if (this.#about) this.show(this.#about.about, this.#about.chosen);
  }

  #count(parameters) {
    return new Intl.NumberFormat(this.#strings.language, { notation: "compact", maximumSignificantDigits: 2 }).format(parameters);
  }

  #names(languages) {
    const names = new Intl.DisplayNames(this.#strings.language, { type: "language" });
    return new Intl.ListFormat(this.#strings.language).format(languages.map((code) => names.of(code)));
  }

  #chip({ text, language }) {
    const item = document.createElement("li");
    const button = document.createElement("button");
    button.type = "button";
    button.lang = language;
    button.textContent = text;
    button.addEventListener("click", () => this.dispatchEvent(new CustomEvent("ask", { detail: text })));
    item.append(button);
    return item;
  }
}
