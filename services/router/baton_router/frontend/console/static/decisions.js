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

const MOST_NEWS = 3;

const buttonOf = (row) => row && part(row, "open");

// Focus the row at a place, or the last one; without rows, the list itself.
export function focusRow(at) {
  const rows = $("decisions").children;
  (buttonOf(rows[Math.min(Math.max(at, 0), rows.length - 1)]) ?? $("decisions-scroll")).focus();
}

// Where a request's row is; -1: it has left the list.
export function placeOf(id) {
  return [...$("decisions").children].findIndex((row) => row.dataset.key === id);
}

// One row is a stop of the tab key, the arrows go on from there.
function setStop(row) {
  for (const other of $("decisions").children) buttonOf(other).tabIndex = other === row ? 0 : -1;
}

export function followKeys() {
  const rows = $("decisions");
  rows.addEventListener("focusin", (event) => setStop(event.target.closest("tr")));
  rows.addEventListener("keydown", (event) => {
    const at = [...rows.children].indexOf(event.target.closest("tr"));
    const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: rows.children.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    focusRow(to);
  });
}

export function showDecisions(data, open) {
  const rows = $("decisions");
  const known = new Set([...rows.children].map((row) => row.dataset.key));
  const arrived = data.decisions.filter((x) => !known.has(x.id)).length;
  // Only what comes later is news, and where everything is, nothing is.
  const news = rows.dataset.filled === "yes" && arrived <= MOST_NEWS;
  const focused = document.activeElement?.closest("#decisions tr");
  const place = focused ? [...rows.children].indexOf(focused) : -1;
  keyed(rows, data.decisions, (x) => x.id, makeRow(open, news ? "new" : null), updateRow);
  if (focused && !focused.isConnected) focusRow(place + arrived);
  const stop = [...rows.children].find((row) => buttonOf(row).tabIndex === 0 && row.contains(document.activeElement));
  setStop(stop ?? rows.firstElementChild);
  rows.dataset.filled = "yes";
  $("decisions-empty").hidden = data.decisions.length > 0;
  setText($("decisions-hint"), data.decisions.length ? "choose one for its reasons" : "");
}
