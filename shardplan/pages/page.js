"use strict";
// The views of a plan. Data are tables of numbers: `shardplan/pages/page_data.py` says what their columns are.

const CATEGORY = ["#4e79a7", "#76a0cc", "#9aa4af", "#59a14f", "#f28e2b", "#e15759", "#b07aa1", "#8a6d00", "#666666"];
const MB = 1e6;
const PHASE = { forward: "forward", backward: "backward", recomputed: "recomputed", update: "update", program: "" };
const [PHASE_OF, MODULE, PRIMITIVE, SOURCE, READS, MAKES, DEGREE, TIMES, SPENT] = [0, 1, 2, 3, 4, 5, 6, 7, 8];

// ---- tensors

const [T_CATEGORY, T_FOLDERS, T_LABEL, T_TYPE, T_LAYOUT, T_BYTES, T_SOURCE, T_COUNT] = [0, 1, 2, 3, 4, 5, 6, 7];

const makerOf = (() => {
  const found = new Map();
  D.memory.buffers.tensor.forEach((tensor, place) => { if (!found.has(tensor)) found.set(tensor, D.memory.buffers.maker[place]); });
  return found;
})();

function target(maker) {
  if (maker === undefined || maker >= D.operations.kind.length) return null;
  return maker < 0 ? "#arg" + (-1 - maker) : "#op" + maker;
}
function tensorRow(row, place) {
  return {
    folders: [D.categories[row[T_CATEGORY]], ...row[T_FOLDERS].map(text)], name: text(row[T_LABEL]), count: row[T_COUNT],
    each: row[T_BYTES], bytes: row[T_BYTES] * row[T_COUNT], type: row[T_TYPE], layout: row[T_LAYOUT],
    source: text(row[T_SOURCE]), go: target(makerOf.get(place)),
  };
}
function isWhole(row) {
  return DEVICES > 1 && row[T_LAYOUT] >= 0 && row[T_BYTES] > MB && !D.layouts[row[T_LAYOUT]][1].flat().length;
}

function tensorsView() {
  const place = el("div", {}), said = el("span", { class: "faint", id: "found" });
  let needle = "", whole = false;
  function draw() {
    const chosen = D.memory.tensors.map((row, index) => [row, tensorRow(row, index)])
      .filter(([row, one]) => (!whole || isWhole(row)) && matches(needle, one.folders.join("/"), one.name, one.source, D.types[row[T_TYPE]] ? D.types[row[T_TYPE]].join(" ") : ""));
    const nodes = folded(chosen.map(([, one]) => one), ["bytes"], (node) => node.index
      ? ["", "", size(node.sums.bytes), ""]
      : [tensorChips(node.type, node.layout), size(node.each), size(node.bytes), node.source]);
    const order = (node) => D.categories.indexOf(node.name.split("/")[0]);
    nodes.sort((one, other) => order(one) - order(other));
    if (needle || whole) openAll(nodes, 400);
    else nodes.forEach((node) => { node.open = node.sums.bytes > 0 && ["parameters", "inputs"].includes(node.name.split("/")[0]); });
    const count = chosen.reduce((sum, [row]) => sum + row[T_COUNT], 0);
    said.textContent = `${number(count, 0)} tensors, ${number(chosen.length, 0)} rows`;
    place.replaceChildren(chosen.length ? treeTable(["tensor", "type and layout", "each, per device#", "together#", "source"], nodes, "Tensors") : el("p", {}, whole && !needle ? "No tensor over 1 MB is whole on every device." : "Nothing matches."));
  }
  const box = el("input", { type: "checkbox", id: "whole" });
  box.addEventListener("change", () => { whole = box.checked; draw(); });
  draw();
  return [el("div", { class: "controls" }, searchBox("Search tensors", (value) => { needle = value; draw(); }),
    el("label", {}, box, " whole on every device and over 1 MB"), said),
  el("p", { class: "faint" }, "Bytes are those of one device. Tensors of a step are not all held at the same time: the memory view shows when. A number in a path is shown as *, and ×32 counts the equal ones."), place];
}

// ---- collectives

const [C_KIND, C_AXES, C_BYTES, C_TIMES, C_LABEL, C_TYPE, C_LAYOUT, C_PHASE, C_MODULE, C_SOURCE, C_SPENT, C_HIDES, C_OPS] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12];

const COLLECTIVES = D.collectives.map((row) => {
  const count = row[C_OPS].length;
  return {
    row, kind: text(row[C_KIND]), axes: row[C_AXES], label: text(row[C_LABEL]), phase: D.phases[row[C_PHASE]],
    module: moduleNames(row[C_MODULE]).join("/") || "(no module)", source: text(row[C_SOURCE]), each: row[C_BYTES],
    times: count * row[C_TIMES], bytes: row[C_BYTES] * row[C_TIMES] * count, spent: row[C_SPENT] * count, hides: row[C_HIDES], first: row[C_OPS][0],
  };
});
const SENT = COLLECTIVES.reduce((sum, one) => sum + one.bytes, 0);

// Squarified treemap (Bruls, Huizing and van Wijk, 2000): rectangles of given areas, as square as they can be.
function squarified(items, x, y, width, height) {
  const total = items.reduce((sum, item) => sum + item.value, 0), found = [];
  if (!total) return found;
  const scale = (width * height) / total;
  let row = [], left = items.filter((item) => item.value > 0);
  const worst = (some, side) => {
    const sum = some.reduce((all, item) => all + item.value * scale, 0);
    return Math.max(...some.map((item) => { const area = item.value * scale; return Math.max((side * side * area) / (sum * sum), (sum * sum) / (side * side * area)); }));
  };
  while (left.length) {
    const side = Math.min(width, height);
    row = [left[0]];
    while (row.length < left.length && worst([...row, left[row.length]], side) <= worst(row, side)) row.push(left[row.length]);
    const thickness = row.reduce((sum, item) => sum + item.value * scale, 0) / side;
    let at = 0;
    for (const item of row) {
      const length = (item.value * scale) / thickness;
      found.push(width >= height ? { item, x, y: y + at, width: thickness, height: length } : { item, x: x + at, y, width: length, height: thickness });
      at += length;
    }
    if (width >= height) { x += thickness; width -= thickness; } else { y += thickness; height -= thickness; }
    left = left.slice(row.length);
  }
  return found;
}

function grouped(rows, key) {
  const found = new Map();
  for (const row of rows) { const name = key(row); if (!found.has(name)) found.set(name, []); found.get(name).push(row); }
  return [...found].map(([name, members]) => ({ name, members, value: members.reduce((sum, one) => sum + one.bytes, 0) })).sort((one, other) => other.value - one.value);
}

function treemap(rows, chosen) {
  const width = 1200, height = 260, drawing = el("svg", { class: "map", viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": "Bytes sent by module and source line" });
  for (const outer of squarified(grouped(rows, (one) => one.module), 0, 0, width, height)) {
    const inside = outer.height > 30 ? 14 : 0;
    if (inside && outer.width > 60) drawing.append(el("text", { x: outer.x + 4, y: outer.y + 11, style: { fill: "var(--text)" } }, clipped(`${outer.item.name}  ${size(outer.item.value)}`, outer.width)));
    for (const tile of squarified(grouped(outer.item.members, (one) => one.kind + " · " + one.source), outer.x, outer.y + inside, outer.width, outer.height - inside)) {
      const kind = tile.item.members[0].kind, said = `${outer.item.name}: ${tile.item.name}, ${size(tile.item.value)}`;
      const act = () => chosen(outer.item.name, tile.item.members[0].source, kind);
      const group = el("g", { tabindex: 0, role: "button", "aria-label": said, onclick: act, onkeydown: (event) => { if (event.key === "Enter") act(); } },
        el("rect", { x: tile.x, y: tile.y, width: tile.width, height: tile.height, fill: kindColour(kind) }), el("title", {}, said));
      if (tile.width > 50 && tile.height > 16) group.append(el("text", { x: tile.x + 4, y: tile.y + 13 }, clipped(tile.item.name, tile.width)));
      if (tile.width > 50 && tile.height > 32) group.append(el("text", { x: tile.x + 4, y: tile.y + 27 }, size(tile.item.value)));
      drawing.append(group);
    }
  }
  return drawing;
}
const clipped = (said, width) => (said.length * 6.2 > width - 6 ? said.slice(0, Math.max(0, Math.floor((width - 6) / 6.2) - 1)) + "…" : said);

function collectivesView() {
  const place = el("div", { class: "scroll" }), box = searchBox("Search collectives", (value) => { needle = value; draw(); });
  let needle = "", order = "bytes", down = true;
  const columns = [["kind", "kind"], ["axes", null], ["bytes#", "bytes"], ["times#", "times"], ["each#", "each"], ["time#", "spent"], ["overlap", "hides"], ["tensor", "label"], ["type and layout after", null], ["module", "module"], ["source", "source"]];
  function draw() {
    const rows = COLLECTIVES.filter((one) => matches(needle, one.kind, axesText(one.axes), one.label, one.phase, one.module, one.source));
    rows.sort((one, other) => (one[order] < other[order] ? -1 : one[order] > other[order] ? 1 : 0) * (down ? -1 : 1));
    const sum = (name) => rows.reduce((total, one) => total + one[name], 0);
    const head = el("tr", {}, columns.map(([name, key]) => el("th", { class: name.endsWith("#") ? "number" : null, "aria-sort": key === order ? (down ? "descending" : "ascending") : null },
      key ? el("button", { onclick: () => { down = key === order ? !down : true; order = key; draw(); } }, name.replace("#", "") + (key === order ? (down ? " ▾" : " ▴") : "")) : name.replace("#", ""))));
    const body = rows.map((one) => el("tr", { "data-go": one.first >= 0 ? "#op" + one.first : null, tabindex: one.first >= 0 ? 0 : null, onclick: go, onkeydown: (event) => { if (event.key === "Enter") go(event); } },
      el("td", { class: "short" }, el("span", { class: "swatch", style: { background: kindColour(one.kind) } }), one.kind), el("td", { class: "short" }, el("span", { class: "chip" }, one.axes.map(axisChip))),
      el("td", { class: "number" }, size(one.bytes)), el("td", { class: "number" }, number(one.times, 0)), el("td", { class: "number" }, size(one.each)), el("td", { class: "number" }, time(one.spent)),
      el("td", { class: "short" }, one.hides ? "can hide" : el("span", { class: "exposed" }, "exposed")), el("td", { class: "wrap" }, breakable(one.label)),
      el("td", {}, tensorChips(one.row[C_TYPE], one.row[C_LAYOUT])), el("td", { class: "wrap" }, breakable(one.module), el("span", { class: "times" }, PHASE[one.phase])), el("td", {}, one.source)));
    body.push(el("tr", { class: "total" }, el("td", { colspan: 2 }, "total"), el("td", { class: "number", id: "sent", "data-bytes": sum("bytes") }, size(sum("bytes"))),
      el("td", { class: "number" }, number(sum("times"), 0)), el("td", {}), el("td", { class: "number" }, time(sum("spent"))), el("td", { colspan: 5 })));
    place.replaceChildren(el("table", { "aria-label": "Collectives" }, el("thead", {}, head), el("tbody", {}, body)));
  }
  draw();
  if (!COLLECTIVES.length) return [el("p", {}, "This plan sends nothing.")];
  const map = treemap(COLLECTIVES, (module, source, kind) => { box.value = needle = `${kind} ${module === "(no module)" ? "" : module} ${source.split(" ")[0]}`; draw(); });
  return [map, el("div", { class: "controls" }, box, el("span", { class: "faint" }, "Bytes are sent by one device per step. Work can hide a collective if enough work is independent of its tensor, by the planner's model.")), place];
}

// ---- memory over the step

const MEMORY = (() => {
  const { buffers, tensors, at } = D.memory, count = at.length, starts = [];
  const change = D.categories.map(() => new Float64Array(count + 1));
  let start = 0;
  buffers.start.forEach((gap, place) => {
    start += gap;
    starts.push(start);
    const row = tensors[buffers.tensor[place]];
    change[row[T_CATEGORY]][start] += row[T_BYTES];
    change[row[T_CATEGORY]][start + buffers.length[place] + 1] -= row[T_BYTES];
  });
  const total = new Float64Array(count);
  const series = change.map((row) => {
    const held = new Float64Array(count);
    let sum = 0;
    for (let place = 0; place < count; place++) { sum += row[place]; held[place] = sum; total[place] += sum; }
    return held;
  });
  let peak = 0;
  total.forEach((bytes, place) => { if (bytes > total[peak]) peak = place; });
  return { count, starts, series, total, peak };
})();

function liveAt(position) {
  const { buffers } = D.memory, found = new Map();
  MEMORY.starts.forEach((start, place) => {
    if (start <= position && position <= start + buffers.length[place]) {
      const tensor = buffers.tensor[place];
      found.set(tensor, (found.get(tensor) || 0) + 1);
    }
  });
  return [...found].map(([tensor, count]) => ({ tensor, count, bytes: count * D.memory.tensors[tensor][T_BYTES] })).sort((one, other) => other.bytes - one.bytes);
}


function operationAt(position) {
  const at = D.memory.at;
  for (let place = Math.min(position, at.length - 1); place >= 0; place--) if (at[place] >= 0) return at[place];
  return -1;
}

function memoryView() {
  const height = 300, margin = 70;
  const canvas = el("canvas", { tabindex: 0, role: "img", "aria-label": "Memory over the step, by category. Arrow keys move the cursor." });
  const said = el("p", { id: "cursor" }), live = el("div", { class: "scroll" });
  let cursor = MEMORY.peak;
  const compiled = D.memory.compiled || [], highest = compiled.reduce((most, one) => Math.max(most, one[1]), 0);
  const limit = D.head.limit, top = 1.06 * Math.max(highest, MEMORY.total[MEMORY.peak], limit < 4 * MEMORY.total[MEMORY.peak] ? limit : 0) || 1;
  function draw() {
    const [context, width] = fitted(canvas, height), inner = width - margin - 10, low = height - 22;
    const y = (bytes) => low - (bytes / top) * (low - 8);
    context.clearRect(0, 0, width, height);
    context.fillStyle = colour("--faint");
    for (const bytes of ticks(0, top, 6)) {
      context.fillText(size(bytes), 4, y(bytes) + 4);
      context.fillRect(margin, y(bytes), inner, 0.3);
    }
    const columns = Math.min(Math.max(1, Math.floor(inner)), MEMORY.count), wide = inner / columns;
    for (let column = 0; column < columns; column++) {
      const from = Math.floor((column * MEMORY.count) / columns), until = Math.max(from + 1, Math.floor(((column + 1) * MEMORY.count) / columns));
      let place = from;
      for (let other = from; other < until; other++) if (MEMORY.total[other] > MEMORY.total[place]) place = other;
      let held = 0;
      MEMORY.series.forEach((series, category) => {
        if (!series[place]) return;
        context.fillStyle = CATEGORY[category];
        const left = Math.floor(margin + column * wide), right = Math.ceil(margin + (column + 1) * wide);
        context.fillRect(left, y(held + series[place]), right - left, y(held) - y(held + series[place]));
        held += series[place];
      });
    }
    if (compiled.length) {
      context.strokeStyle = colour("--text");
      context.lineWidth = 1.2;
      context.beginPath();
      compiled.forEach(([place, bytes]) => context.lineTo(margin + ((place + 0.5) / MEMORY.count) * inner, y(bytes)));
      context.stroke();
      context.lineWidth = 1;
    }
    if (limit <= top) {
      context.strokeStyle = context.fillStyle = colour("--limit");
      context.setLineDash([6, 4]);
      context.beginPath(); context.moveTo(margin, y(limit)); context.lineTo(width - 10, y(limit)); context.stroke();
      context.setLineDash([]);
      context.fillText(`limit ${size(limit)}`, width - 120, y(limit) - 4);
    }
    context.strokeStyle = colour("--text");
    const x = margin + ((cursor + 0.5) / MEMORY.count) * inner;
    context.beginPath(); context.moveTo(x, 4); context.lineTo(x, low); context.stroke();
    context.fillStyle = colour("--faint");
    context.fillText("schedule position 0", margin, height - 6);
    context.fillText(String(MEMORY.count - 1), width - 40, height - 6);
  }
  function tell() {
    const operation = operationAt(cursor), rows = liveAt(cursor), shown = rows.slice(0, 60);
    const there = operation >= 0 ? D.operations.kinds[D.operations.kind[operation]] : null;
    said.replaceChildren(`Position ${cursor}${cursor === MEMORY.peak ? ", the peak" : ""}: `, el("b", { id: "held", "data-bytes": MEMORY.total[cursor] }, size(MEMORY.total[cursor])), " held",
      ...(there ? [", at ", operationLink(operation), ` in ${moduleNames(there[MODULE]).join("/") || "no module"}, ${text(there[SOURCE])}`] : []));
    const body = shown.map(({ tensor, count, bytes }) => {
      const row = D.memory.tensors[tensor], one = tensorRow(row, tensor);
      return el("tr", { "data-go": one.go, tabindex: one.go ? 0 : null, onclick: go, onkeydown: (event) => { if (event.key === "Enter") go(event); } }, el("td", { class: "short" }, el("span", { class: "swatch", style: { background: CATEGORY[row[T_CATEGORY]] } }), D.categories[row[T_CATEGORY]]),
        el("td", { class: "wrap" }, breakable([...row[T_FOLDERS].map(text), one.name].join("/")), times(count)), el("td", {}, tensorChips(one.type, one.layout)), el("td", { class: "number" }, size(one.each)), el("td", { class: "number" }, size(bytes)), el("td", {}, one.source));
    });
    const rest = rows.slice(shown.length), left = rest.reduce((sum, one) => sum + one.bytes, 0);
    if (rest.length) body.push(el("tr", {}, el("td", {}), el("td", { colspan: 3 }, `and ${rest.length} more rows`), el("td", { class: "number" }, size(left)), el("td", {})));
    live.replaceChildren(el("table", { "aria-label": "Tensors at the cursor" }, el("thead", {}, el("tr", {}, ["category", "tensor", "type and layout", "each#", "together#", "source"].map((name) => el("th", { class: name.endsWith("#") ? "number" : null }, name.replace("#", ""))))), el("tbody", {}, body)));
  }
  function move(position) { cursor = Math.max(0, Math.min(MEMORY.count - 1, position)); draw(); tell(); }
  const from = (event) => { const box = canvas.getBoundingClientRect(); return Math.floor(((event.clientX - box.left - margin) / (box.width - margin - 10)) * MEMORY.count); };
  let held = false;
  canvas.addEventListener("click", (event) => { held = true; move(from(event)); });
  canvas.addEventListener("mousemove", (event) => { if (!held || event.buttons) move(from(event)); });
  canvas.addEventListener("keydown", (event) => {
    const steps = { ArrowLeft: -1, ArrowRight: 1, PageUp: -Math.ceil(MEMORY.count / 40), PageDown: Math.ceil(MEMORY.count / 40), Home: -MEMORY.count, End: MEMORY.count };
    if (event.key in steps) { event.preventDefault(); held = true; move(cursor + steps[event.key]); }
  });
  const legend = el("div", { class: "legend" }, D.categories.map((name, category) => MEMORY.series[category].some((bytes) => bytes)
    ? el("span", {}, el("span", { class: "swatch", style: { background: CATEGORY[category] } }), `${name} ${size(MEMORY.series[category][MEMORY.peak])}`) : null),
    compiled.length ? el("span", { id: "compiled" }, `line: the compiled step, at most ${size(highest)}`) : "");
  redraw = draw;
  setTimeout(draw);
  tell();
  return [el("div", { class: "controls" }, el("button", { onclick: () => { held = true; move(MEMORY.peak); } }, "Go to the peak"), el("span", { class: "faint" }, "The pointer or the arrow keys move the cursor, a click keeps it. The bytes of the categories are those at the peak.")),
    canvas, legend, said, live];
}

// ---- operations

const kindOf = (operation) => D.operations.kinds[D.operations.kind[operation]];
const nameOf = (operation) => `op${operation} ${text(kindOf(operation)[PRIMITIVE])}`;
const operationLink = (operation) => el("a", { href: "#op" + operation }, nameOf(operation));
const OPERATIONS = (() => {
  const found = D.operations.kinds.map(() => []);
  D.operations.kind.forEach((kind, operation) => found[kind].push(operation));
  return found;
})();
const SENT_BY = (() => {
  const found = new Map();
  for (const one of COLLECTIVES) for (const operation of one.row[C_OPS]) { if (!found.has(operation)) found.set(operation, []); found.get(operation).push(one); }
  return found;
})();
let readersIndex = null;
function readersOf(key) {
  if (!readersIndex) {
    readersIndex = new Map();
    D.operations.operands.forEach((operands, operation) => {
      for (const one of operands) {
        const from = one > 0 ? operation - one : one < 0 ? one : null;
        if (from !== null) { if (!readersIndex.has(from)) readersIndex.set(from, []); readersIndex.get(from).push(operation); }
      }
    });
  }
  return readersIndex.get(key) || [];
}

function programView() {
  const place = el("div", {});
  let needle = "";
  const rows = D.operations.kinds.map((kind, index) => {
    const own = OPERATIONS[index], sent = own.reduce((sum, operation) => sum + (SENT_BY.get(operation) || []).reduce((all, one) => all + one.row[C_BYTES] * one.row[C_TIMES], 0), 0);
    return { folders: [D.phases[kind[PHASE_OF]], ...moduleNames(kind[MODULE])], name: text(kind[PRIMITIVE]), count: own.length, kind, spent: kind[SPENT] * own.length, sent, operations: own.length, source: text(kind[SOURCE]), go: "#op" + own[0] };
  });
  function draw() {
    const chosen = rows.filter((one) => matches(needle, one.folders.join("/"), one.name, one.source));
    const nodes = folded(chosen, ["spent", "sent", "operations"], (node) => node.index
      ? ["", number(node.sums.operations, 0), node.sums.spent ? time(node.sums.spent) : "", node.sums.sent ? size(node.sums.sent) : "", ""]
      : [node.kind[MAKES].map((made) => el("div", {}, tensorChips(made[0], made[3]))), "", node.spent ? time(node.spent) : "", node.sent ? size(node.sent) : "", node.source]);
    const order = (node) => D.phases.indexOf(node.name.split("/")[0]);
    nodes.sort((one, other) => order(one) - order(other));
    if (needle) openAll(nodes, 400);
    else nodes.forEach((node) => { node.open = true; });
    place.replaceChildren(chosen.length ? treeTable(["operation", "results", "operations#", "time#", "sends#", "source"], nodes, "Operations") : el("p", {}, "Nothing matches."));
  }
  draw();
  return [el("div", { class: "controls" }, searchBox("Search operations", (value) => {
    const direct = /^op(\d+)$/.exec(value.trim());
    if (direct && Number(direct[1]) < D.operations.kind.length) location.hash = "#op" + direct[1];
    else { needle = value; draw(); }
  }), el("span", { class: "faint" }, `${number(D.operations.kind.length, 0)} operations of ${number(rows.length, 0)} kinds. Times are work on one device, by the hardware profile.`)), place];
}

// ---- the panel of one operation or argument

function pair(name, ...content) { return el("tr", {}, el("td", {}, name), el("td", {}, content)); }
function links(operations) {
  const shown = operations.slice(0, 12), found = shown.flatMap((operation, place) => [place ? ", " : "", operationLink(operation)]);
  return [...found, operations.length > shown.length ? ` and ${operations.length - shown.length} more` : ""];
}
function layoutChange(type, before, after) {
  if (after < 0 || before < 0 || before === after) return [tensorChips(type, before < 0 ? after : before), before < 0 ? el("span", { class: "faint" }, " computed in the layout of each reader") : ""];
  return [el("div", {}, tensorChips(type, before)), el("div", {}, "→ ", tensorChips(type, after))];
}

// Why: the other layouts with their prices, those that `shardplan/plans/page_reasons.py` has, and the call for the rest.
function reasons(names, path, what) {
  const known = names.find((name) => name in D.why), rows = (known ? D.why[known] : []).map(([label, price], place) =>
    pair(place ? "" : "other " + what, el("div", { class: "code" }, label), el("div", { class: "faint" }, price)));
  const equal = known && known !== names[0] && known !== path ? `prices of ${known}, an equal one; ` : "";
  return [...rows, pair("why", equal, el("span", { class: "code" }, `print(plan.explain("${path}"))`), known ? " prices more exactly" : ` prices the other ${what}`)];
}

function operationPanel(operation) {
  const kind = kindOf(operation), same = OPERATIONS[D.operations.kind[operation]], rows = [];
  rows.push(pair("phase", D.phases[kind[PHASE_OF]]), pair("module", moduleNames(kind[MODULE]).join("/") || "(no module)"), pair("source", el("span", { class: "code" }, text(kind[SOURCE]))));
  if (kind[TIMES] > 1) rows.push(pair("runs", `${number(kind[TIMES], 0)} times a step`));
  rows.push(pair("work", kind[DEGREE] ? `shared by ${kind[DEGREE]} of ${DEVICES} devices` : "in the layout of each reader", kind[SPENT] ? `, ${time(kind[SPENT])} on each` : ""));
  kind[READS].forEach(([type, before, after], place) => {
    const from = D.operations.operands[operation][place], maker = from > 0 ? operationLink(operation - from) : from < 0 ? el("a", { href: "#arg" + (-1 - from) }, D.inputs[-1 - from]) : "a value of its loop";
    rows.push(pair(place ? "" : "reads", maker, el("div", {}, layoutChange(type, before, after))));
  });
  kind[MAKES].forEach(([type, made, pending, kept], place) => rows.push(pair(place ? "" : "makes",
    pending.length ? el("div", {}, tensorChips(type, made), " a sum over ", el("span", { class: "chip" }, pending.map(axisChip))) : "", el("div", {}, pending.length ? ["→ ", tensorChips(type, kept)] : layoutChange(type, made, kept)))));
  (SENT_BY.get(operation) || []).forEach((one, place) => rows.push(pair(place ? "" : "sends", `${one.kind} over ${axesText(one.axes)} of ${one.label}: ${size(one.each)}${one.row[C_TIMES] > 1 ? `, ${one.row[C_TIMES]} times` : ""}, ${time(one.row[C_SPENT])}, ${one.hides ? "can hide" : "exposed"}`)));
  const readers = readersOf(operation);
  rows.push(pair("read by", readers.length ? links(readers) : "no operation"));
  if (same.length > 1) rows.push(pair("equal ones", links(same)));
  rows.push(...reasons(same.map((one) => "op" + one), `op${operation}`, "splits"));
  return [nameOf(operation), rows];
}
function argumentPanel(position) {
  const readers = readersOf(-1 - position), place = D.memory.buffers.maker.indexOf(-1 - position), rows = [];
  if (place >= 0) {
    const row = D.memory.tensors[D.memory.buffers.tensor[place]];
    rows.push(pair("category", D.categories[row[T_CATEGORY]]), pair("type and layout", tensorChips(row[T_TYPE], row[T_LAYOUT])), pair("per device", size(row[T_BYTES])));
  }
  rows.push(pair("read by", readers.length ? links(readers) : "no operation"), ...reasons(["arg" + position], D.inputs[position], "layouts"));
  return [D.inputs[position], rows];
}
let before = null;
function showPanel([title, rows]) {
  const panel = byId("panel");
  if (panel.hidden) before = document.activeElement;
  panel.replaceChildren(el("button", { class: "close", onclick: closePanel, "aria-label": "Close" }, "Close (Esc)"), el("h1", {}, title), el("table", {}, el("tbody", {}, rows)));
  panel.hidden = false;
  panel.querySelector("button").focus();
}
function closePanel() {
  byId("panel").hidden = true;
  history.replaceState(null, "", location.href.split("#")[0] + "#" + present);
  if (before && before.isConnected) before.focus();
}
function go(event) {
  const row = event.target.closest("tr");
  if (row && row.dataset.go && !event.target.closest("a")) location.hash = row.dataset.go;
}

// ---- the timeline

const TIMELINE = D.timeline.lanes.map((lane) => {
  let at = 0;
  const start = lane.gap.map((gap, place) => { at += gap; const found = at; at += lane.length[place]; return found; });
  return { ...lane, start, title: lane.axes.length ? "network of " + lane.axes.join(", ") : "compute", busy: lane.length.reduce((sum, one) => sum + one, 0) };
});

const PHASE_COLOUR = { forward: "#4e79a7", backward: "#b07aa1", recomputed: "#b8860b", update: "#59a14f", program: "#4e79a7" };

// The colours of the lanes: a phase of the work, or a kind of collective.
function timelineLegend() {
  const there = new Set(D.operations.kinds.map((kind) => D.phases[kind[PHASE_OF]])), kinds = new Set(COLLECTIVES.map((one) => one.kind));
  const entries = [...D.phases.filter((phase) => there.has(phase)).map((phase) => [phase, PHASE_COLOUR[phase]]), ...[...kinds].map((kind) => [kind, kindColour(kind)])];
  return el("div", { class: "legend" }, entries.map(([name, filled]) => el("span", {}, el("span", { class: "swatch", style: { background: filled } }), name)));
}

// The Trace Event Format, which ui.perfetto.dev reads: a thread per lane, times in microseconds.
function saveTrace(eventName) {
  const events = TIMELINE.flatMap((lane, thread) => [{ name: "thread_name", ph: "M", pid: 0, tid: thread, args: { name: lane.title } },
    ...lane.start.map((start, place) => ({ name: eventName(lane, place), ph: "X", pid: 0, tid: thread, ts: start / 1e3, dur: lane.length[place] / 1e3 }))]);
  const link = el("a", { href: URL.createObjectURL(new Blob([JSON.stringify({ traceEvents: events, displayTimeUnit: "ms" })], { type: "application/json" })), download: "timeline.json" });
  link.click();
  URL.revokeObjectURL(link.href);
}

function timelineView() {
  const row = 34, margin = 150, height = 26 + row * TIMELINE.length + 6, end = D.timeline.nanoseconds || 1;
  const canvas = el("canvas", { tabindex: 0, role: "img", "aria-label": "Timeline of the step. Plus and minus zoom, arrow keys move." }), said = el("p", { id: "event" }, " ");
  let from = 0, until = end, dragged = null;
  function eventName(lane, place) {
    const operation = lane.operation[place];
    return lane.name[place] >= 0 ? text(lane.name[place]) + (operation >= 0 ? " for " + nameOf(operation) : " of a result") : nameOf(operation);
  }
  function firstAt(lane, at) {
    let low = 0, high = lane.start.length;
    while (low < high) { const middle = (low + high) >> 1; if (lane.start[middle] + lane.length[middle] < at) low = middle + 1; else high = middle; }
    return low;
  }
  function draw() {
    const [context, width] = fitted(canvas, height), inner = width - margin - 6, scale = inner / (until - from);
    context.clearRect(0, 0, width, height);
    context.fillStyle = colour("--faint");
    for (const at of ticks(from, until, 7)) { const x = margin + (at - from) * scale; context.fillText(time(at), Math.min(x, width - 60), 12); context.fillRect(x, 18, 0.5, height); }
    TIMELINE.forEach((lane, number_) => {
      const y = 24 + number_ * row;
      context.fillStyle = colour("--text");
      context.fillText(lane.title, 4, y + 12);
      context.fillStyle = colour("--faint");
      context.fillText(`${percent(lane.busy / end)} busy`, 4, y + 25);
      let drawn = -1;
      for (let place = firstAt(lane, from); place < lane.start.length && lane.start[place] < until; place++) {
        const x = Math.max(margin, margin + (lane.start[place] - from) * scale), right = Math.min(width - 6, margin + (lane.start[place] + lane.length[place] - from) * scale), wide = right - x;
        if (right < drawn + 0.5) continue;
        drawn = Math.max(right, x + 0.5);
        const kind = lane.name[place] >= 0 ? text(lane.name[place]) : null;
        context.fillStyle = kind ? kindColour(kind) : PHASE_COLOUR[D.phases[kindOf(lane.operation[place])[PHASE_OF]]];
        context.fillRect(x, y, Math.max(0.5, wide - (wide > 3 ? 0.7 : 0)), row - 8);
        if (wide > 70) { context.fillStyle = "#fff"; context.fillText(clipped(kind || text(kindOf(lane.operation[place])[PRIMITIVE]), wide), x + 3, y + 16); }
      }
    });
  }
  function zoom(factor, centre) {
    const span = Math.max(1000, Math.min(end, (until - from) * factor)), share = (centre - from) / (until - from);
    from = Math.max(0, Math.min(end - span, centre - share * span));
    until = from + span;
    draw();
  }
  function pan(by) { const span = until - from; from = Math.max(0, Math.min(end - span, from + by)); until = from + span; draw(); }
  const timeOf = (event) => { const box = canvas.getBoundingClientRect(); return from + ((event.clientX - box.left - margin) / (box.width - margin - 6)) * (until - from); };
  function eventOf(event) {
    const box = canvas.getBoundingClientRect(), lane = TIMELINE[Math.floor((event.clientY - box.top - 24) / row)], at = timeOf(event);
    if (!lane) return null;
    const place = firstAt(lane, at);
    return place < lane.start.length && lane.start[place] <= at ? [lane, place] : null;
  }
  canvas.addEventListener("wheel", (event) => { event.preventDefault(); zoom(event.deltaY > 0 ? 1.25 : 0.8, timeOf(event)); }, { passive: false });
  canvas.addEventListener("mousedown", (event) => { dragged = { x: event.clientX, moved: false }; });
  canvas.addEventListener("mousemove", (event) => {
    if (dragged && event.buttons) {
      const by = event.clientX - dragged.x;
      if (Math.abs(by) > 2) { dragged.moved = true; dragged.x = event.clientX; pan((-by / (canvas.clientWidth - margin)) * (until - from)); }
      return;
    }
    const found = eventOf(event);
    said.textContent = found ? `${eventName(...found)}: ${time(found[0].length[found[1]])}, from ${time(found[0].start[found[1]])}` : " ";
  });
  canvas.addEventListener("click", (event) => {
    const found = eventOf(event), moved = dragged && dragged.moved;
    dragged = null;
    if (!moved && found && found[0].operation[found[1]] >= 0) location.hash = "#op" + found[0].operation[found[1]];
  });
  canvas.addEventListener("keydown", (event) => {
    const middle = (from + until) / 2, acts = { "+": () => zoom(0.6, middle), "=": () => zoom(0.6, middle), "-": () => zoom(1.7, middle), ArrowLeft: () => pan((from - until) / 8), ArrowRight: () => pan((until - from) / 8), 0: () => zoom(1e12, middle) };
    if (acts[event.key]) { event.preventDefault(); event.stopPropagation(); acts[event.key](); }
  });
  redraw = draw;
  setTimeout(draw);
  return [el("div", { class: "controls" }, el("button", { onclick: () => saveTrace(eventName) }, "Save for Perfetto"), el("button", { onclick: () => zoom(0.6, (from + until) / 2) }, "Zoom in (+)"), el("button", { onclick: () => zoom(1.7, (from + until) / 2) }, "Zoom out (−)"), el("button", { onclick: () => { from = 0; until = end; draw(); } }, "Whole step (0)"),
    el("span", { class: "faint" }, `${time(end)} by the simulator, with the rates of the hardware profile. The wheel zooms, dragging moves, a click shows the operation.`)), canvas, timelineLegend(), said];
}

// ---- the page

const VIEWS = [["tensors", "State and activations", tensorsView], ["collectives", "Collectives", collectivesView], ["memory", "Memory", memoryView], ["program", "Program", programView], ["timeline", "Timeline", timelineView]];
let present = null, redraw = null;

function show(name) {
  if (present === name) return;
  present = name;
  redraw = null;
  for (const tab of byId("tabs").children) {
    const own = tab.dataset.view === name;
    tab.setAttribute("aria-selected", String(own));
    tab.tabIndex = own ? 0 : -1;
  }
  byId("view").setAttribute("aria-labelledby", "tab-" + name);
  scrollTo(0, 0);
  byId("view").replaceChildren(...VIEWS.find((view) => view[0] === name)[2]());
}

function figure(label, value, note, extra) { return el("div", { class: "figure" }, el("small", {}, label), el("b", {}, value), note ? el("small", {}, note) : "", extra || ""); }

function comparison(own) {
  if (!own.comparison.length) return "";
  const rows = [["this plan", own.communication_bytes, own.peak_bytes, D.timeline.nanoseconds / 1e9, ""], ...own.comparison];
  const timed = own.comparison.some((row) => row[3] !== null), header = ["method", "sent#", "peak#", ...(timed ? ["step#"] : []), ""];
  const cell = (value, shown) => el("td", { class: "number" }, value === null ? "" : shown(value));
  return el("details", { open: "" }, el("summary", {}, "Other ways to split"), el("table", { class: "small", "aria-label": "Other ways to split" },
    el("thead", {}, el("tr", {}, header.map((name) => el("th", { class: name.endsWith("#") ? "number" : null }, name.replace("#", ""))))),
    el("tbody", {}, rows.map(([method, sent, peak, seconds, note]) => el("tr", {}, el("td", {}, method), cell(sent, size), cell(peak, size), timed ? cell(seconds, (value) => time(1e9 * value)) : "", el("td", {}, note))))));
}

function head() {
  const own = D.head, share = own.peak_bytes / own.limit, recomputed = D.operations.kind.map((kind) => D.operations.kinds[kind]).filter((kind) => D.phases[kind[PHASE_OF]] === "recomputed");
  const figures = [
    figure("sent per device and step", size(own.communication_bytes), own.above === null ? "without a bound" : `${own.above > 0 && own.above < 1e-6 ? "" : "at most "}${percent(own.above)} above the optimum`),
    figure("peak per device", size(own.peak_bytes), `${own.verified ? "compiled for " + own.verified : "predicted"}, ${percent(share)} of the limit of ${size(own.limit)}`, el("div", { class: "bar" + (share > 1 ? " over" : "") }, el("i", { style: { width: Math.min(100, 100 * share) + "%" } }))),
    figure("step, simulated", time(D.timeline.nanoseconds), `by the planner's model ${time(1e9 * own.seconds.work)} of work, ${time(1e9 * own.seconds.exposed)} exposed`),
    own.repeated === null ? null : figure("repeated work", percent(own.repeated), "of a device's work, since not all devices share it"),
    recomputed.length ? figure("recomputed", number(recomputed.length, 0) + " operations", `${own.recomputed ? "to fit" : "by jax.checkpoint"}, ${time(recomputed.reduce((sum, kind) => sum + kind[SPENT], 0))} of work`) : null,
    own.blocks.length ? figure("in blocks", own.blocks[0].slice(0, -1).join(" × "), `of ${own.blocks[0].at(-1)}${own.blocks.length > 1 ? `, and ${own.blocks.length - 1} more loops` : ""}`) : null,
    own.host_bytes ? figure("host memory", size(own.host_bytes), "per device") : null,
  ];
  const theme = themeButton(() => { if (redraw) redraw(); });
  byId("head").replaceChildren(
    el("div", { class: "titles" }, el("h1", {}, D.title), el("span", {}, D.mesh.map(([name, length], axis) => el("span", { class: "chip" }, String(length), axisChip(axis)))), el("span", { class: "faint" }, `${DEVICES} devices`), theme),
    el("div", { class: "figures" }, figures), comparison(own), ...own.warnings.map((warning) => el("div", { class: "warning" }, warning)),
    el("details", {}, el("summary", {}, "In words, and how this page was made"), own.texts.map((said) => el("div", {}, said)), el("div", {}, "Made by ", el("code", {}, own.command))));
}

function follow() {
  const hash = decodeURIComponent(location.hash.slice(1)), found = /^(op|arg)(\d+)$/.exec(hash);
  if (found) {
    show(present || "program");
    const number_ = Number(found[2]), among = found[1] === "op" ? D.operations.kind.length : D.inputs.length;
    showPanel(number_ < among ? (found[1] === "op" ? operationPanel(number_) : argumentPanel(number_)) : [hash, [pair("", `There is no ${hash}: the last one is ${found[1]}${among - 1}.`)]]);
    return;
  }
  byId("panel").hidden = true;
  show(VIEWS.some((view) => view[0] === hash) ? hash : present || "tensors");
}

function start() {
  document.title = D.title + " – shardplan";
  head();
  byId("tabs").replaceChildren(...VIEWS.map(([name, title], place) => el("button", { role: "tab", id: "tab-" + name, "data-view": name, "aria-controls": "view", onclick: () => { location.hash = name; } }, title, el("kbd", {}, String(place + 1)))));
  byId("tabs").addEventListener("keydown", (event) => {
    const place = VIEWS.findIndex((view) => view[0] === present), step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (step) { const name = VIEWS[(place + step + VIEWS.length) % VIEWS.length][0]; location.hash = name; byId("tab-" + name).focus(); }
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !byId("panel").hidden) closePanel();
    else if (!typing(event) && VIEWS[Number(event.key) - 1]) location.hash = VIEWS[Number(event.key) - 1][0];
  });
  keysAndTips(() => { if (redraw) redraw(); });
  addEventListener("hashchange", follow);
  document.addEventListener("click", (event) => { // in a notebook's frame, links would lead to the notebook
    const link = event.target.closest && event.target.closest("a[href^='#']");
    if (link) { event.preventDefault(); location.hash = link.getAttribute("href"); }
  });
  follow();
}
start();
