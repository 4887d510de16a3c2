// The tab with the server's figures, from /metrics.

import { request } from "./api.js";
import { drawChart } from "./charts.js";
import { $, make } from "./dom.js";

const KEEP = 150;  // points, one every 2 s: five minutes
const history = [];
let last = null;

const milliseconds = { unit: "ms" };
// Title, values of a point, names of the series, options of the chart.
const CHARTS = [
  ["Throughput, tokens per second", point => [point.made, point.read], ["generated", "prompt"], {}],
  ["Requests", point => [point.active, point.waiting], ["running", "waiting"], { integer: true }],
  ["KV cache in use, %", point => [point.kv * 100], ["share of the cache"], { max: 100 }],
  ["Time to first token, ms", point => [point.ttft50, point.ttft95], ["median", "95th percentile"], milliseconds],
  ["Time per output token, ms", point => [point.tpot50, point.tpot95], ["median", "95th percentile"], milliseconds],
  ["Prefix cache hits, % of prompt tokens", point => [point.hits], ["last minute"], { max: 100 }],
];

// ------------------------------------------------------------------ Prometheus text

export function parseMetrics(text) {
  const sums = new Map(), buckets = new Map();
  for (const line of text.split("\n")) {
    const found = line.match(/^([a-z_:]+)(\{[^}]*\})?\s+(\S+)$/i);
    if (!found || line[0] === "#") continue;
    const [, name, labels, value] = found, edge = labels && labels.match(/le="([^"]+)"/);
    if (edge) {
      if (!buckets.has(name)) buckets.set(name, new Map());
      const of = buckets.get(name), le = edge[1] === "+Inf" ? Infinity : Number(edge[1]);
      of.set(le, (of.get(le) || 0) + Number(value));
    } else sums.set(name, (sums.get(name) || 0) + Number(value));
  }
  return { sums, buckets };
}

// Estimates a quantile of what a histogram counted since `before`.
export function quantile(now, before, name, share) {
  const after = now.buckets.get(name + "_bucket");
  if (!after) return null;
  const earlier = (before && before.buckets.get(name + "_bucket")) || new Map();
  const edges = [...after.keys()].sort((a, b) => a - b);
  const counts = edges.map(edge => after.get(edge) - (earlier.get(edge) || 0));
  const total = counts.at(-1);
  if (!total) return null;
  let low = 0, under = 0;
  for (const [place, edge] of edges.entries()) {
    if (counts[place] >= share * total) {
      const width = (edge === Infinity ? low : edge) - low;
      return low + width * (share * total - under) / Math.max(counts[place] - under, 1e-9);
    }
    low = edge;
    under = counts[place];
  }
  return low;
}

// ------------------------------------------------------------------ points

export async function poll() {
  const now = parseMetrics(await (await request("/metrics", { signal: AbortSignal.timeout(10000) })).text());
  now.time = performance.now() / 1000;
  if (last && sum(last, "vllm:generation_tokens_total") > sum(now, "vllm:generation_tokens_total")) reset();  // restarted
  history.push(pointOf(now));
  if (history.length > KEEP) history.shift();
  last = now;
  draw();
}

const sum = (metrics, name) => metrics.sums.get(name) || 0;

function reset() {
  history.length = 0;
  last = null;
}

function pointOf(now) {
  const rate = name => last ? Math.max(0, sum(now, name) - sum(last, name)) / (now.time - last.time) : 0;
  const minute = history.find(point => now.time - point.metrics.time <= 60), then = minute && minute.metrics;
  const ms = (name, share) => { const found = quantile(now, then, name, share); return found === null ? null : found * 1000; };
  const since = name => sum(now, name) - (then ? sum(then, name) : 0);
  const queried = since("vllm:prefix_cache_queries_total");
  return {
    metrics: now, made: rate("vllm:generation_tokens_total"), read: rate("vllm:prompt_tokens_total"),
    active: sum(now, "vllm:num_requests_running"), waiting: sum(now, "vllm:num_requests_waiting"),
    kv: sum(now, "vllm:kv_cache_usage_perc") / (sum(now, "vllm:engine_sleep_state") || 1),  // each engine's state sums to 1
    ttft50: ms("vllm:time_to_first_token_seconds", .5), ttft95: ms("vllm:time_to_first_token_seconds", .95),
    tpot50: ms("vllm:request_time_per_output_token_seconds", .5), tpot95: ms("vllm:request_time_per_output_token_seconds", .95),
    hits: queried ? 100 * since("vllm:prefix_cache_hits_total") / queried : null,
  };
}

// ------------------------------------------------------------------ drawing

const count = value => value.toLocaleString("en");

export function draw() {
  if ($("server").hidden || !last) return;
  const point = history.at(-1);
  const tiles = [
    ["tokens per second", point.made.toFixed(0)], ["requests running", count(point.active)],
    ["requests waiting", count(point.waiting)], ["KV cache in use", (point.kv * 100).toFixed(1) + " %"],
    ["requests finished", count(sum(last, "vllm:request_success_total"))],
    ["tokens generated", count(sum(last, "vllm:generation_tokens_total"))],
    ["preemptions", count(sum(last, "vllm:num_preemptions_total"))],
    ["engine restarts", count(sum(last, "chorale:engine_restarts_total"))],
  ];
  $("tiles").replaceChildren(...tiles.map(([name, value]) =>
    make("div", { class: "tile" }, make("b", {}, value), make("span", {}, name))));
  if (!$("charts").children.length) makeCharts();
  for (const [place, [title, values, names, options]] of CHARTS.entries()) {
    const series = names.map((name, number) => ({
      name, points: history.map(each => ({ time: each.metrics.time - last.time, value: values(each)[number] })),
    }));
    drawChart($("charts").children[place].lastChild, series, { title, ...options });
  }
  const age = Math.round(last.time - history[0].metrics.time);
  $("since").textContent = `Updated every 2 s; showing the last ${age} s. Times and hits are those of the last minute.`;
}

function makeCharts() {
  $("charts").append(...CHARTS.map(([title]) => make("section", { class: "chart" }, make("h2", {}, title), make("div", { class: "plot" }))));
}

export function silent(words) {
  $("since").textContent = words;
}
