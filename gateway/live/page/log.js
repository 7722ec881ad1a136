// What happened, latest first, and how often the router saw each fault since it began.
import { $, make, number } from "./elements.js";

const KEPT = 200;

export class Log {
  constructor() {
    $("log").dataset.empty = "Nothing has happened since this page was opened.";
    $("level").addEventListener("change", () => { $("log").dataset.level = $("level").value; });
    this.sentences = {};
  }

  add(level, who, what) {
    const time = new Date().toLocaleTimeString("en-GB");
    const newest = $("log").firstElementChild;
    if (newest?.dataset.same === level + who + what) newest.remove();
    $("log").prepend(make("li", { className: level, data: { same: level + who + what } },
      make("time", { text: time, className: "faint" }), make("span", {}, make("b", { text: who }), " " + what)));
    while ($("log").childElementCount > KEPT) $("log").lastElementChild.remove();
  }

  faults(counted) {
    $("faults").replaceChildren(...Object.entries(counted).map(([name, n]) =>
      make("span", { className: "chip bad", text: name.replaceAll("_", " ") + " " + number(n), title: this.sentences[name] ?? "" })));
  }

  nextLevel() {
    const select = $("level");
    select.selectedIndex = (select.selectedIndex + 1) % select.length;
    select.dispatchEvent(new Event("change"));
  }
}
