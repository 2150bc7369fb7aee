// The row of numbers at the top, each with its last minutes behind it.

import { h, keyed, part, setText, svg } from "./dom.js";
import { NOTHING, bytes, count, percent, rate, span, time, timeText } from "./format.js";

const HISTORY_S = 120;
const GAP_S = 0.3; // pieces that are this near follow each other: their times are rounded

function percentiles(values) {
  if (!values) return "nothing lately";
  const [p95, p99] = [timeText(values.p95), timeText(values.p99)];
  const [unit] = p99.split(" ").slice(-1);
  return `p95 ${p95.endsWith(` ${unit}`) ? p95.slice(0, -unit.length - 1) : p95} · p99 ${p99}`;
}

function tiles(data) {
  const now = data.now;
  const kv = bytes(now.kv_bytes_per_s);
  const decodes = data.instances.filter((x) => x.role === "decode" && x.status === "ready").length;
  return [
    { title: "Requests", value: rate(now.requests_per_s), unit: "/s", sub: now.failed ? `${count(now.failed)} failed` : "none failed", bad: now.failed > 0, series: "requests_per_s" },
    inFlight(data),
    { title: "KV hit rate", value: percent(now.hit_rate), unit: "", sub: "of prompt tokens", series: "hit_rate", top: 1 },
    { title: "TTFT, median", value: time(now.ttft_ms?.p50)[0], unit: time(now.ttft_ms?.p50)[1], sub: percentiles(now.ttft_ms), series: "ttft_ms" },
    { title: "ITL, median", value: time(now.itl_ms?.p50)[0], unit: time(now.itl_ms?.p50)[1], sub: percentiles(now.itl_ms), series: "itl_ms" },
    { title: "Tokens", value: rate(now.tokens_per_s), unit: "/s", sub: decodes ? `${rate(now.tokens_per_s === null ? null : now.tokens_per_s / decodes)} a decode instance` : NOTHING, series: "tokens_per_s" },
    { title: "KV moved", value: kv[0], unit: kv[1] && `${kv[1]}/s`, sub: "between instances", series: "kv_bytes_per_s" },
  ];
}

// Requests that run without a token for long: stalled, whatever else is calm.
function inFlight(data) {
  const idle = data.background ? ` · ${count(data.background)} background` : "";
  const sub = data.stalled_s ? `stalled: no token for ${span(data.stalled_s)}` : `${count(data.seen)} since start${idle}`;
  return { title: "In flight", value: count(data.running), unit: "", sub, bad: Boolean(data.stalled_s), series: null };
}

function make(tile) {
  return h(
    "div",
    { class: "tile", role: "group", "aria-label": tile.title },
    tile.series && svg("svg", { class: "spark", viewBox: "0 0 120 34", preserveAspectRatio: "none", "aria-hidden": "true" },
      svg("path", { class: "area", "data-part": "area" }), svg("path", { class: "edge", "data-part": "edge" })),
    h("h2", {}, tile.title),
    h("p", { class: "value" }, h("span", { "data-part": "value" }), h("span", { class: "unit", "data-part": "unit" })),
    h("p", { class: "sub" }, h("span", { "data-part": "sub" })),
  );
}

// Steps from the oldest to the newest sample; nothing is drawn where there was nothing to measure, or no rate.
export function steps(history, tile) {
  const pieces = history.filter((x) => x[tile.series] !== null && (x[tile.series] > 0 || tile.top) && x.ago_s < HISTORY_S);
  const top = tile.top ?? Math.max(...pieces.map((x) => x[tile.series]), 0) * 1.15;
  if (!pieces.length || !(top > 0)) return ["", ""];
  const x = (ago) => Math.max(0, HISTORY_S - ago).toFixed(1);
  const y = (value) => (33 - 30 * Math.min(1, value / top)).toFixed(1);
  let edge = "";
  let area = "";
  let end = null;
  for (const piece of pieces) {
    const [from, to, height] = [x(piece.ago_s + piece.seconds), x(piece.ago_s), y(piece[tile.series])];
    const joined = end !== null && Math.abs(piece.ago_s + piece.seconds - end) < GAP_S;
    edge += `${joined ? "L" : "M"}${from} ${height}H${to}`;
    area += `M${from} 34V${height}H${to}V34Z`;
    end = piece.ago_s;
  }
  return [edge, area];
}

export function showTiles(list, data) {
  keyed(list, tiles(data), (tile) => tile.title, make, (node, tile) => {
    setText(part(node, "value"), tile.value);
    setText(part(node, "unit"), tile.unit);
    const sub = part(node, "sub");
    setText(sub, tile.sub);
    sub.className = tile.bad ? "chip bad" : "";
    if (!tile.series) return;
    const [edge, area] = steps(data.history, tile);
    part(node, "edge").setAttribute("d", edge);
    part(node, "area").setAttribute("d", area);
  });
}
