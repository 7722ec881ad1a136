// Paints spans of a lane on a canvas. The page defines `colours`: { versions: [...], KIND: colour }.
const HATCHED = { paused: "/", asleep: ".", draining: "\\", frozen: "o", torn: "+", broken: "+",
                  starting: "-", gone: "x", lost: "/", unrecorded: "x", blocked: "\\", behind: "." };
const hatches = new Map();

const ofVersion = v => colours.versions[v % colours.versions.length];
const inkOn = c => {
  const [r, g, b] = [1, 3, 5].map(i => parseInt(c.slice(i, i + 2), 16));
  return 0.299 * r + 0.587 * g + 0.114 * b > 140 ? "#000" : "#fff";
};

function hatch(pen, kind, colour) {
  const key = kind + colour;
  if (hatches.has(key)) return hatches.get(key);
  const tile = document.createElement("canvas");
  tile.width = tile.height = 8;
  const p = tile.getContext("2d");
  p.strokeStyle = p.fillStyle = colour;
  const line = (a, b, c, d) => { p.beginPath(); p.moveTo(a, b); p.lineTo(c, d); p.stroke(); };
  if ("/x".includes(kind)) { line(-1, 9, 9, -1); line(-1, 1, 1, -1); line(7, 9, 9, 7); }
  if ("\\x".includes(kind)) { line(-1, -1, 9, 9); line(7, -1, 9, 1); line(-1, 7, 1, 9); }
  if ("+-".includes(kind)) line(0, 4, 8, 4);
  if (kind === "+") line(4, 0, 4, 8);
  if (kind === ".") { p.beginPath(); p.arc(4, 4, 1.2, 0, 7); p.fill(); }
  if (kind === "o") { p.beginPath(); p.arc(4, 4, 2.5, 0, 7); p.stroke(); }
  hatches.set(key, pen.createPattern(tile, "repeat"));
  return hatches.get(key);
}

function fillOf(kind, version) {
  if (kind === "decode" || kind === "version" || kind === "publish") return ofVersion(version);
  return colours[kind] ?? "#ffffff";
}

// One rectangle: hatched where nothing is sampled, else in its colour. `look`: ink, paper and line.
function paintSpan(pen, box, span, label, look) {
  const sign = HATCHED[span.kind];
  if (sign) {
    pen.fillStyle = hatch(pen, sign, span.kind === "gone" ? look.faint : look.line);
    pen.fillRect(box.left, box.top, box.wide, box.tall);
    pen.strokeStyle = look.line; pen.lineWidth = 1;
    pen.strokeRect(box.left + .5, box.top + .5, Math.max(box.wide - 1, 0), box.tall - 1);
  } else {
    pen.fillStyle = fillOf(span.kind, span.version);
    pen.fillRect(box.left, box.top, box.wide > 3 ? box.wide - .6 : box.wide, box.tall);
  }
  if (!label || pen.measureText(label).width + 6 >= box.wide) return;
  const middle = box.left + box.wide / 2;
  if (sign) {
    const half = pen.measureText(label).width / 2 + 5;
    pen.fillStyle = look.paper;
    pen.fillRect(middle - half, box.top + box.tall / 2 - 8, 2 * half, 16);
  }
  pen.fillStyle = sign ? look.ink : inkOn(fillOf(span.kind, span.version));
  pen.textAlign = "center"; pen.textBaseline = "middle";
  pen.fillText(label, middle, box.top + box.tall / 2);
}
