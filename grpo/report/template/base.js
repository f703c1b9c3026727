// Helpers for all sections of the page. Text from runs is only ever put into text nodes.
const DATA = JSON.parse(document.getElementById("data").textContent);
const RUNS = DATA.runs;

// el("td", {class: "number"}, "text", otherElement) -> an element.
function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  set(node, attributes || {});
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

function svg(tag, attributes, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  set(node, attributes);
  if (text !== undefined) node.textContent = text;
  return node;
}

function set(node, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
}

function runColour(index) {
  return "var(--run-" + (index % 6) + ")";
}

function isNumber(value) {
  return typeof value === "number" && isFinite(value);
}

function formatNumber(value) {
  if (!isNumber(value)) return "none";
  const size = Math.abs(value);
  if (value === 0 || Number.isInteger(value) && size < 1e6) return String(value);
  if (size >= 1e5 || size < 1e-3) return value.toExponential(2);
  return value.toFixed(size >= 100 ? 1 : size >= 10 ? 2 : size >= 1 ? 3 : 4);
}

function formatSigned(value) {
  return isNumber(value) ? (value > 0 ? "+" : value < 0 ? "\u2212" : "") + formatNumber(Math.abs(value)) : "none";
}

function formatPercent(value) {
  return (100 * value).toFixed(1) + "%";
}

function formatDuration(seconds) {
  if (seconds < 90) return seconds.toFixed(0) + " s";
  if (seconds < 5400) return (seconds / 60).toFixed(0) + " min";
  return (seconds / 3600).toFixed(1) + " h";
}

// Invisible characters, and characters that change how the text around them is displayed; shown as escapes like \u200b.
const ODD = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff\ufff9-\ufffb]/gu;

// Appends text to a node, with odd characters as marked escapes.
function appendText(node, text) {
  let from = 0;
  for (const match of text.matchAll(ODD)) {
    if (match.index > from) node.append(text.slice(from, match.index));
    const code = match[0].codePointAt(0).toString(16).padStart(4, "0");
    node.append(el("span", { class: "odd", title: "U+" + code.toUpperCase() }, "\\u" + code));
    from = match.index + match[0].length;
  }
  node.append(text.slice(from));
  return node;
}

// A prompt is plain text or chat messages as JSON.
function promptText(prompt) {
  if (typeof prompt !== "string") prompt = JSON.stringify(prompt);
  if (prompt.startsWith('[{"')) {
    try {
      return JSON.parse(prompt).map((message) => message.role + ": " + message.content).join("\n\n");
    } catch (error) {
      return prompt; // text that only looks like messages
    }
  }
  return prompt;
}

function labelled(text, control) {
  return el("label", {}, text, control);
}

function choice(label, options, onchange) {
  const select = el("select", { onchange: () => onchange(select.value), "aria-label": label });
  for (const [value, text] of options) select.append(el("option", { value }, text));
  return select;
}
