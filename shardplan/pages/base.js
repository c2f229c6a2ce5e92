"use strict";
// What all pages have in common: elements, texts, chips of layouts, trees, searches.
// Every text from the program goes into the page as text (`textContent`), never as HTML.

const D = JSON.parse(document.getElementById("data").textContent);
const AXIS = ["#4e79a7", "#c26a12", "#3f8a36", "#c8393c", "#2f8f89", "#8a6d00", "#8e5a8e", "#7d5a44"];
const KIND = { "all-gather": "#4e79a7", "all-reduce": "#c8393c", "reduce-scatter": "#3f8a36", "all-to-all": "#c26a12" };
const DEVICES = D.mesh.reduce((product, axis) => product * axis[1], 1);
const byId = (id) => document.getElementById(id);

// ---- elements and texts

function el(tag, attributes, ...children) {
  const svg = ["svg", "g", "rect", "text", "title"].includes(tag);
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(made.style, value);
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value);
  }
  made.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return made;
}

const number = (value, digits) =>
  value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
function size(bytes) {
  if (bytes >= 1e9) return number(bytes / 1e9, 2) + " GB";
  if (bytes >= 5e4) return number(bytes / 1e6, 1) + " MB";
  if (bytes >= 999.5) return number(bytes / 1e3, 1) + " kB";
  return Math.round(bytes) + " B";
}
function time(nanoseconds) {
  if (nanoseconds >= 1e9) return number(nanoseconds / 1e9, 3) + " s";
  if (nanoseconds >= 1e5) return number(nanoseconds / 1e6, 2) + " ms";
  return number(nanoseconds / 1e3, 1) + " µs";
}
function percent(share) {
  if (share > 0 && share < 1e-6) return "under 0.0001 %";
  return number(100 * share, share < 0.001 && share > 0 ? 4 : 1) + " %";
}
// Round values between two others, about so many.
function ticks(from, until, count) {
  const rough = (until - from) / count, power = 10 ** Math.floor(Math.log10(rough)), step = power * [1, 2, 5, 10].find((one) => one * power >= rough), found = [];
  for (let tick = Math.ceil(from / step); tick * step <= until; tick++) found.push(tick * step);
  return found;
}
const text = (index) => D.texts[index];
const moduleNames = (index) => D.modules[index].map(text);
const times = (count) => (count > 1 ? el("span", { class: "times" }, "×" + number(count, 0)) : "");
const breakable = (said) => said.split("/").flatMap((part, place) => (place ? ["/", el("wbr"), part] : [part]));
const axesText = (axes) => axes.map((axis) => D.mesh[axis][0]).join(", ");

// ---- layouts: a chip per dimension, and the mesh with the block of each device

function axisChip(axis) {
  return el("i", { style: { background: AXIS[axis % AXIS.length] } }, D.mesh[axis][0]);
}

function tensorChips(type, layout) {
  if (type < 0) return "";
  const [dtype, shape] = D.types[type];
  if (layout < 0) return el("span", { class: "dtype" }, `${dtype}[${shape.join(", ")}]`);
  const [pending, dims] = D.layouts[layout];
  const chips = shape.map((length, dim) => el("span", { class: "chip" }, String(length), (dims[dim] || []).map(axisChip)));
  const partial = pending.length ? [el("span", { class: "chip" }, "sum over", pending.map(axisChip))] : [];
  const hover = D.one_mesh === false ? {} : { tabindex: 0, "data-layout": layout };
  return el("span", { class: "chips", ...hover },
    el("span", { class: "dtype" }, dtype), chips, partial, shape.length ? "" : el("span", { class: "chip" }, "scalar"));
}

function coordinates(device) {
  const found = [];
  for (let axis = D.mesh.length - 1; axis >= 0; axis--) {
    found[axis] = device % D.mesh[axis][1];
    device = Math.floor(device / D.mesh[axis][1]);
  }
  return found;
}

function meshDrawing(layout) {
  const [pending, dims] = D.layouts[layout], columns = DEVICES / (D.mesh.length > 1 ? D.mesh[0][1] : 1);
  const shown = Math.min(DEVICES, 64), blocks = new Map();
  const cells = [];
  for (let device = 0; device < shown; device++) {
    const at = coordinates(device), block = dims.map((axes) => axes.map((axis) => at[axis]).join(".") || "0").join(",");
    if (!blocks.has(block)) blocks.set(block, blocks.size);
    const hue = Math.round((360 * blocks.get(block)) / 8.6) % 360;
    cells.push(el("i", { style: { background: `hsl(${hue} 45% 42%)` } }, String(blocks.get(block))));
  }
  const split = dims.flat().length;
  const said = split ? `${blocks.size}${shown < DEVICES ? " or more" : ""} blocks on ${DEVICES} devices` : `whole on each of ${DEVICES} devices`;
  return [el("div", {}, said + (pending.length ? `, to be summed over ${axesText(pending)}` : "")),
    el("div", { class: "faint" }, D.mesh.map(([name, length]) => `${name}=${length}`).join(" × ") + (shown < DEVICES ? `, the first ${shown}` : "")),
    el("div", { class: "grid", style: { gridTemplateColumns: `repeat(${Math.min(columns, 16)}, 22px)` } }, cells)];
}

function showTip(target, x, y) {
  const tip = byId("tip");
  tip.replaceChildren(...meshDrawing(Number(target.dataset.layout)));
  tip.hidden = false;
  tip.style.left = Math.max(4, Math.min(x + 12, innerWidth - tip.offsetWidth - 8)) + "px";
  tip.style.top = Math.max(4, Math.min(y + 14, innerHeight - tip.offsetHeight - 8)) + "px";
}
function withTips() {
  const chips = (event) => event.target.closest && event.target.closest(".chips[tabindex]");
  document.addEventListener("mouseover", (event) => {
    const target = chips(event);
    if (target) showTip(target, event.clientX, event.clientY);
    else byId("tip").hidden = true;
  });
  document.addEventListener("focusin", (event) => {
    const target = chips(event), box = target && target.getBoundingClientRect();
    if (target && target.matches(":focus-visible")) showTip(target, box.left, box.bottom);
    else byId("tip").hidden = true;
  });
}

// ---- a table of a tree: arrows move and open, Enter goes to the details

function treeTable(header, roots, label) {
  const body = el("tbody", {}), numbers = header.map((name) => name.endsWith("#"));
  const table = el("table", { role: "treegrid", "aria-label": label },
    el("thead", {}, el("tr", {}, header.map((name) => el("th", { class: name.endsWith("#") ? "number" : null }, name.replace("#", ""))))), body);
  const shown = [];
  function append(node, level) {
    const open = node.children.length > 0;
    const name = el("td", { style: { paddingLeft: 8 + 16 * level + "px" } },
      el("span", { class: "twisty" }, open ? (node.open ? "▾" : "▸") : ""), el("span", { class: open ? "folder" : null }, node.name), times(node.count));
    const cells = node.cells().map((cell, column) => el("td", { class: numbers[column + 1] ? "number" : null }, cell));
    const row = el("tr", { role: "row", tabindex: shown.length ? -1 : 0, "aria-level": level + 1, "aria-expanded": open ? String(!!node.open) : null, "data-go": node.go || null }, name, cells);
    shown.push({ node, level, row });
    body.append(row);
    if (open && node.open) node.children.forEach((child) => append(child, level + 1));
  }
  function render(focused) {
    shown.length = 0;
    body.replaceChildren();
    roots.forEach((root) => append(root, 0));
    const entry = shown.find((one) => one.node === focused);
    if (entry) focusRow(entry.row);
  }
  function focusRow(row) {
    shown.forEach((one) => one.row.setAttribute("tabindex", "-1"));
    row.setAttribute("tabindex", "0");
    row.focus({ preventScroll: false });
  }
  function act(entry) {
    if (entry.node.children.length) { entry.node.open = !entry.node.open; render(entry.node); }
    else if (entry.node.go) location.hash = entry.node.go;
  }
  table.addEventListener("click", (event) => {
    const at = event.target.closest("tbody tr");
    if (at && !event.target.closest("a")) act(shown.find((one) => one.row === at));
  });
  table.addEventListener("keydown", (event) => {
    const place = shown.findIndex((one) => one.row === event.target);
    if (place < 0) return;
    const entry = shown[place], node = entry.node;
    if (event.key === "ArrowDown" && shown[place + 1]) focusRow(shown[place + 1].row);
    else if (event.key === "ArrowUp" && place) focusRow(shown[place - 1].row);
    else if (event.key === "ArrowRight" && node.children.length) { if (node.open) focusRow(shown[place + 1].row); else act(entry); }
    else if (event.key === "ArrowLeft" && node.open && node.children.length) act(entry);
    else if (event.key === "ArrowLeft") {
      const parent = shown.slice(0, place).reverse().find((one) => one.level < entry.level);
      if (parent) focusRow(parent.row);
    } else if (event.key === "Enter") act(entry);
    else return;
    event.preventDefault();
  });
  render(null);
  return el("div", { class: "scroll" }, table);
}

// A tree of rows with folders. `sums` are the columns that a folder adds up.
function folded(rows, sums, cellsOf) {
  const root = { name: "", children: [], index: new Map(), sums: {} };
  for (const row of rows) {
    let node = root;
    for (const name of row.folders) {
      if (!node.index.has(name)) {
        const made = { name, children: [], index: new Map(), sums: {}, count: 0 };
        node.index.set(name, made);
        node.children.push(made);
      }
      node = node.index.get(name);
    }
    node.children.push({ ...row, children: [], sums: Object.fromEntries(sums.map((sum) => [sum, row[sum]])) });
  }
  function finish(node) {
    node.children.forEach((child) => { if (child.index) finish(child); });
    if (node.children.length === 1 && node.children[0].index && node !== root) {
      const only = node.children[0];
      Object.assign(node, { name: node.name + "/" + only.name, children: only.children });
    }
    for (const sum of sums) node.sums[sum] = node.children.reduce((total, child) => total + child.sums[sum], 0);
    node.children.sort((one, other) => other.sums[sums[0]] - one.sums[sums[0]]);
    node.cells = () => cellsOf(node);
    node.children.forEach((child) => { child.cells = () => cellsOf(child); });
  }
  finish(root);
  return root.children;
}

function openAll(nodes, most) {
  let left = most;
  const walk = (some) => some.forEach((node) => { if (left > 0 && node.children.length) { node.open = true; left -= node.children.length; walk(node.children); } });
  walk(nodes);
}

function matches(needle, ...texts) {
  const words = needle.toLowerCase().split(/\s+/).filter(Boolean), held = texts.join(" ").toLowerCase();
  return words.every((word) => held.includes(word));
}

function searchBox(label, changed) {
  const box = el("input", { type: "search", placeholder: label + "   ( / )", "aria-label": label });
  box.addEventListener("input", () => changed(box.value));
  return box;
}

// ---- canvases

function fitted(canvas, height) {
  const width = canvas.clientWidth || 1000, ratio = devicePixelRatio || 1;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  canvas.style.height = height + "px";
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.font = "11px system-ui, sans-serif";
  return [context, width];
}
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const kindColour = (kind) => KIND[kind] || "#7d5a44";

// ---- the theme, the key of the search, and what follows the size of the window

function themeButton(redrawn) {
  const root = document.documentElement.dataset;
  root.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  return el("button", { onclick: () => { root.theme = root.theme === "dark" ? "light" : "dark"; redrawn(); } }, "Light or dark");
}
const typing = (event) => event.target.matches("input[type=search]") || event.ctrlKey || event.metaKey || event.altKey;
function keysAndTips(redrawn) {
  document.addEventListener("keydown", (event) => {
    const box = document.querySelector("main input[type=search]");
    if (event.key === "/" && !typing(event) && box) { event.preventDefault(); box.focus(); }
  });
  withTips();
  addEventListener("resize", redrawn);
}
