// The table of recent decisions.

import { $, h, keyed, part, setText } from "./dom.js";
import { clock, count, percent, shortId, timeText } from "./format.js";

export function outcomeChip(node, outcome) {
  const mood = outcome === "done" ? "good" : outcome === "running" || outcome === "cancelled" ? "warn" : "bad";
  node.className = `chip ${outcome === "running" ? "" : mood}`;
  setText(node, outcome);
}

function makeRow(open, name) {
  return (x) => {
    const row = h("tr", { class: name },
      h("td", {},
        h("button", { type: "button", class: "link mono", "data-part": "open", "aria-label": `Explain ${shortId(x.id)}` }, shortId(x.id)),
        h("span", { class: "when" }, clock(x.time))),
      h("td", { class: "way", "data-part": "way" }),
      h("td", { class: "num", "data-part": "match" }),
      h("td", { class: "num", "data-part": "ttft" }),
      h("td", {}, h("span", { class: "chip", "data-part": "outcome" }), h("span", { class: "when", "data-part": "note" })));
    row.addEventListener("click", () => open(x.id));
    return row;
  };
}

// From whom to whom, in the colours of their roles.
export function way(x) {
  if (!x.decode) return ["not placed"];
  const target = h("b", { class: "d" }, x.decode);
  if (x.path === "local") return [target, h("span", { class: "when" }, `local${x.reason ? `, ${x.reason.split(":")[0].replaceAll("_", " ")}` : ""}`)];
  const source = x.path === "store" ? h("b", { class: "s" }, "store") : x.prefill ? h("b", { class: "p" }, x.prefill) : null;
  const below = x.path ? `${x.path}${x.pipe ? `, ${x.pipe}` : ""}` : "on its way";
  return source ? [source, " → ", target, h("span", { class: "when" }, below)] : [target, h("span", { class: "when" }, below)];
}

function updateRow(row, x) {
  const signature = [x.prefill, x.decode, x.path, x.pipe, x.reason].join("|");
  const cell = part(row, "way");
  if (cell.dataset.shown !== signature) {
    cell.dataset.shown = signature;
    cell.replaceChildren(...way(x));
  }
  setText(part(row, "match"), percent(x.match_rate));
  setText(part(row, "ttft"), timeText(x.ttft_ms));
  outcomeChip(part(row, "outcome"), x.outcome);
  const moved = x.migrations ? `, moved ${x.migrations} ×` : "";
  setText(part(row, "note"), `${count(x.generated_tokens)} tokens${moved}`);
}

export function showDecisions(data, open) {
  const rows = $("decisions");
  const first = rows.dataset.filled !== "yes"; // only what comes later is news
  keyed(rows, data.decisions, (x) => x.id, makeRow(open, first ? null : "new"), updateRow);
  rows.dataset.filled = "yes";
  $("decisions-empty").hidden = data.decisions.length > 0;
  setText($("decisions-hint"), data.decisions.length ? "choose one for its reasons" : "");
}
