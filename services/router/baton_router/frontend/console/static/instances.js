// Cards of the instances, and the table of their parts of the index.

import { $, h, keyed, part, setText } from "./dom.js";
import { NOTHING, count, percent, span } from "./format.js";

const STATES = {
  exact: ["Exact", "good", "every KV event was applied"],
  stale: ["Stale", "warn", "the event stream broke: what is known may be out of date"],
  off: ["Off", "bad", "no events tell of its cache; the router's own decisions stand in"],
};

export const order = (a, b) => a.id.localeCompare(b.id, "en", { numeric: true });

// How an instance is, in one word, and how bad that is.
export function condition(x) {
  if (x.status === "lost") return ["Lost", "bad"];
  if (x.status === "down") return ["Down", "bad"];
  if (x.status === "refused") return ["Refused", "bad"];
  if (x.status === "connecting") return ["Connecting", "warn"];
  if (x.draining) return ["Draining", "warn"];
  if (x.silent) return ["Silent", "bad"];
  return ["Ready", "good"];
}

function gauge(name) {
  return h("div", { class: "gauge", "data-part": name },
    h("span", {}, name),
    h("div", { class: "meter", role: "meter", "aria-valuemin": "0", "aria-valuemax": "100", "data-part": `${name}-meter` }, h("i"), name === "cache" && h("i")),
    h("span", { class: "said", "data-part": `${name}-said` }));
}

function makeCard(x) {
  return h("li", { class: `card ${x.role}` },
    h("header", {},
      h("span", { class: "name", "data-part": "name" }),
      h("span", { class: "chip own", "data-part": "own" }),
      h("span", { class: "chip", "data-part": "index" }),
      h("span", { class: "chip", "data-part": "state" })),
    h("p", { class: "reason", "data-part": "reason" }),
    gauge("load"), gauge("cache"));
}

function setMeter(node, name, shares, said, label) {
  const meter = part(node, `${name}-meter`);
  [...meter.children].forEach((bar, at) => { bar.style.width = `${(100 * Math.min(1, shares[at] || 0)).toFixed(1)}%`; });
  meter.setAttribute("aria-valuenow", Math.round(100 * Math.min(1, shares.reduce((a, b) => a + b, 0))));
  meter.setAttribute("aria-label", label);
  meter.setAttribute("aria-valuetext", said);
  setText(part(node, `${name}-said`), said);
}

function updateCard(node, x, busiest, own) {
  const [word, mood] = condition(x);
  const [state, stateMood, meaning] = STATES[x.index.state] ?? [x.index.state, "warn", ""];
  const out = x.status !== "ready";
  node.classList.toggle("out", out);
  setText(part(node, "name"), x.id);
  node.title = `${x.id} at ${x.address}`;
  const badge = part(node, "state");
  badge.className = `chip ${mood}`;
  setText(badge, word);
  badge.hidden = word === "Ready";
  const index = part(node, "index");
  index.className = `chip ${stateMood}`;
  index.title = `Index: ${meaning}`;
  setText(index, `Index ${state.toLowerCase()}`);
  index.hidden = out || x.index.state === "exact"; // as it should be: the table below says so
  const local = part(node, "own");
  local.hidden = !own || out;
  local.title = "prompts that it computed by itself in the last seconds";
  setText(local, own ? `${count(own)} local` : "");
  node.classList.toggle("lost", x.status === "lost");
  const reason = part(node, "reason");
  reason.hidden = !x.reason;
  setText(reason, x.status === "lost" ? `${span(x.lost_s)} ago: ${x.reason}` : x.reason ?? "");
  const waiting = x.waiting ? `, ${count(x.waiting)} waiting` : "";
  setMeter(node, "load", [busiest > 0 ? x.work / busiest : 0], `${count(x.in_flight)} in flight${waiting}`, `Load of ${x.id}, relative to the busiest`);
  const total = x.blocks_total || 1;
  const filled = Math.max(x.blocks_active, x.blocks_cached); // blocks in use can be found, too, once they are computed
  setMeter(node, "cache", [x.blocks_active / total, (filled - x.blocks_active) / total],
    x.blocks_total ? `${percent(filled / total)} of ${count(x.blocks_total)}` : NOTHING, `Blocks of ${x.id} in use or cached`);
}

export function showCards(role, data) {
  const instances = data.instances.filter((x) => x.role === role).sort(order);
  const busiest = Math.max(...instances.map((x) => x.work), 512);
  const own = new Map();
  for (const flow of data.flows.items) {
    if (flow.path === "local") own.set(flow.target, (own.get(flow.target) ?? 0) + flow.requests);
  }
  keyed($(role), instances, (x) => x.address, makeCard, (node, x) => updateCard(node, x, busiest, own.get(x.id)));
  const lost = instances.filter((x) => x.status === "lost").length;
  const ready = instances.filter((x) => condition(x)[0] === "Ready" || condition(x)[0] === "Draining").length;
  setText($(`${role}-count`), `${ready} of ${instances.length} ready${lost ? `, ${lost} lost` : ""}`);
  return instances;
}

function makeRow() {
  return h("tr", {},
    h("th", { scope: "row", "data-part": "name" }),
    h("td", {}, h("span", { class: "chip", "data-part": "state" })),
    ...["age", "blocks", "sequence"].map((name) => h("td", { class: "num", "data-part": name })),
    h("td", { class: "mono", "data-part": "epoch" }));
}

export function showIndex(data) {
  const instances = data.instances.filter((x) => x.status !== "lost").sort(order);
  keyed($("index"), instances, (x) => x.address, makeRow, (node, x) => {
    const [state, mood, meaning] = STATES[x.index.state] ?? [x.index.state, "warn", ""];
    setText(part(node, "name"), x.id);
    const chip = part(node, "state");
    chip.className = `chip ${mood}`;
    chip.title = meaning;
    setText(chip, state);
    setText(part(node, "age"), x.index.age_s > 0 ? span(x.index.age_s) : NOTHING);
    setText(part(node, "blocks"), x.index.decided ? `${count(x.index.decided)} guessed` : count(x.index.blocks));
    part(node, "blocks").title = x.index.decided ? "prompts of the router's own decisions, which stand in for events" : "";
    setText(part(node, "sequence"), count(x.index.sequence));
    setText(part(node, "epoch"), x.index.epoch ?? NOTHING);
  });
  const groups = new Set(instances.map((x) => x.index.group).filter(Boolean));
  const sizes = [...new Set(instances.map((x) => x.index.block_size).filter(Boolean))].join(" and ");
  setText($("index-hint"), groups.size ? `${groups.size === 1 ? "one group" : `${groups.size} groups`}, blocks of ${sizes} tokens` : "");
}
