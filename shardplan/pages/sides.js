"use strict";
// Two sides of a plan: two plans, or a plan and its compiled program. `shardplan/pages/sides.py` says what the data are.

const SIDE = ["#4e79a7", "#f28e2b"];
const side = (number_) => el("span", { class: "swatch", style: { background: SIDE[number_] } });
const signed = (bytes) => (bytes > 0 ? "+" : bytes < 0 ? "−" : "") + size(Math.abs(bytes));
const SHOWN = {
  text: (value) => (value === null ? "" : breakable(String(value))), number: (value) => (value === null ? "" : number(value, 0)),
  bytes: (value) => (value === null ? "" : size(value)), signed: (value) => (value === null ? "" : signed(value)),
  seconds: (value) => (value === null ? "" : time(1e9 * value)), percent: (value) => (value === null ? "" : percent(value)),
  layout: (value) => (value === null ? el("span", { class: "faint" }, "none") : tensorChips(value[0], value[1])),
};
const NUMBERS = ["number", "bytes", "signed", "seconds", "percent"];
const alignment = (kind) => (NUMBERS.includes(kind) ? "number" : kind === "text" ? "wrap" : null);
const searchable = (value) => (Array.isArray(value) ? D.types[value[0]].join(" ") : String(value));

function twinBar(one, other, most) {
  const bar = (value, place) => el("div", { class: "bar twin" }, el("i", { style: { width: (most ? (100 * (value || 0)) / most : 0) + "%", background: SIDE[place] } }));
  return el("td", { class: "twins", "aria-hidden": "true" }, bar(one, 0), bar(other, 1));
}

function sectionTable(section, needle) {
  const [one, other] = section.bars || [], rows = section.rows.filter((row) => matches(needle, ...row.map(searchable)));
  const most = section.bars ? Math.max(...section.rows.map((row) => Math.max(row[one] || 0, row[other] || 0)), 0) : 0;
  const cells = (row) => row.map((value, place) => el("td", { class: alignment(section.columns[place][1]) }, SHOWN[section.columns[place][1]](value)));
  const sums = section.columns.map(([, kind], place) => (NUMBERS.includes(kind) ? rows.reduce((sum, row) => sum + (row[place] || 0), 0) : null));
  const total = section.total && rows.length ? [el("tr", { class: "total" }, el("td", {}, "total"), cells(sums).slice(1), section.bars ? el("td", {}) : "")] : [];
  if (!rows.length) return el("p", { class: "faint" }, section.rows.length ? "Nothing matches." : section.nothing);
  return el("div", { class: "scroll" }, el("table", { "aria-label": section.title },
    el("thead", {}, el("tr", {}, section.columns.map(([name, kind]) => el("th", { class: NUMBERS.includes(kind) ? "number" : null }, name)), section.bars ? el("th", {}) : "")),
    el("tbody", {}, rows.map((row) => el("tr", {}, cells(row), section.bars ? twinBar(row[one], row[other], most) : "")), total)));
}

const REDRAWS = [];
function sectionCurves(section) {
  const height = 220, margin = 70, canvas = el("canvas", { role: "img", "aria-label": section.title }), said = el("p", { class: "faint" }, " ");
  const most = Math.max(...section.series.flat()), limit = D.limit, top = 1.06 * Math.max(most, limit && limit < 4 * most ? limit : 0) || 1;
  const place = (share, series) => Math.min(series.length - 1, Math.floor(share * series.length));
  function draw(share) {
    const [context, width] = fitted(canvas, height), inner = width - margin - 10, low = height - 8, y = (bytes) => low - (bytes / top) * (low - 8);
    context.clearRect(0, 0, width, height);
    context.fillStyle = colour("--faint");
    for (const bytes of ticks(0, top, 6)) { context.fillText(size(bytes), 4, y(bytes) + 4); context.fillRect(margin, y(bytes), inner, 0.3); }
    context.lineWidth = 1.6;
    section.series.forEach((series, number_) => {
      context.strokeStyle = SIDE[number_];
      context.beginPath();
      series.forEach((bytes, at) => context.lineTo(margin + ((at + 0.5) / series.length) * inner, y(bytes)));
      context.stroke();
    });
    if (limit && limit <= top) {
      context.strokeStyle = context.fillStyle = colour("--limit");
      context.setLineDash([6, 4]);
      context.beginPath(); context.moveTo(margin, y(limit)); context.lineTo(width - 10, y(limit)); context.stroke();
      context.setLineDash([]);
      context.fillText(`limit ${size(limit)}`, width - 120, y(limit) - 4);
    }
    if (share !== undefined) { context.fillStyle = colour("--text"); context.fillRect(margin + share * inner, 4, 1, low - 4); }
  }
  canvas.addEventListener("mousemove", (event) => {
    const box = canvas.getBoundingClientRect(), share = Math.max(0, Math.min(1, (event.clientX - box.left - margin) / (box.width - margin - 10)));
    draw(share);
    said.textContent = `${percent(share)} of the schedule: ` + section.series.map((series, number_) => `${D.names[number_]} ${size(series[place(share, series)])}`).join(", ");
  });
  REDRAWS.push(() => draw());
  return [canvas, said];
}

function start() {
  document.title = D.title + " – shardplan";
  byId("tabs").remove();
  byId("view").removeAttribute("role");
  const redraw = () => REDRAWS.forEach((one) => one()), known = (one, other) => one !== null && other !== null && one !== other,
    difference = (kind, one, other) => (!known(one, other) ? "" : kind === "bytes" ? signed(other - one) : kind === "seconds" ? (other < one ? "−" : "+") + time(1e9 * Math.abs(other - one)) : "");
  byId("head").replaceChildren(el("div", { class: "titles" }, el("h1", {}, D.title), themeButton(redraw)), ...D.warnings.map((warning) => el("div", { class: "warning" }, warning)),
    el("table", { class: "small", "aria-label": "Figures" }, el("thead", {}, el("tr", {}, el("th", {}), D.names.map((name, place) => el("th", { class: "number" }, side(place), name)), el("th", { class: "number" }, "difference"))),
      el("tbody", {}, D.figures.map(([label, kind, one, other]) => el("tr", {}, el("td", {}, label), [one, other].map((value) => el("td", { class: "number" }, SHOWN[kind](value))), el("td", { class: "number" }, difference(kind, one, other)))))),
    ...D.texts.map((said) => el("div", { class: "faint" }, said)), el("div", { class: "faint" }, "Made by ", el("code", {}, D.command)));
  const place = el("div", {}), drawings = new Map(D.sections.filter((section) => section.series).map((section) => [section, sectionCurves(section)]));
  const draw = (needle) => place.replaceChildren(...D.sections.map((section) => el("section", { id: section.id }, el("h2", {}, section.title), section.note ? el("p", { class: "faint" }, section.note) : "", drawings.get(section) || sectionTable(section, needle))));
  draw("");
  byId("view").replaceChildren(el("div", { class: "controls" }, searchBox("Search the tables", draw)), place);
  keysAndTips(redraw);
  redraw();
}
start();
