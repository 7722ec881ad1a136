// Runs the script of a timeline page on a stage of cardboard: enough of a browser to draw, point,
// zoom and move, without one. Prints one JSON object: what was drawn and what was said.
"use strict";
const fs = require("fs");
const html = fs.readFileSync(process.argv[2], "utf8");
const data = html.match(/<script type="application\/json" id="data">([\s\S]*?)<\/script>/)[1];
const code = html.match(/<script>\n([\s\S]*?)<\/script>/)[1];

let drawn = { fillRect: 0, fillText: [] };
const pen = () => new Proxy({}, {
  get: (held, name) => {
    if (name === "measureText") return text => ({ width: 6 * text.length });
    if (name === "fillText") return text => { drawn.fillText.push(text); };
    if (name === "fillRect") return (x, y, w, h) => {
      if (![x, y, w, h].every(Number.isFinite)) throw new Error(`fillRect ${[x, y, w, h]}`);
      drawn.fillRect++;
    };
    return name in held ? held[name] : () => ({});
  },
  set: (held, name, value) => { held[name] = value; return true; },
});
const heard = {};
const element = () => {
  const context = pen();
  return { style: {}, children: [], textContent: "", offsetWidth: 100, offsetHeight: 40, focus() {},
    append(...some) { this.children.push(...some); }, getContext: () => context,
    addEventListener(name, act) { heard[name] = act; } };
};
const elements = Object.fromEntries(
  ["chart", "tip", "title", "notes", "legend"].map(id => [id, element()]));
elements.data = { textContent: data };
global.document = { getElementById: id => elements[id], createElement: element,
  documentElement: { clientWidth: 1200 } };
global.window = { devicePixelRatio: 2, innerHeight: 800, addEventListener() {} };

new Function(code)();
drawn = { fillRect: 0, fillText: [] };
heard.dblclick();
const whole = drawn;
const tips = new Set();
for (let y = 0; y < 500; y += 3) for (let x = 92; x < 1192; x += 3) {
  heard.pointermove({ offsetX: x, offsetY: y, clientX: x, clientY: y });
  if (elements.tip.style.display === "block") tips.add(elements.tip.textContent);
}
drawn = { fillRect: 0, fillText: [] };
const wheel = { preventDefault() {}, deltaX: 0, deltaY: -1, offsetX: 600, shiftKey: false };
for (let n = 0; n < 60; n++) heard.wheel(wheel);
heard.keydown({ key: "ArrowRight", preventDefault() {} });
drawn = { fillRect: 0, fillText: [] };
heard.keydown({ key: "-", preventDefault() {} });
const near = drawn;
drawn = { fillRect: 0, fillText: [] };
heard.dblclick();
process.stdout.write(JSON.stringify({
  title: elements.title.textContent,
  notes: elements.notes.children.map(each => each.textContent),
  legend: elements.legend.children.map(each => each.children[1]),
  tips: [...tips], whole, near, again: drawn,
}));
