// The introduction: what may be asked, in the page's language, and examples in those that the model knows.

import { LANGUAGES } from "./strings.js";

const GENERAL = ["example1", "example2", "example3"];
const EXAMPLES = 3; // in the first language; in each other one the last of these
const SCRIPTS = { zh: "zh-Hant" }; // on a page in another language

// Of a model of `/about`: { text, examples: [{ text, language }] }.
export function welcome(model, strings) {
  const own = strings.language.split("-")[0];
  const known = (model.languages ?? []).filter((code) => pageLanguage(code) in LANGUAGES);
  const knowsOwn = !known.length || known.includes(own);
  const codes = knowsOwn ? [own, ...known.filter((code) => code !== own)] : known;
  const introduction = model.introduction?.[strings.language] ?? strings.say("welcome");
  const parts = knowsOwn ? [introduction] : [introduction, strings.say("speakIn", { languages: names(known, strings.language) })];
  return {
    text: parts.join(own === "zh" ? "" : " "),
    examples: codes.flatMap((code, number) => {
      const language = code === own ? strings.language : pageLanguage(code);
      const texts = model.examples?.[language] ?? GENERAL.map((name) => strings.say(name, {}, language));
      return texts.slice(number ? EXAMPLES - 1 : 0, EXAMPLES).map((text) => ({ text, language }));
    }),
  };
}

function pageLanguage(code) {
  return SCRIPTS[code] ?? code;
}

function names(codes, language) {
  const names = new Intl.DisplayNames(language, { type: "language" });
  return new Intl.ListFormat(language, { type: "disjunction" }).format(codes.map((code) => names.of(code)));
}
