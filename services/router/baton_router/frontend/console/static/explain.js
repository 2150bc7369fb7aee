// The sheet that explains one decision.

import { $, h } from "./dom.js";
import { NOTHING, bytesText, clock, count, percent, timeText } from "./format.js";
import { outcomeChip } from "./decisions.js";

function number(value) {
  if (value === null || value === undefined) return NOTHING;
  const size = Math.abs(value);
  return size >= 1000 ? count(Math.round(value)) : size >= 10 ? value.toFixed(1) : value.toFixed(3);
}

function facts(x) {
  const trace = x.trace ?? {};
  const rows = [
    ["Time to first token", timeText(x.ttft_ms)],
    ["Whole time", timeText(x.duration_ms)],
    ["Prompt", `${count(x.prompt_tokens)} tokens`],
    ["Generated", `${count(x.generated_tokens)} tokens`],
    ["Path", x.path ? `${x.path}${x.reason ? `, ${x.reason}` : ""}` : NOTHING],
    ["Pipe", trace.pipe ? `${trace.pipe}${trace.pipe_fallback ? ` (${trace.pipe_fallback})` : ""}` : "none used"],
    ["KV fetched", trace.kv_bytes ? `${bytesText(trace.kv_bytes)} in ${timeText(trace.transfer_ms)}` : "0 B"],
    ["Transfer added", trace.kv_bytes ? timeText(trace.exposed_ms) : NOTHING],
    ["From caches", `${count(trace.cached_tokens ?? 0)} on decode, ${count(trace.prefill_cached_tokens ?? 0)} on prefill`],
    ["Computed on decode", `${count(trace.recomputed_tokens ?? 0)} tokens`],
    ["Index when placed", x.index_state ?? NOTHING],
    ["Moved in mid-stream", trace.migrations ? `${trace.migrations} times` : "never"],
  ];
  return h("dl", { class: "grid" }, rows.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
}

// Where the time went, as one bar.
function timeline(x) {
  const trace = x.trace;
  if (!trace || !x.ttft_ms) return null;
  const end = x.duration_ms ?? x.ttft_ms;
  const own = Math.min(trace.decode_ttft_ms, x.ttft_ms);
  const queue = Math.min(trace.queue_ms, own);
  const parts = [
    ["router and network", x.ttft_ms - own, "t-router"],
    ["queue on decode", queue, "t-queue"],
    [x.path === "local" ? "prefill on decode" : "prefill and transfer", own - queue, "t-prefill"],
    ["generation", Math.max(0, end - x.ttft_ms), "t-decode"],
  ];
  const bar = h("div", { class: "timeline", "aria-hidden": "true" });
  for (const [, ms, name] of parts) {
    const piece = h("i", { class: name });
    piece.style.flexGrow = String(Math.max(ms, 0));
    bar.append(piece);
  }
  const legend = parts.map(([text, ms, name]) => h("li", {}, h("i", { class: `key ${name}` }), `${text} ${timeText(Math.max(0, ms))}`));
  return h("section", {}, h("h3", {}, "Where the time went"), bar, h("ul", { class: "times" }, legend));
}

const term = (name) => `+ ${name.replaceAll("_", " ")}`;

// What the score of the winner is made of.
function sum(placement) {
  const parts = Object.entries(placement.terms);
  if (!parts.length || placement.score === null) return null;
  const text = parts.map(([name, value]) => `${name.replaceAll("_", " ")} ${number(value)}`).join(" + ");
  return h("p", { class: "hint" }, `Score of what was chosen: ${text} = `, h("b", {}, number(placement.score)));
}

function candidates(placement, role) {
  const rows = placement.candidates.filter((x) => x.role === role);
  if (!rows.length) return null;
  const terms = [...new Set(rows.flatMap((x) => Object.keys(x.terms)))];
  const head = ["Instance", "Match", "Load", ...terms.map(term), "= Score"];
  const body = rows.map((x) => h("tr", { class: x.winner ? "winner" : null },
    h("th", { scope: "row" }, x.instance, x.winner && h("span", { class: "chip good" }, "chosen")),
    h("td", { class: "num" }, terms.length > 2 ? percent(x.match_rate) : share(x.match_rate, role)),
    h("td", { class: "num" }, number(x.load)),
    terms.map((name) => h("td", { class: "num" }, number(x.terms[name]))),
    h("td", { class: "num strong" }, number(x.score))));
  return h("div", { class: "scroll" }, h("table", { class: "rows candidates" },
    h("caption", {}, role === "prefill" ? "Prefill candidates" : "Decode candidates"),
    h("thead", {}, h("tr", {}, head.map((name, at) => h("th", { scope: "col", class: at ? "num" : null }, name)))),
    h("tbody", {}, body)));
}

function share(rate, role) {
  const bar = h("i");
  bar.style.width = `${(100 * (rate ?? 0)).toFixed(1)}%`;
  return h("span", { class: `share card ${role}` }, h("span", { class: "meter", "aria-hidden": "true" }, bar), h("span", {}, percent(rate)));
}

function placements(x) {
  return x.placements.map((placement, at) => h("section", {},
    h("h3", {}, x.placements.length > 1 ? `Placement ${at + 1}, after ${timeText(placement.at_ms)}` : "Candidates", h("span", { class: "hint" }, ` by ${placement.policy}`)),
    sum(placement),
    candidates(placement, "decode"), candidates(placement, "prefill")));
}

export function showExplanation(x) {
  $("explain-id").textContent = x.id;
  const chip = h("span", { class: "chip" });
  outcomeChip(chip, x.outcome);
  const why = h("section", {}, h("h3", {}, "Why"), h("ul", { class: "why" }, x.why.map((line) => h("li", {}, line))));
  const others = x.others.length ? h("p", { class: "hint" }, `${x.others.length} more of this name`) : null;
  const pieces = [h("p", {}, chip, ` at ${clock(x.time)}`), others, why, timeline(x), h("section", {}, h("h3", {}, "What happened"), facts(x)), ...placements(x)];
  $("explain-body").replaceChildren(...pieces.filter(Boolean));
}

export function showMissing(message) {
  $("explain-body").replaceChildren(h("p", { class: "empty" }, message));
}
