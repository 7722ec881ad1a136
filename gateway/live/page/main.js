// The page: what the gateway tells goes to its parts; keys and switches.
import { $, make } from "./elements.js";
import { showSessions, showTotals, showWorkers, Updates } from "./fleet.js";
import { History } from "./history.js";
import { Link } from "./link.js";
import { Log } from "./log.js";
import { Streams } from "./streams.js";

const SILENT_S = 4, THEMES = ["auto", "light", "dark"];
const SECTIONS = ["workers", "time", "streams", "weights", "sessions", "events"];
const log = new Log(), history = new History(), updates = new Updates();
let streams = null, heardAt = 0, isFrozen = false, latest = null;
$("updates").dataset.empty = "None since this page was opened.";

const told = {
  hello(event) {
    $("fleet").textContent = event.fleet ? "fleet " + event.fleet.slice(0, 8) : "";
    log.sentences = event.faults;
    streams?.clear();
    streams = new Streams(event.max_streams);
  },
  frame(event) {
    alarm("");
    latest = event;
    const now_s = performance.now() / 1000;
    history.add(event, now_s);
    showTotals(event);
    showWorkers(event);
    showSessions(event);
    updates.show(event, now_s);
    log.faults(event.faults);
  },
  silent(event) { alarm("The router does not answer: " + event.why); },
  happened(event) { for (const each of event.events) log.add(each.level, each.who, each.what); },
  tokens(event) { streams.show(event.streams); },
  skipped(event) {
    const what = Object.entries(event).filter(([name, n]) => name !== "kind" && n).map(([name, n]) => n + " " + name);
    log.add("warning", "page", "was too slow and missed " + what.join(", "));
  },
};

const link = new Link(event => {
  heardAt = performance.now();
  if (!isFrozen || event.kind === "hello") told[event.kind]?.(event);
}, (state, why) => {
  const shown = { live: ["live", "good"], lost: ["reconnecting", "warn"], locked: ["needs a key", "warn"] }[state];
  $("link").textContent = shown[0];
  $("link").className = "chip " + shown[1];
  if (state === "lost") alarm(why);
  if (state === "locked") askForKey(why);
});

function alarm(text) {
  $("alarm").hidden = !text;
  if ($("alarm").textContent !== text) $("alarm").textContent = text;
}

function askForKey(why) {
  $("why").textContent = why;
  if (!$("ask").open) $("ask").showModal();
}
$("ask").addEventListener("close", () => {
  const key = $("key").value.trim();
  $("key").value = "";
  if (key) link.use(key);
});

function freeze() {
  isFrozen = !isFrozen;
  $("freeze").setAttribute("aria-pressed", isFrozen);
  if (!isFrozen) link.open();  // what came meanwhile is gone: begin anew
}
function showTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  $("theme").replaceChildren(make("u", { text: "T" }), "heme: " + theme);
  localStorage.setItem("theme", theme);
  history.draw();
}
const theme = () => localStorage.getItem("theme") ?? "auto";
const nextTheme = () => showTheme(THEMES[(THEMES.indexOf(theme()) + 1) % THEMES.length]);

const KEYS = {
  "?": ["these keys", () => $("about").showModal()],
  t: ["theme: auto, light, dark", nextTheme],
  p: ["pause the page, and go on; the fleet does not notice", freeze],
  "/": ["choose streams by request or worker", () => $("match").focus()],
  e: ["which events", () => log.nextLevel()],
  "+": ["shorter time", () => history.zoom(-1)],
  "-": ["longer time", () => history.zoom(1)],
};
SECTIONS.forEach((id, n) => { KEYS[n + 1] = ["to: " + $("h-" + id).firstChild.textContent.trim(), () => $(id).focus()]; });
for (const [key, [what]] of Object.entries(KEYS))
  $("about").querySelector(".keys").append(make("dt", {}, make("kbd", { text: key })), make("dd", { text: what }));

document.addEventListener("keydown", event => {
  const isTyping = ["INPUT", "SELECT"].includes(event.target.tagName) || document.querySelector("dialog[open]");
  if (event.target === $("match") && event.key === "Escape") $("match").blur();
  if (isTyping || event.ctrlKey || event.metaKey || event.altKey) return;
  const known = KEYS[event.key === "=" ? "+" : event.key];
  if (known) { known[1](); event.preventDefault(); }
});
$("help").addEventListener("click", KEYS["?"][1]);
$("theme").addEventListener("click", nextTheme);
$("freeze").addEventListener("click", freeze);
$("nearer").addEventListener("click", () => history.zoom(-1));
$("farther").addEventListener("click", () => history.zoom(1));
$("match").closest("form").addEventListener("submit", event => event.preventDefault());
$("match").addEventListener("change", () => { link.match = $("match").value.trim(); link.open(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => history.draw());
setInterval(() => {
  if (latest && !isFrozen && performance.now() - heardAt > SILENT_S * 1000) alarm("Nothing has come for a while: this is how it was.");
}, 1000);

showTheme(theme());
link.open();
