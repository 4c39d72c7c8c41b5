// The page of `cairn report --html`. All numbers are those of the report beside this script; text from a run is set as
// text, never as markup. Charts are SVG, so that they print sharply and take their colours from the style.
"use strict";

const report = JSON.parse(document.getElementById("report").textContent);
const byId = id => document.getElementById(id);
const PHASES = ["forward", "backward", "pipeline", "reduce", "optimizer", "data", "checkpoint", "validation", "log", "other"];
const MARK_COLOURS = { failure: "--bad", restart: "--accent", back: "--back", alarm: "--warn", change: "--good", note: "--dim" };
const LABEL_COLOURS = { good: "--good", suspect: "--warn", bad: "--bad", new: "--dim" };

// ---- Elements and numbers --------------------------------------------------------------------------------------------

function el(tag, attributes = {}, ...children) {
  const svg = ["svg", "g", "path", "line", "rect", "text", "circle"].includes(tag);
  const out = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) out.setAttribute(name, value);
  out.append(...children);
  return out;
}
const colour = name => `--of: var(${name})`;
const swatch = name => el("i", { class: "swatch", style: colour(name) });

function number(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(3).replace(/\.?0+e/, "e").replace("e+", "e");
  if (size >= 1e4) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(5)));
}
function short(value) {
  const size = Math.abs(value);
  for (const [unit, letter] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]])
    if (size >= unit) return Number((value / unit).toPrecision(4)) + letter;
  if (size !== 0 && size < 1e-3) return value.toExponential(1).replace(".0e", "e");
  return String(Number(value.toPrecision(4)));
}
function duration(seconds) {
  if (!Number.isFinite(seconds)) return "–";
  if (seconds < 60) return Number(seconds.toPrecision(3)) + " s";
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min ${Math.floor(seconds % 60)} s`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}
const percent = share => Number.isFinite(share) ? (100 * share).toFixed(1) + " %" : "–";
const clock = unix => Number.isFinite(unix) && unix > 0 && unix < 8e12 ? new Date(unix * 1000).toISOString().replace("T", " ").slice(0, 19) : "–";
const counted = (n, what) => `${whole(n)} ${what}${n === 1 ? "" : "s"}`;
const whole = value => Number.isFinite(value) ? value.toLocaleString("en") : "–";

// ---- State: kept in the address, so that a page that loads itself again shows the same -------------------------------

const state = { x: "step", zoom: null, smooth: 0, logX: false, logY: false, clip: false, theme: "", off: [], paused: false };
try {
  Object.assign(state, JSON.parse(decodeURIComponent(location.hash.slice(1))));
} catch (error) { /* no state, or another page's */ }
if (!["step", "tokens", "seconds"].includes(state.x)) state.x = "step";
if (!Array.isArray(state.off)) state.off = [];
if (!(Array.isArray(state.zoom) && state.zoom.length === 2 && state.zoom.every(Number.isFinite))) state.zoom = null;
function keep() {
  history.replaceState(null, "", "#" + encodeURIComponent(JSON.stringify(state)));
}

// ---- Runs, their series and charts -----------------------------------------------------------------------------------

const lastPart = path => path.replace(/\/+$/, "").split("/").pop() || path;
const runs = report.runs.map((data, index) => {
  const twice = report.runs.some((other, k) => k !== index && lastPart(other.run) === lastPart(data.run));
  return { data, index, name: twice ? data.run : lastPart(data.run), colour: `--c${index % 8}`, axes: data.curves.axes };
});
const several = runs.length > 1;
const shown = run => !state.off.includes(run.index);

function line(run, name, label, colourName, more = {}) {
  const series = run.data.curves.series[name];
  return series && { run, name, label, colour: colourName, series, axis: run.axes[series.axis], ...more };
}
function namesWith(before) {
  const out = new Set();
  for (const run of runs)
    for (const name of Object.keys(run.data.curves.series)) if (name.startsWith(before)) out.add(name);
  return [...out].sort();
}
/// One chart for a series: a line for each run.
function perRun(title, unit, names, more = {}) {
  const lines = runs.flatMap(run => names.map(([name, label, extra]) =>
    line(run, name, several ? run.name + (label ? ", " + label : "") : label || title, run.colour, extra))).filter(Boolean);
  return lines.length ? { title, unit, lines, ...more } : null;
}
/// Series of one kind with many names: one chart with a line for each name, or of several runs a chart for each name.
function perName(title, unit, before) {
  const names = namesWith(before), exact = before.startsWith("valid");
  if (names.length < 2 && before === "valid_source_loss/") return [];
  if (several) return names.map(name => perRun(`${title}: ${name.slice(before.length)}`, unit, [[name, "", { exact }]]));
  const lines = names.map((name, k) => line(runs[0], name, name.slice(before.length), `--c${k % 8}`, { dash: k >= 8, exact }));
  return lines.length ? [{ title, unit, lines }] : [];
}
/// Numbers of tasks: one chart for each kind of number ("acc", "loss"), of several runs one for each task too.
function taskCharts() {
  const names = [...namesWith("eval/"), ...namesWith("evals/")], out = [];
  for (const of of new Set(names.map(name => name.split("/").pop()))) {
    const same = names.filter(name => name.split("/").pop() === of);
    const task = name => name.slice(name.indexOf("/") + 1, -of.length - 1) + (name.startsWith("evals/") ? ", checkpoints" : "");
    if (several) out.push(...same.map(name => perRun(`Tasks, ${of}: ${task(name)}`, "", [[name, "", { exact: true }]])));
    else out.push({ title: `Tasks: ${of}`, unit: "", lines: same.map((name, k) => line(runs[0], name, task(name), `--c${k % 8}`, { dash: k >= 8, exact: true })) });
  }
  return out;
}
function phases(run) {
  const names = Object.keys(run.data.curves.series).filter(name => name.startsWith("split_ms/"));
  const place = name => (PHASES.indexOf(name.slice(9)) + PHASES.length + 1) % (PHASES.length + 1);
  names.sort((a, b) => place(a) - place(b));
  if (!names.length) return null;
  const lines = names.map((name, k) => line(run, name, name.slice(9), name === "split_ms/other" ? "--dim" : `--c${k % 8}`));
  return { title: several ? `Time by phase: ${run.name}` : "Time by phase", unit: "ms a step, rank 0", lines, stack: true, run };
}

const charts = [
  perRun("Loss", "nats a token", [["loss", several ? "" : "training"], ["valid_loss", "validation", { dots: true }]], { wide: true, marks: true }),
  ...perName("Loss of each source", "nats a token", "source_loss/"),
  ...perName("Loss of each channel", "nats a token", "channel_loss/"),
  ...perName("Validation of each source", "nats a token", "valid_source_loss/"),
  ...taskCharts(),
  perRun("Gradient norm", "before clipping", [["grad_norm", ""]]),
  perRun("Learning rate", "", [["lr", "", { exact: true }]], { zero: true }),
  perRun("Tokens a second", "", [["tokens_per_s", ""]], { zero: true }),
  perRun("MFU", "share of the peak", [["mfu", ""]], { zero: true }),
  namesWith("mfu").length ? null : perRun("Model TFLOP/s", "", [["tflops", ""]], { zero: true }),
  perRun("Step time", "ms", [["step_ms", ""]], { zero: true }),
  perRun("Loss of further predictions (mtp)", "nats a token", [["mtp_loss", ""]]),
  perRun("Loss scale", "fp16", [["loss_scale", "", { exact: true }]]),
  perRun("Largest attention score", "", [["max_attention_score", ""]]),
  perRun("Saves", "seconds to disk", [["save_seconds", "", { dots: true, points: true }]], { zero: true }),
  perRun("Stall for a snapshot", "ms of training", [["checkpoint_lost_ms", "", { dots: true, points: true }]], { zero: true }),
  perRun("Stall for a save", "ms of training", [["save_pause_ms", "", { dots: true, points: true }]], { zero: true }),
  ...runs.map(phases),
].filter(chart => chart && chart.lines.length);

// ---- Scales ----------------------------------------------------------------------------------------------------------

const positive = value => Math.max(value, 1e-12);
const map = (value, log) => log ? Math.log10(positive(value)) : value;
const unmap = (value, log) => log ? 10 ** value : value;

function ticks(from, to, log, wanted) {
  if (log) {
    const out = [], steps = to - from > wanted ? [1] : to - from > 1.5 ? [1, 3] : [1, 2, 5];
    const every = Math.max(1, Math.ceil((to - from) / wanted));
    for (let power = Math.floor(from); power <= to; power += every)
      for (const times of steps) {
        const at = Math.log10(times) + power;
        if (at >= from - 1e-9 && at <= to + 1e-9) out.push(at);
      }
    if (out.length >= 3) return out;
    return ticks(10 ** from, 10 ** to, false, wanted).filter(v => v > 0).map(Math.log10);
  }
  const rough = (to - from) / wanted, unit = 10 ** Math.floor(Math.log10(rough));
  const by = [1, 2, 2.5, 5, 10].find(times => times * unit >= rough * 0.999) * unit;
  const out = [];
  for (let k = Math.ceil(from / by - 1e-9); k * by <= to + by * 1e-9 && out.length < 50; ++k) out.push(k * by);
  return out;
}
/// Round parts of a minute, an hour or a day.
function timeTicks(from, to, wanted) {
  const by = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 43200, 86400, 172800, 604800, 2592000]
    .find(step => (to - from) / step <= wanted) || (to - from) / wanted;
  const out = [];
  for (let k = Math.ceil(from / by); k * by <= to && out.length < 50; ++k) out.push(k * by);
  return out;
}
function xDomain() {
  if (state.zoom) return state.zoom.map(value => map(value, state.logX));
  let from = Infinity, to = -Infinity;
  for (const run of runs.filter(shown)) for (const axis of run.axes) {
    for (const value of axis[state.x]) {
      if (value === null || (state.logX && value <= 0)) continue;
      from = Math.min(from, value);
      to = Math.max(to, value);
    }
    if (state.x === "step" && axis.step.length) to = Math.max(to, axis.last_step);
  }
  if (!(from < to)) [from, to] = Number.isFinite(from) ? [from, from + 1] : [0, 1];
  return [map(from, state.logX), map(to, state.logX)];
}
/// Where a step of a run lies on the x axis.
function placeOf(run, step) {
  if (state.x === "step") return step;
  const axis = run.axes[0];
  if (!axis) return NaN;
  return axis[state.x][nearest(axis.step, step)];
}
/// The index of the last entry that is not above the value.
function before(sorted, value) {
  let from = 0, to = sorted.length;
  while (from < to) {
    const middle = (from + to) >> 1;
    if (sorted[middle] <= value) from = middle + 1;
    else to = middle;
  }
  return from - 1;
}
function nearest(sorted, value) {
  const at = Math.max(0, before(sorted, value));
  return at + 1 < sorted.length && sorted[at + 1] - value < value - sorted[at] ? at + 1 : at;
}

// ---- Smoothing: an exponential mean whose weight a step is the same in buckets of any size -----------------------------

const weight = () => 1 - 10 ** (-state.smooth / 25);  // 0 to 0.9999
const isSmoothed = of => state.smooth > 0 && !of.dots && !of.exact;
function smoothed(of) {
  if (!isSmoothed(of)) return of.series.mean;
  if (of.smoothedBy === state.smooth) return of.smoothed;
  const keepShare = weight() ** of.axis.each;
  let sum = 0, norm = 0;
  of.smoothed = of.series.mean.map(value => {
    if (value === null) return null;
    sum = keepShare * sum + (1 - keepShare) * value;
    norm = keepShare * norm + (1 - keepShare);
    return sum / norm;
  });
  of.smoothedBy = state.smooth;
  return of.smoothed;
}

// ---- Drawing ---------------------------------------------------------------------------------------------------------

let printing = false;  // charts have the widths of a page's columns then
const LEFT = 56, RIGHT = 10, TOP = 8, BOTTOM = 24;

/// Columns of pixels: mean of the (smoothed) values, and the least and the greatest of all values in each.
function columnsOf(of, scale) {
  const xs = of.axis[state.x], { mean, least, greatest } = of.series, values = smoothed(of);
  const out = [];
  let last = null;
  for (let k = 0; k < xs.length; ++k) {
    if (xs[k] === null || (state.logX && xs[k] <= 0)) continue;
    const px = scale(xs[k]);
    if (px < LEFT && k + 1 < xs.length && scale(xs[k + 1]) < LEFT) continue;  // one before the edge stays: its line enters
    const column = Math.floor(px);
    if (last === null || last.column !== column || values[k] === null) {
      last = { column, px, sum: 0, raw: 0, count: 0, least: Infinity, greatest: -Infinity };
      out.push(last);
    }
    if (values[k] !== null) {
      last.sum += values[k];
      last.raw += mean[k];
      last.count += 1;
      last.least = Math.min(last.least, least ? least[k] : mean[k]);
      last.greatest = Math.max(last.greatest, greatest ? greatest[k] : mean[k]);
    }
    if (px > scale.right) break;
  }
  return out;
}

function yDomain(chart, drawn) {
  let from = Infinity, to = -Infinity;
  const means = [];
  for (const { columns } of drawn)
    for (const column of columns) {
      if (!column.count) continue;
      const [least, greatest] = [column.least, column.greatest];
      if (state.logY && greatest <= 0) continue;
      from = Math.min(from, state.logY && least <= 0 ? greatest : least);
      to = Math.max(to, greatest);
      means.push(column.raw / column.count);
    }
  if (state.clip && means.length > 20) {
    means.sort((a, b) => a - b);
    [from, to] = [means[Math.floor(means.length * 0.01)], means[Math.floor(means.length * 0.99)]];
  }
  if (from > to) return null;
  if (chart.zero && !state.logY && from > 0) from = 0;
  from = map(from, state.logY);
  to = map(to, state.logY);
  const room = (to - from || Math.abs(to) * 0.1 || 1) * 0.06;
  return [chart.zero && from === 0 ? 0 : from - room, to + room];
}

function pathOf(columns, yOf, gaps) {
  let out = "", pen = "M";
  for (const column of columns) {
    const value = column.count ? yOf(column) : NaN;
    if (!Number.isFinite(value)) {
      if (gaps) pen = "M";
      continue;
    }
    out += `${pen}${column.px.toFixed(1)} ${value.toFixed(1)}`;
    pen = "L";
  }
  return out;
}
function bandOf(columns, y) {
  let out = "", piece = [];
  const close = () => {
    if (piece.some(column => column.greatest > column.least)) {
      const half = piece.length === 1 ? 0.5 : 0;
      out += "M" + piece.map(c => `${(c.px - half).toFixed(1)} ${y(c.greatest).toFixed(1)}`).join("L");
      out += "L" + piece.toReversed().map(c => `${(c.px + half).toFixed(1)} ${y(c.least).toFixed(1)}`).join("L") + "Z";
    }
    piece = [];
  };
  for (const column of columns) column.count ? piece.push(column) : close();
  close();
  return out;
}

function draw(chart) {
  const width = printing ? (chart.wide ? 720 : 350) : Math.max(260, chart.figure.clientWidth - 24), height = chart.wide ? 340 : 200;
  const svg = el("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": chart.title });
  chart.svg.replaceWith(svg);
  chart.svg = svg;
  const [x0, x1] = xDomain(), right = width - RIGHT, bottom = height - BOTTOM;
  const x = value => LEFT + (map(value, state.logX) - x0) / (x1 - x0) * (right - LEFT);
  x.right = right;
  chart.scale = { x, toValue: px => unmap(x0 + (px - LEFT) / (right - LEFT) * (x1 - x0), state.logX), right, bottom };
  const lines = chart.lines.filter(of => shown(of.run));
  const drawn = lines.map(of => ({ of, columns: columnsOf(of, x) }));
  const stackTotals = chart.stack ? stack(drawn) : null;
  const domain = stackTotals ? [0, Math.max(1e-9, ...stackTotals) * 1.05] : yDomain(chart, drawn);
  const clipId = `clip${chart.index}`;
  const y = value => domain ? bottom - (map(value, state.logY && !chart.stack) - domain[0]) / (domain[1] - domain[0]) * (bottom - TOP) : bottom;
  svg.insertAdjacentHTML("beforeend", `<clipPath id="${clipId}"><rect x="${LEFT}" y="0" width="${right - LEFT}" height="${bottom + 1}"/></clipPath>`);
  if (domain) {
    for (const at of ticks(...domain, state.logY && !chart.stack, Math.max(3, height / 48))) {
      const py = bottom - (at - domain[0]) / (domain[1] - domain[0]) * (bottom - TOP);
      svg.append(el("line", { class: "grid", x1: LEFT, x2: right, y1: py, y2: py }));
      svg.append(el("text", { x: LEFT - 6, y: py + 4, "text-anchor": "end" }, short(unmap(at, state.logY && !chart.stack))));
    }
  }
  const wanted = Math.max(2, Math.floor(width / (state.x === "seconds" ? 110 : 80)));
  const places = state.x === "seconds" && !state.logX ? timeTicks(x0, x1, wanted) : ticks(x0, x1, state.logX, wanted);
  let free = 0;
  for (const at of places) {
    const px = LEFT + (at - x0) / (x1 - x0) * (right - LEFT), value = unmap(at, state.logX);
    svg.append(el("line", { class: "grid", x1: px, x2: px, y1: bottom, y2: bottom + 4 }));
    const text = state.x === "seconds" ? duration(value).replace(/ 0 (s|min|h)$/, "") : short(value), half = text.length * 3.2;
    if (px - half < free) continue;
    free = px + half + 8;
    svg.append(el("text", { x: Math.min(px, right - half + RIGHT), y: height - 7, "text-anchor": "middle" }, text));
  }
  svg.append(el("line", { class: "grid", x1: LEFT, x2: right, y1: bottom, y2: bottom }));
  const plot = el("g", { "clip-path": `url(#${clipId})` });
  svg.append(plot);
  if (!domain) svg.append(el("text", { x: (LEFT + right) / 2, y: height / 2, "text-anchor": "middle" }, "no value here"));
  if (chart.marks) drawMarks(chart, plot, x, right, bottom);
  if (stackTotals) drawStack(drawn, plot, y);
  else if (domain) for (const { of, columns } of drawn) drawLine(of, columns, plot, x, y, drawn.length);
  if (chart.marks && domain) drawAbandoned(plot, x, y);
  chart.cross = el("line", { class: "cross", x1: 0, x2: 0, y1: TOP, y2: bottom, visibility: "hidden" });
  svg.append(chart.cross);
  listen(chart);
}

function drawLine(of, columns, plot, x, y, bands) {
  const style = colour(of.colour), band = of.dots ? "" : bandOf(columns, y);
  if (band) plot.append(el("path", { class: "band", style: `${style}; opacity: ${0.22 / Math.sqrt(bands)}`, d: band }));
  if (isSmoothed(of)) plot.append(el("path", { class: "curve raw", style, d: pathOf(columns, c => y(c.raw / c.count), true) }));
  const kind = of.points ? "curve point" : of.dots ? "curve valid" : "curve";
  const more = of.dash ? { "stroke-dasharray": "7 3" } : {};
  const values = columns.filter(column => column.count);
  const path = of.points ? values.map(c => `M${c.px.toFixed(1)} ${y(c.raw / c.count).toFixed(1)}h0`).join("")
    : pathOf(columns, c => y(c.sum / c.count), !of.dots);
  const thick = of.points ? `; stroke-width: ${values.length < 100 ? 5 : 3}` : "";
  plot.append(el("path", { class: kind, style: style + thick, ...more, d: path }));
  if (!of.points && values.length <= (of.dots ? 40 : 1))
    for (const column of values) plot.append(el("circle", { class: "dot", style, r: 2.6, cx: column.px, cy: y(column.raw / column.count) }));
  let crosses = "";
  for (const step of of.series.not_finite ? of.series.not_finite.steps : []) {
    const px = x(placeOf(of.run, step));
    if (Number.isFinite(px)) crosses += `M${px - 3} ${TOP}l6 6m0 -6l-6 6`;
  }
  if (crosses) plot.append(el("path", { class: "bad", d: crosses }));
}
function drawAbandoned(plot, x, y) {
  for (const run of runs.filter(shown))
    for (const series of run.data.curves.abandoned) {
      const of = { run, series, axis: run.axes[series.axis], dots: true };
      plot.append(el("path", { class: "curve abandoned", style: colour(run.colour), d: pathOf(columnsOf(of, x), c => y(c.raw / c.count), true) }));
    }
}
function drawMarks(chart, plot, x, right, bottom) {
  chart.places = [];
  for (const run of runs.filter(shown)) {
    const at = [...run.data.marks.filter(mark => mark.kind !== "note")].map(mark => ({ px: x(placeOf(run, mark.step)), run, mark }))
      .filter(one => one.px >= LEFT - 1 && one.px <= right + 1);
    chart.places.push(...at);
    const saves = run.data.curves.series.save_seconds;
    if (saves) {
      let ticksOfSaves = "", last = -10;
      for (const step of run.axes[saves.axis].step) {
        const px = x(placeOf(run, step));
        if (px < LEFT || px > right || px - last < 2) continue;
        ticksOfSaves += `M${px.toFixed(1)} ${bottom}v-5`;
        last = px;
      }
      plot.append(el("path", { class: "save", d: ticksOfSaves }));
    }
    for (const label of run.data.labels) {
      const px = x(placeOf(run, label.step));
      if (!(px >= LEFT && px <= right)) continue;
      chart.places.push({ px, run, label });
      plot.append(el("path", { class: "flag", style: colour(LABEL_COLOURS[label.label] || "--dim"), d: `M${px} ${bottom - 14}l4 4l-4 4l-4 -4z` }));
    }
  }
  const shapes = new Map();  // one path a kind: there may be thousands
  for (const { px, mark } of chart.places.filter(one => one.mark)) {
    const of = shapes.get(mark.kind) || { lines: "", flags: "", last: -10 };
    shapes.set(mark.kind, of);
    if (px - of.last < 1 && px >= of.last) continue;
    of.last = px;
    of.lines += `M${px.toFixed(1)} ${TOP}V${bottom}`;
    of.flags += `M${px.toFixed(1)} ${TOP + 7}l-4 -7h8z`;
  }
  for (const [kind, of] of shapes) {
    const style = colour(MARK_COLOURS[kind] || "--dim");
    plot.append(el("path", { class: "mark", style, d: of.lines }), el("path", { class: "flag", style, d: of.flags }));
  }
}
/// All lines have the same axis, so the same columns.
function stack(drawn) {
  const totals = (drawn[0] ? drawn[0].columns : []).map(() => 0);
  for (const { columns } of drawn)
    columns.forEach((column, k) => {
      column.from = totals[k];
      totals[k] += column.count ? Math.max(0, column.sum / column.count) : 0;
      column.to = totals[k];
    });
  return totals;
}
function drawStack(drawn, plot, y) {
  for (const { of, columns } of drawn) {
    if (!columns.length) continue;
    const top = columns.map(c => `${c.px.toFixed(1)} ${y(c.to).toFixed(1)}`).join("L");
    const base = columns.toReversed().map(c => `${c.px.toFixed(1)} ${y(c.from).toFixed(1)}`).join("L");
    plot.append(el("path", { class: "area", style: colour(of.colour), d: `M${top}L${base}Z` }));
  }
}

// ---- Pointer: values under it, zoom by drag --------------------------------------------------------------------------

let dragged = null;
function listen(chart) {
  const svg = chart.svg, at = event => event.clientX - svg.getBoundingClientRect().left;
  svg.addEventListener("pointermove", event => {
    const px = Math.min(Math.max(at(event), LEFT), chart.scale.right);
    if (dragged && dragged.chart === chart) {
      dragged.box.setAttribute("x", Math.min(px, dragged.px));
      dragged.box.setAttribute("width", Math.abs(px - dragged.px));
    }
    hover(chart, px, event);
  });
  svg.addEventListener("pointerleave", unhover);
  svg.addEventListener("pointerdown", event => {
    if (event.button !== 0 || event.pointerType === "touch") return;
    const px = Math.min(Math.max(at(event), LEFT), chart.scale.right);
    const box = el("rect", { class: "drag", x: px, y: TOP, width: 0, height: chart.scale.bottom - TOP });
    svg.append(box);
    svg.setPointerCapture(event.pointerId);
    dragged = { chart, px, box };
  });
  svg.addEventListener("pointerup", event => {
    if (!dragged || dragged.chart !== chart) return;
    const px = Math.min(Math.max(at(event), LEFT), chart.scale.right), from = dragged.px;
    dragged.box.remove();
    dragged = null;
    if (Math.abs(px - from) < 5) return;
    change({ zoom: [chart.scale.toValue(Math.min(px, from)), chart.scale.toValue(Math.max(px, from))] });
    unhover();
  });
  svg.addEventListener("pointercancel", () => { if (dragged) dragged.box.remove(); dragged = null; });
  svg.addEventListener("dblclick", () => change({ zoom: null }));
}
function placeText(axis, k) {
  const parts = [`step ${whole(axis.step[k])}`];
  if (axis.tokens[k] > 0) parts.push(`${short(axis.tokens[k])} tokens`);
  if (axis.seconds[k] !== null) parts.push(duration(axis.seconds[k]));
  return parts.join(" · ");
}
function hover(chart, px, event) {
  const value = chart.scale.toValue(px), rows = [];
  let head = "", headDistance = Infinity;
  for (const of of chart.lines.filter(one => shown(one.run))) {
    const xs = of.axis[state.x], k = nearest(xs, value), distance = Math.abs(chart.scale.x(xs[k]) - px);
    if (!xs.length || distance > (of.dots ? 25 : 40)) continue;
    if (distance < headDistance) [head, headDistance] = [placeText(of.axis, k), distance];
    const mean = of.series.mean[k], smooth = smoothed(of)[k];
    const wide = of.series.least && of.series.least[k] !== of.series.greatest[k]
      ? `${number(of.series.least[k])} … ${number(of.series.greatest[k])} in ${of.axis.each} steps` : "";
    rows.push(el("tr", {}, el("td", {}, swatch(of.colour), of.label), el("td", { class: "n" }, number(smooth)),
      el("td", { class: "wide" }, [isSmoothed(of) ? `raw ${number(mean)}` : "", wide].filter(Boolean).join(", "))));
  }
  const near = (chart.places || []).filter(one => Math.abs(one.px - px) < 5).slice(0, 6).map(({ run, mark, label }) => {
    const who = several ? run.name + ": " : "";
    return mark ? el("p", { class: "mark", style: colour(MARK_COLOURS[mark.kind]) }, `${who}step ${whole(mark.step)}: ${mark.text}`)
      : el("p", { class: "mark", style: colour(LABEL_COLOURS[label.label] || "--dim") }, `${who}checkpoint ${whole(label.step)}: ${label.label}${label.why ? ", " + label.why : ""}`);
  });
  const tip = byId("tip");
  tip.hidden = !rows.length && !near.length;
  tip.replaceChildren(el("p", {}, head), el("table", {}, ...rows.slice(0, 16)), ...near);
  const box = tip.getBoundingClientRect();
  const left = event.clientX + 16 + box.width > innerWidth ? event.clientX - box.width - 16 : event.clientX + 16;
  tip.style.left = Math.max(4, left) + "px";
  tip.style.top = Math.max(4, Math.min(event.clientY + 14, innerHeight - box.height - 6)) + "px";
  for (const other of charts) {
    const at = other === chart ? px : other.scale.x(value);
    other.cross.setAttribute("x1", at);
    other.cross.setAttribute("x2", at);
    other.cross.setAttribute("visibility", at >= LEFT && at <= other.scale.right ? "visible" : "hidden");
  }
}
function unhover() {
  byId("tip").hidden = true;
  for (const chart of charts) chart.cross.setAttribute("visibility", "hidden");
}

// ---- Text ------------------------------------------------------------------------------------------------------------

const failures = data => data.failures.reduce((sum, one) => sum + one.times, 0);
const FACTS = [
  ["steps", data => whole(data.steps)],
  ["loss", data => number(data.last_loss), data => `from ${number(data.first_loss)}`],
  ["validation", data => number(data.valid_loss), data => data.best_valid_loss === null ? "" : `best ${number(data.best_valid_loss)} at ${whole(data.best_valid_step)}`],
  ["tokens/s", data => number(data.tokens_per_s_median), () => "median"],
  ["step time", data => data.step_ms_median === null ? "–" : number(data.step_ms_median) + " ms", () => "median"],
  ["MFU", data => data.mfu_median === null ? "–" : percent(data.mfu_median), () => "median"],
  ["goodput", data => data.goodput ? percent(data.goodput.share) : "–", data => data.goodput ? `of ${duration(data.goodput.wall_seconds)}` : ""],
  ["saves", data => whole(data.saves), data => data.save_seconds_median === null ? "" : `${duration(data.save_seconds_median)} each`],
  ["stalled for snapshots", data => duration(data.checkpoint_lost_ms / 1000), data => counted(data.snapshots, "snapshot")],
  ["starts of ranks", data => whole(data.starts.length), data => counted(failures(data), "failure")],
];
const GOODPUT = [["kept_seconds", "steps that count", "--c2"], ["checkpoint_seconds", "checkpoints", "--c0"], ["again_seconds", "steps done again", "--c1"],
  ["start_seconds", "starts", "--c5"], ["recovery_seconds", "recoveries", "--c6"], ["down_seconds", "down", "--c3"], ["other_seconds", "between steps", "--c4"]];

function table(head, rows) {
  return el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, ...head.map(([text, kind]) => el("th", kind ? { class: kind } : {}, text)))),
    el("tbody", {}, ...rows.map(row => el("tr", {}, ...row.map((cell, k) => el("td", head[k][1] ? { class: head[k][1] } : {}, cell)))))));
}
function drawSummary() {
  const out = byId("summary");
  if (!several) {
    out.append(el("p", { class: "state" }, runs[0].data.state));
    out.append(el("div", { class: "cards" }, ...FACTS.map(([name, value, more]) =>
      el("div", { class: "card" }, el("span", {}, name), el("b", {}, value(runs[0].data)), el("small", {}, more ? more(runs[0].data) : "")))));
  } else {
    out.append(table([["run", "name"], ...FACTS.map(([name]) => [name, "n"])], runs.map(run =>
      [el("span", {}, swatch(run.colour), run.name), ...FACTS.map(([, value, more]) => {
        const text = more ? more(run.data) : "";
        return el("span", {}, value(run.data), ...(text && text !== "median" ? [el("br"), el("small", { class: "legend" , style: "justify-content: flex-end" }, text)] : []));
      })])));
  }
  const known = runs.filter(run => run.data.goodput && run.data.goodput.wall_seconds > 0);
  if (!known.length) return;
  const rows = known.flatMap(({ name, data: { goodput } }) => [el("span", {}, several ? name : "goodput"),
    el("div", { class: "bar" }, ...GOODPUT.map(([key, text, of]) => {
      const share = goodput[key] / goodput.wall_seconds;
      return el("i", { style: `${colour(of)}; width: ${100 * Math.min(1, Math.max(0, share))}%`, title: `${text}: ${percent(share)}, ${duration(goodput[key])}` });
    })), el("span", {}, percent(goodput.share))]);
  const used = GOODPUT.filter(([key]) => known.some(({ data: { goodput } }) => goodput[key] / goodput.wall_seconds >= 0.001));
  out.append(el("div", { class: "goodput" }, ...rows), el("div", { class: "legend" }, ...used.map(([key, text, of]) => el("span", {}, swatch(of),
    several ? text : `${text} ${percent(known[0].data.goodput[key] / known[0].data.goodput.wall_seconds)}`))));
}
function list(out, title, lines) {
  if (lines.length) out.append(el("h3", {}, title), el("ul", {}, ...lines.map(text => el("li", {}, text))));
}
function drawDetails() {
  for (const run of runs) {
    const data = run.data, out = el("details", several ? {} : { open: "" }, el("summary", {}, swatch(run.colour), run.name));
    byId("details").append(out);
    out.append(el("p", { class: "state" }, data.run, el("br"), data.state));
    list(out, "Advice", data.advice);
    list(out, "Not readable", data.unreadable);
    const tasks = Object.entries(data.tasks || {});
    if (tasks.length) out.append(el("h3", {}, "Tasks"), el("div", { class: "tall" }, table([["", ""], ["last", "n"], ["at step", "n"], ["best", "n"], ["at step", "n"], ["change", "n"], ["", ""]],
      tasks.map(([name, one]) => [name, number(one.last), whole(one.last_step), number(one.best), whole(one.best_step), number(one.change), one.trend]))));
    list(out, "Failures", data.failures.map(one => `${one.class || "not classified"}${one.host ? " on " + one.host : ""}: ${one.times}`));
    list(out, "Stragglers", data.stragglers.map(one => `${one.host}: up to ${number(one.ratio)} × the time of the others, for ${duration(one.seconds)}: ${one.why}`));
    list(out, "Excluded hosts", data.excluded.map(one => `${one.host}: ${one.reason}`));
    list(out, "Starts", data.lives);
    list(out, "Recoveries", data.recoveries_seconds.map(seconds => `${duration(seconds)} from the failure to the first new step`));
    if (data.layouts.length > 1) list(out, "Layouts", data.layouts.map(one => `${one.mesh}: steps ${whole(one.first_step)} to ${whole(one.last_step)}, ${number(one.tokens_per_s_median)} tokens/s`));
    if (data.labels.length) out.append(el("h3", {}, "Checkpoints"), el("div", { class: "tall" }, table([["step", "n"], ["label", ""], ["why", "text"], ["by", ""], ["held", "text"]],
      data.labels.map(one => [whole(one.step), el("span", { class: "kind", style: colour(LABEL_COLOURS[one.label] || "--dim") }, one.label), one.why, one.by, one.held]))));
    if (data.lineage.length) out.append(el("h3", {}, "Lineage: the recipes of the run"), el("div", { class: "tall" }, table([["", "n"], ["from step", "n"], ["sample", "n"], ["cause", ""], ["what changes", "text"]],
      data.lineage.map(one => [one.n, whole(one.step), whole(one.samples), one.cause, [one.why || "", ...one.changes.filter(c => c.class !== "exact")
        .map(c => `${c.field} ${c.before} → ${c.after}`)].filter(Boolean).join("; ")]))));
    if (data.marks.length) out.append(el("h3", {}, "Events" + (data.marks_left_out ? ` (the newest; ${data.marks_left_out} more are in events.jsonl)` : "")),
      el("div", { class: "tall" }, table([["UTC", "t"], ["step", "n"], ["event", ""], ["", "text"]], data.marks.map(one => [clock(one.time), whole(one.step),
        el("span", { class: "kind", style: colour(MARK_COLOURS[one.kind] || "--dim") }, one.event), one.text]))));
  }
}
function legend(chart) {
  const of = chart.lines.filter(one => !one.dots).map(one => el("span", {}, swatch(one.colour), one.label));
  if (!chart.marks) return of.length > 1 || chart.stack ? of : [];
  if (chart.lines.some(one => one.dots)) of.push(el("span", {}, "╌ validation"));
  const kinds = new Set(runs.flatMap(run => run.data.marks.map(mark => mark.kind)).filter(kind => kind !== "note"));
  const names = { failure: "failure", restart: "start", back: "rolled back", alarm: "alarm", change: "recipe" };
  const marks = Object.keys(names).filter(kind => kinds.has(kind)).map(kind => el("span", { style: `color: var(${MARK_COLOURS[kind]})` }, "▼ " + names[kind]));
  if (runs.some(run => run.data.labels.length)) marks.push(el("span", {}, "◆ checkpoint"));
  if (runs.some(run => run.data.curves.abandoned.length)) marks.push(el("span", {}, "┄ abandoned: steps done again"));
  if (chart.lines.some(one => one.series.not_finite)) marks.push(el("span", { style: "color: var(--bad)" }, "✕ not finite"));
  return [...of, ...marks];
}

// ---- The page --------------------------------------------------------------------------------------------------------

const isDark = () => state.theme ? state.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
function showControls() {
  document.documentElement.dataset.theme = isDark() ? "dark" : "light";
  for (const id of ["logX", "logY", "clip"]) byId(id).checked = state[id] === true;
  byId("x").value = state.x;
  byId("smooth").value = state.smooth;
  byId("smooth-text").textContent = state.smooth ? `${short(Math.round(1 / (1 - weight())))} steps` : "off";
  byId("reset").disabled = !state.zoom;
  byId("theme").textContent = isDark() ? "light" : "dark";
  byId("pause").textContent = state.paused ? "live again" : "pause";
  for (const button of byId("runs").children) button.setAttribute("aria-pressed", String(!state.off.includes(Number(button.value))));
}
function drawAll() {
  for (const chart of charts) draw(chart);
}
function change(what) {
  Object.assign(state, what);
  keep();
  showControls();
  drawAll();
}

charts.forEach((chart, index) => {
  chart.index = index;
  chart.svg = el("svg");
  chart.figure = el("figure", chart.wide ? { class: "wide" } : {}, el("figcaption", {}, el("h3", {}, chart.title, el("small", {}, chart.unit)),
    el("div", { class: "legend" }, ...(several && !chart.marks && !chart.stack ? [] : legend(chart)))), chart.svg);
  byId("charts").append(chart.figure);
});
if (!charts.length) byId("charts").append(el("p", {}, "No step has been reported yet."));
if (several) for (const run of runs) {
  const button = el("button", { type: "button", value: run.index, title: `${run.data.run}: show or hide` }, swatch(run.colour), run.name);
  button.addEventListener("click", () => change({ off: shown(run) ? [...state.off, run.index] : state.off.filter(k => k !== run.index) }));
  byId("runs").append(button);
}
for (const id of ["logX", "logY", "clip"]) byId(id).addEventListener("change", event => change({ [id]: event.target.checked }));
byId("x").addEventListener("change", event => change({ x: event.target.value, zoom: null }));
byId("smooth").addEventListener("input", event => change({ smooth: Number(event.target.value) }));
byId("reset").addEventListener("click", () => change({ zoom: null }));
byId("theme").addEventListener("click", () => change({ theme: isDark() ? "light" : "dark" }));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", showControls);
addEventListener("keydown", event => { if (event.key === "Escape") change({ zoom: null }); });
let width = innerWidth;
addEventListener("resize", () => { if (innerWidth !== width) drawAll(); width = innerWidth; });
for (const [event, begins] of [["beforeprint", true], ["afterprint", false]])
  addEventListener(event, () => { printing = begins; drawAll(); });
document.title = runs.map(run => run.name).join(", ") + " – Cairn report";
byId("written").textContent = `written ${clock(report.written)} UTC` + (report.follow_seconds ? `, live` : "");
if (report.follow_seconds) {
  byId("pause").hidden = false;
  byId("pause").addEventListener("click", () => change({ paused: !state.paused }));
  setInterval(() => { if (!state.paused && !dragged && byId("tip").hidden) location.reload(); }, report.follow_seconds * 1000);
}
drawSummary();
drawDetails();
showControls();
drawAll();
