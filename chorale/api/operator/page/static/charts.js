// Line charts in SVG (with charts.css): whole round numbers on the y axis, seconds ago on the x axis.

const HEIGHT = 190, TOP = 10, BOTTOM = 24, RIGHT = 8;
const SHORTEST = 60;  // seconds: a chart spans a minute at least
const TIME_STEPS = [5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400];
const CHARACTER = 6.4;  // width of a digit at the axes' size

// Draws into a node. A series is {name, points: [{time, value}]}: time in seconds, at most 0, which is now; a value
// that is null leaves a gap. Options: title, unit (beside the numbers), max (the axis ends there; 100 without a unit
// is a percentage), integer (values are counts).
export function drawChart(node, series, { title = "", unit = "", max = null, integer = false } = {}) {
  const suffix = unit || (max === 100 ? "%" : "");
  const axis = valueAxis(series, max, integer), label = value => `${number(value)}${suffix ? " " + suffix : ""}`;
  const labels = axis.map(label), top = axis.at(-1);
  const left = 10 + CHARACTER * Math.max(...labels.map(each => each.length));
  const width = Math.max(200, node.clientWidth || 400), span = timeSpan(series);
  const x = time => left + (1 + time / span) * (width - left - RIGHT);
  const y = value => HEIGHT - BOTTOM - Math.min(Math.max(value, 0), top) / top * (HEIGHT - BOTTOM - TOP);
  const picture = svg("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", class: "chart-plot" });
  picture.setAttribute("aria-label", described(title, series, label, span));
  axis.forEach((value, place) => {
    picture.append(svg("line", { class: "chart-grid", x1: left, x2: width - RIGHT, y1: y(value), y2: y(value) }));
    picture.append(svg("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, labels[place]));
  });
  for (const seconds of timeTicks(span, width - left)) {
    const anchor = seconds === 0 ? "end" : seconds === span ? "start" : "middle";
    picture.append(svg("line", { class: "chart-grid", x1: x(-seconds), x2: x(-seconds), y1: y(0), y2: y(0) + 4 }));
    picture.append(svg("text", { x: x(-seconds), y: HEIGHT - 6, "text-anchor": anchor }, ago(seconds)));
  }
  series.forEach(({ points }, place) => picture.append(svg("path", { class: `chart-line chart-line-${place}`, d: path(points, x, y, span) })));
  node.replaceChildren(legend(series), picture);
}

const number = value => value.toLocaleString("en", { maximumFractionDigits: 6, notation: value >= 1e5 ? "compact" : "standard" });

const seen = series => series.flatMap(({ points }) => points.map(({ value }) => value)).filter(Number.isFinite);

// The numbers at the y axis, from 0: at most five steps of 1, 2 or 5 times a power of ten.
function valueAxis(series, max, integer) {
  const most = max ?? Math.max(...seen(series), 0);
  if (max !== null) return [0, 1, 2, 3, 4].map(step => step / 4 * max);
  if (most <= 0) return integer ? [0, 1, 2, 3, 4] : [0, 5, 10];
  const unit = 10 ** Math.floor(Math.log10(most / 5));
  let step = [1, 2, 5, 10].map(each => each * unit).find(each => each * 5 >= most * (1 - 1e-9));
  if (integer) step = Math.max(1, step);
  const count = Math.max(2, Math.ceil(most / step - 1e-9));
  return Array.from({ length: count + 1 }, (_, place) => Number((place * step).toPrecision(6)));
}

function timeSpan(series) {
  return Math.max(SHORTEST, ...series.flatMap(({ points }) => points.map(({ time }) => Math.ceil(-time))));
}

function timeTicks(span, width) {
  const most = Math.max(2, Math.floor(width / 95));
  const step = TIME_STEPS.find(each => span / each <= most) ?? span;
  return Array.from({ length: Math.floor(span / step) + 1 }, (_, place) => place * step);
}

function ago(seconds) {
  if (seconds === 0) return "now";
  if (seconds % 3600 === 0) return `${seconds / 3600} h ago`;
  return seconds >= 60 && seconds % 60 === 0 ? `${seconds / 60} min ago` : `${seconds} s ago`;
}

function path(points, x, y, span) {
  let result = "", pen = "M";
  for (const { time, value } of points) {
    if (!Number.isFinite(value) || -time > span) {
      pen = "M";
      continue;
    }
    const place = `${x(time).toFixed(1)} ${y(value).toFixed(1)}`;
    result += pen === "M" ? `M${place}L${place}` : `L${place}`;  // a point alone shows as a dot
    pen = "L";
  }
  return result;
}

function described(title, series, label, span) {
  const round = value => label(Number(value.toPrecision(3)));
  const each = series.map(one => {
    const values = seen([one]), now = one.points.at(-1)?.value;
    if (!values.length) return `${one.name}: no values`;
    return `${one.name}: ${Number.isFinite(now) ? `${round(now)} now, ` : ""}${round(Math.max(...values))} at most`;
  });
  return `${title ? title + ". " : ""}${each.join("; ")}; in the last ${ago(span).replace(" ago", "")}.`;
}

function legend(series) {
  const list = document.createElement("p");
  list.className = "chart-legend";
  series.forEach(({ name }, place) => {
    const entry = document.createElement("span"), sample = svg("svg", { viewBox: "0 0 24 8", "aria-hidden": "true" });
    sample.append(svg("path", { class: `chart-line chart-line-${place}`, d: "M1 4H23" }));
    entry.append(sample, name);
    list.append(entry);
  });
  return list;
}

function svg(tag, attributes, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  return node;
}
