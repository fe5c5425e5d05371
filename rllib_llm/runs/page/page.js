"use strict";
const DATA = JSON.parse(document.getElementById("data").textContent);
const COLORS = ["#0b6e99", "#c4540a", "#3f7d20", "#8a3ffc", "#a2191f", "#6f6f6f"];
const PAGE_ROWS = 50;
const MEASURES = { "log-prob": 1, advantage: 2, KL: 3 };

function make(tag, options = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(options)) {
    if (name === "text") element.textContent = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}
function svg(tag, options = {}, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(options)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  return element;
}
function shown(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2);
  return Number(value.toPrecision(4)).toLocaleString("en-US", { maximumFractionDigits: 4 });
}
const tip = document.getElementById("tip");
function showTip(event, text) {
  tip.textContent = text;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = Math.max(4, Math.min(event.clientX + 14, innerWidth - box.width - 4)) + "px";
  tip.style.top = Math.max(4, Math.min(event.clientY + 14, innerHeight - box.height - 4)) + "px";
}
function hideTip() { tip.hidden = true; }

// --- curves ---------------------------------------------------------------------------------

function ticks(low, high, count) {
  const span = high - low || Math.abs(high) || 1;
  const raw = span / count;
  const power = Math.pow(10, Math.floor(Math.log10(raw)));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw);
  const first = Math.ceil(low / step);
  const places = Array.from({ length: count + 2 }, (_, i) => (first + i) * step); // a sum may stand still
  return [...new Set(places)].filter((value) => value <= high + step * 1e-9);
}
function plot(title, unit, xTitle, curves) {
  const [width, height, left, right, top, bottom] = [420, 230, 52, 12, 10, 34];
  const points = curves.flatMap((curve) => curve.x.map((x, i) => [x, curve.y[i]]).filter((p) => p[1] !== null));
  let [x0, x1] = [Math.min(...points.map((p) => p[0])), Math.max(...points.map((p) => p[0]))];
  let [y0, y1] = [Math.min(...points.map((p) => p[1])), Math.max(...points.map((p) => p[1]))];
  if (x1 === x0) x1 = x0 + 1;
  if (y1 - y0 < 1e-9 * Math.abs(y1)) y0 = y1; // round-off of a constant
  const room = (y1 - y0) * 0.06 || Math.abs(y1) * 0.1 || 1;
  if (y1 === y0 || y0 < 0 || y0 - room > 0) y0 -= room;
  y1 += room;
  const px = (x) => left + ((x - x0) / (x1 - x0)) * (width - left - right);
  const py = (y) => top + (1 - (y - y0) / (y1 - y0)) * (height - top - bottom);
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": title });
  for (const y of ticks(y0, y1, 4)) {
    picture.append(svg("line", { class: "axis", x1: left, x2: width - right, y1: py(y), y2: py(y) }));
    picture.append(svg("text", { x: left - 6, y: py(y) + 4, "text-anchor": "end" }, shown(y)));
  }
  for (const x of ticks(x0, x1, 4)) picture.append(svg("text", { x: px(x), y: height - 18, "text-anchor": "middle" }, shown(x)));
  picture.append(svg("text", { x: (left + width - right) / 2, y: height - 3, "text-anchor": "middle" }, xTitle));
  for (const curve of curves) {
    const kept = curve.x.map((x, i) => [x, curve.y[i]]).filter((p) => p[1] !== null);
    const path = kept.map((p, i) => `${i ? "L" : "M"}${px(p[0]).toFixed(1)},${py(p[1]).toFixed(1)}`).join("");
    picture.append(svg("path", { d: path, fill: "none", stroke: curve.color, "stroke-width": 2,
      "stroke-dasharray": curve.held ? "2 5" : "none", "stroke-linecap": "round" }));
    if (kept.length < 2 || curve.held) for (const p of kept) picture.append(svg("circle", { cx: px(p[0]), cy: py(p[1]), r: 3, fill: curve.color }));
  }
  const cross = svg("line", { class: "cross", y1: top, y2: height - bottom, visibility: "hidden" });
  picture.append(cross);
  picture.addEventListener("pointermove", (event) => {
    const box = picture.getBoundingClientRect();
    const at = x0 + (((event.clientX - box.left) / box.width) * width - left) / (width - left - right) * (x1 - x0);
    const lines = curves.map((curve) => {
      let best = -1;
      curve.x.forEach((x, i) => { if (curve.y[i] !== null && (best < 0 || Math.abs(x - at) < Math.abs(curve.x[best] - at))) best = i; });
      return best < 0 ? "" : `${curve.label}: ${shown(curve.y[best])} at ${shown(curve.x[best])}`;
    });
    const clamped = Math.min(Math.max(at, x0), x1);
    cross.setAttribute("x1", px(clamped)); cross.setAttribute("x2", px(clamped));
    cross.setAttribute("visibility", "visible");
    showTip(event, lines.filter(Boolean).join("\n"));
  });
  picture.addEventListener("pointerleave", () => { cross.setAttribute("visibility", "hidden"); hideTip(); });
  return make("figure", {}, make("figcaption", { text: title }, make("span", { text: unit })), picture);
}
function nameOf(trial) { return DATA.several ? `${trial.run} · ${trial.label}` : trial.label; }
function curvesView(trials) {
  const found = new Map();
  trials.forEach((trial, index) => trial.panels.forEach((panel) => {
    const key = `${panel.title}|${panel.unit}`;
    if (!found.has(key)) found.set(key, { ...panel, curves: [] });
    for (const curve of panel.curves) found.get(key).curves.push({
      ...curve, held: curve.name === "held out", color: COLORS[index % COLORS.length],
      label: trials.length > 1 ? `${nameOf(trial)}, ${curve.name}` : curve.name });
  }));
  const legend = make("div", { class: "legend" });
  trials.forEach((trial, index) => {
    const line = make("i"); line.style.borderColor = COLORS[index % COLORS.length];
    legend.append(make("span", {}, line, nameOf(trial)));
  });
  const dots = make("i", { class: "held" });
  if (trials.some((t) => t.panels.some((p) => p.curves.some((c) => c.name === "held out")))) legend.append(make("span", {}, dots, "held out"));
  return [legend, make("div", { class: "plots" }, ...[...found.values()].map((p) => plot(p.title, p.unit, p.x_title, p.curves)))];
}

// --- tables ---------------------------------------------------------------------------------

function table(headings, rows, numbers = [], kind = "") {
  const head = make("tr", {}, ...headings.map((h, i) => make("th", { text: h, class: numbers.includes(i) ? "num" : "" })));
  const body = rows.map((row) => make("tr", { class: row.differs ? "differs" : "" }, ...row.cells.map((cell, i) =>
    make("td", { class: numbers.includes(i) ? "num" : "text", "data-name": headings[i] }, cell))));
  return make("div", { class: "wide" }, make("table", { class: kind }, make("thead", {}, head), make("tbody", {}, ...body)));
}
function summaryView(trials) {
  const parts = [];
  for (const trial of trials) {
    const time = trial.seconds === null ? "" : `${shown(trial.iterations)} iterations, ${shown(trial.seconds)} s of training`;
    parts.push(make("div", {}, make("h2", { text: nameOf(trial) }), make("p", { class: "dim", text: time }),
      ...trial.signs.map((text) => make("div", { class: "sign", text })),
      table(["result", "first", "last"], trial.summary.map((cells) => ({ cells })), [1, 2])));
  }
  return [make("div", { class: "two" }, ...parts)];
}
function mapView(trials, field) {
  const names = [...new Set(trials.flatMap((trial) => Object.keys(trial[field])))].sort();
  if (!names.length) return [make("p", { class: "dim", text: "Nothing was noted." })];
  const rows = names.map((name) => {
    const values = trials.map((trial) => trial[field][name] ?? "–");
    return { cells: [name, ...values], differs: trials.length > 1 && new Set(values).size > 1 };
  });
  return [table([field === "settings" ? "setting" : "of the environment", ...trials.map(nameOf)], rows)];
}
function pairsView(trials) {
  return trials.flatMap((trial) => {
    const several = trial.pairs.some((pair) => pair.env);
    return !trial.pairs.length ? [] : [make("h2", { text: nameOf(trial) }),
      table([...(several ? ["environment"] : []), "prompt", "before", "score", "after", "score"], trial.pairs.map((pair) => ({
        cells: [...(several ? [pair.env] : []), pair.prompt, pair.before, shown(pair.score_before), pair.after, shown(pair.score_after)] })),
        several ? [3, 5] : [2, 4], "rows")];
  });
}

// --- completions ----------------------------------------------------------------------------

function colour(share) { // -1: red, 0: none, 1: blue
  const strength = Math.min(1, Math.abs(share)) * 0.65;
  return share < 0 ? `rgba(205, 60, 40, ${strength})` : `rgba(30, 120, 200, ${strength})`;
}
function spread(rows, index) {
  const sizes = rows.flatMap((row) => row.tokens.map((t) => t[index])).filter((v) => v !== null).map(Math.abs).sort((a, b) => a - b);
  return sizes.length ? sizes[Math.floor(sizes.length * 0.95)] || 1 : 0;
}
function coloured(row, index, reach) {
  if (!row.tokens.length || !index || !reach) return document.createTextNode(row.completion);
  const names = Object.entries(MEASURES);
  return make("span", {}, ...row.tokens.map((token) => {
    const value = token[index];
    const span = make("span", { class: "token", text: token[0] });
    if (value !== null) span.style.background = colour(value / reach);
    span.addEventListener("pointerenter", (event) => showTip(event, names.map(([n, i]) => `${n}: ${shown(token[i])}`).join("\n")));
    span.addEventListener("pointerleave", hideTip);
    return span;
  }));
}
function completionsView(trials) {
  const all = trials.flatMap((trial) => trial.rows.map((row) => ({ ...row, run: nameOf(trial), thumbnails: trial.thumbnails })));
  if (!all.length) return [make("p", { class: "dim", text: "No completions were kept: log_samples_every says how often they are." })];
  const known = Object.entries(MEASURES).filter(([, i]) => all.some((row) => row.tokens.some((t) => t[i] !== null)));
  const reaches = new Map(known.map(([, i]) => [i, spread(all, i)])); // once: rows are searched at each key
  const state = { text: "", run: "", split: "", iteration: "", measure: known.length ? known[0][0] : "", sort: "iteration", down: true, num: PAGE_ROWS };
  const place = make("div");
  const count = make("span", { class: "dim" });
  const choose = (field, label, values, names) => make("select", { "aria-label": label, onchange: (e) => { state[field] = e.target.value; state.num = PAGE_ROWS; draw(); } },
    make("option", { value: "", text: label }), ...values.map((v, i) => make("option", { value: v, text: names ? names[i] : v })));
  const distinct = (field) => [...new Set(all.map((row) => String(row[field])))];
  const iterations = distinct("iteration").sort((a, b) => a - b);
  const measure = choose("measure", "no colours", known.map(([n]) => n), known.map(([n]) => `colour by ${n}`));
  measure.value = state.measure;
  const controls = make("div", { class: "controls" },
    make("input", { type: "search", placeholder: "Search prompts and completions", "aria-label": "Search", oninput: (e) => { state.text = e.target.value.toLowerCase(); state.num = PAGE_ROWS; draw(); } }),
    ...(distinct("run").length > 1 ? [choose("run", "all runs", distinct("run"))] : []),
    ...(distinct("split").length > 1 ? [choose("split", "training and held out", distinct("split"))] : []),
    choose("iteration", "all iterations", iterations, iterations.map((i) => `iteration ${i}`)),
    ...(known.length ? [measure] : []), count);
  const columns = [["iteration", "iteration"], ...(distinct("run").length > 1 ? [["run", "run"]] : []), ["prompt", "prompt"], ["completion", "completion"], ["score", "score"]];
  function draw() {
    const rows = all.filter((row) => (!state.run || row.run === state.run) && (!state.split || row.split === state.split)
      && (!state.iteration || String(row.iteration) === state.iteration)
      && (!state.text || `${row.prompt}\n${row.completion}`.toLowerCase().includes(state.text)));
    const sign = state.down ? -1 : 1;
    const key = state.sort;
    rows.sort((a, b) => a[key] === b[key] ? 0 : a[key] === null ? 1 : b[key] === null ? -1 : (a[key] < b[key] ? -1 : 1) * sign);
    count.textContent = `${rows.length} of ${all.length}`;
    const index = MEASURES[state.measure] || 0;
    const reach = reaches.get(index) || 0;
    const head = make("tr", {}, ...columns.map(([field, name]) => make("th", { class: field === "score" || field === "iteration" ? "num" : "", "aria-sort": key === field ? (state.down ? "descending" : "ascending") : "none" },
      make("button", { text: name + (key === field ? (state.down ? " ↓" : " ↑") : ""), onclick: () => { state.down = key === field ? !state.down : true; state.sort = field; draw(); } }))));
    const body = rows.slice(0, state.num).map((row) => make("tr", {}, ...columns.map(([field, name]) => {
      const cell = make("td", { "data-name": name, class: field === "score" || field === "iteration" ? "num" : "text" });
      if (field === "completion") {
        cell.append(coloured(row, index, reach));
        const parts = Object.entries(row.parts).map(([n, v]) => `${n} ${shown(v)}`).join("  ");
        if (parts) cell.append(make("div", { class: "parts", text: parts }));
      } else if (field === "prompt") {
        for (const image of row.images || []) {
          cell.append(row.thumbnails[image] ? make("img", { src: row.thumbnails[image], alt: image, title: image }) : `[image ${image}] `);
        }
        cell.append(String(row[field]));
      } else cell.append(field === "score" || field === "iteration" ? shown(row[field]) : String(row[field]));
      return cell;
    })));
    place.replaceChildren(make("div", { class: "wide" }, make("table", { class: "rows" }, make("thead", {}, head), make("tbody", {}, ...body))));
    if (rows.length > state.num) place.append(make("button", { class: "more", text: `Show ${Math.min(PAGE_ROWS, rows.length - state.num)} more`, onclick: () => { state.num += PAGE_ROWS; draw(); } }));
  }
  draw();
  return [controls, place];
}

// --- the page -------------------------------------------------------------------------------

const VIEWS = {
  Curves: curvesView, Summary: summaryView, Completions: completionsView, "Before and after": pairsView,
  Settings: (trials) => mapView(trials, "settings"), Environment: (trials) => mapView(trials, "environment"),
};
function open(name) {
  document.querySelectorAll("nav button").forEach((b) => b.setAttribute("aria-selected", b.textContent === name));
  document.getElementById("main").replaceChildren(...VIEWS[name](DATA.trials));
  history.replaceState(null, "", `#${encodeURIComponent(name)}`);
}
document.title = DATA.title;
document.getElementById("title").textContent = DATA.title;
for (const name of Object.keys(VIEWS)) {
  if (name === "Before and after" && !DATA.trials.some((t) => t.pairs.length)) continue;
  document.getElementById("tabs").append(make("button", { role: "tab", text: name, onclick: () => open(name) }));
}
const asked = decodeURIComponent(location.hash.slice(1));
open(VIEWS[asked] ? asked : "Curves");
