// Elements out of texts. Whatever models, users or peers say becomes text, never HTML.
export const $ = id => document.getElementById(id);

export function make(tag, { text, className, title, style, data } = {}, ...children) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  if (className) element.className = className;
  if (title) element.title = title;
  for (const [name, value] of Object.entries(style ?? {})) element.style.setProperty(name, value);
  Object.assign(element.dataset, data ?? {});
  element.append(...children);
  return element;
}

export function versionStyle(version) {
  const colour = ofVersion(version);
  return { "--v": colour, "--on": inkOn(colour) };
}
export const versionChip = version =>
  make("span", { text: "v" + version, className: "chip version", style: versionStyle(version) });

export const number = (n, digits = 0) =>
  n.toLocaleString("en", { maximumFractionDigits: digits, minimumFractionDigits: digits });
export const bar = (part, fill) =>
  make("meter-bar", { style: { "--part": Math.min(Math.max(part, 0), 1), ...(fill ? { "--fill": fill } : {}) } });
export const seconds = s => s < 10 ? s.toFixed(1) + " s" : s < 90 ? Math.round(s) + " s" : Math.round(s / 60) + " min";
