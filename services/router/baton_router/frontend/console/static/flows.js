// Curves between the cards: as thick as the bytes that went along them, with beads as fast as the requests.

import { $, h, keyed, setText, svg } from "./dom.js";
import { NOTHING, bytesText, count } from "./format.js";

const MOST_MESH = 64;
const MOST_LABELS = 6;
const MOST_BEADS = 40;
const PLACES = [0.5, 0.38, 0.62, 0.28, 0.72, 0.2, 0.8];

function anchor(card, box, side) {
  const at = card.getBoundingClientRect();
  return [(side === "right" ? at.right : at.left) - box.left, at.top + at.height / 2 - box.top];
}

function curve([x1, y1], [x2, y2]) {
  const bend = (x2 - x1) * 0.5;
  return `M${x1.toFixed(1)} ${y1.toFixed(1)}C${(x1 + bend).toFixed(1)} ${y1.toFixed(1)} ${(x2 - bend).toFixed(1)} ${y2.toFixed(1)} ${x2.toFixed(1)} ${y2.toFixed(1)}`;
}

// One flow per pair, whatever the pipes.
function pairs(data) {
  const found = new Map();
  for (const item of data.flows.items) {
    if (item.path === "local") continue;
    const source = item.path === "store" ? "store" : item.source;
    const key = `${source}→${item.target}`;
    const pair = found.get(key) ?? { key, source, target: item.target, path: item.path, requests: 0, bytes: 0, pipes: new Set() };
    pair.requests += item.requests;
    pair.bytes += item.bytes;
    if (item.pipe) pair.pipes.add(item.pipe);
    found.set(key, pair);
  }
  return [...found.values()].sort((a, b) => b.bytes - a.bytes);
}

function cardsById(role, instances) {
  const nodes = new Map([...$(role).children].map((node) => [node.dataset.key, node]));
  return new Map(instances.map((x) => [x.id, nodes.get(x.address)]));
}

function definitions(width) {
  const stops = [svg("stop", { class: "from", offset: "0.1" }), svg("stop", { class: "to", offset: "0.9" })];
  const third = width / 3;
  return svg("defs", {}, svg("linearGradient", { id: "hand-over", gradientUnits: "userSpaceOnUse", x1: third, x2: 2 * third, y1: 0, y2: 0 }, stops));
}

function meshPath(prefills, decodes, box) {
  if (prefills.length * decodes.length > MOST_MESH) return "";
  return prefills.flatMap((p) => decodes.map((d) => curve(anchor(p, box, "right"), anchor(d, box, "left")))).join("");
}

export function drawFlows(data, prefills, decodes) {
  const picture = $("flows");
  const place = $("topology");
  const box = place.getBoundingClientRect();
  box.x -= place.scrollLeft;
  box.y -= place.scrollTop;
  // Not the scroll size: the picture itself would keep that from ever shrinking.
  const width = place.clientWidth;
  const height = Math.max(...[...place.children].filter((x) => x !== picture).map((x) => x.offsetTop + x.offsetHeight));
  if (picture.getAttribute("width") !== String(width) || picture.getAttribute("height") !== String(height)) {
    picture.setAttribute("width", width);
    picture.setAttribute("height", height);
    picture.replaceChildren(definitions(width), svg("path", { class: "mesh" }), svg("g"), svg("g"));
  }
  const [, mesh, lines, labels] = picture.children;
  const sources = cardsById("prefill", prefills);
  const targets = cardsById("decode", decodes);
  const alive = (cards, list) => list.filter((x) => x.status === "ready").map((x) => cards.get(x.id));
  mesh.setAttribute("d", meshPath(alive(sources, prefills), alive(targets, decodes), box));
  const all = pairs(data);
  const store = $("store");
  const from = (pair) => (pair.source === "store" ? anchor(store, box, "right") : sources.has(pair.source) ? anchor(sources.get(pair.source), box, "right") : null);
  const drawn = all.filter((pair) => targets.has(pair.target) && from(pair));
  const most = Math.max(...drawn.map((pair) => pair.bytes), 1);
  drawn.forEach((pair, at) => {
    pair.rank = at;
    pair.d = curve(from(pair), anchor(targets.get(pair.target), box, "left"));
    pair.kind = pair.path === "store" ? "from-store" : "remote";
    pair.width = 2 + (drawn.length > 24 ? 4 : 9) * Math.sqrt(pair.bytes / most);
    pair.pace = Math.max(0.35, 2.4 / Math.sqrt(1 + pair.requests / data.flows.window_s));
  });
  const make = () => svg("g", {}, svg("path"), svg("path"));
  keyed(lines, drawn, (pair) => pair.key, make, (node, pair) => {
    const [line, beads] = node.children;
    line.setAttribute("class", `flow ${pair.kind}`);
    line.setAttribute("d", pair.d);
    line.style.strokeWidth = `${pair.width.toFixed(1)}px`;
    beads.setAttribute("class", `beads ${pair.kind}`);
    beads.setAttribute("d", pair.rank < MOST_BEADS ? pair.d : "");
    beads.style.setProperty("--pace", `${(Math.round(pair.pace * 10) / 10).toFixed(1)}s`);
  });
  label(labels, lines, drawn.length <= MOST_LABELS ? drawn : []);
  list(all, data);
}

// Each label at the first place along its curve where it covers no other.
function label(labels, lines, drawn) {
  const paths = new Map([...lines.children].map((node) => [node.dataset.key, node.firstElementChild]));
  const taken = [];
  const make = () => svg("g", {}, svg("rect", { height: 20, rx: 10 }), svg("text"));
  keyed(labels, drawn, (pair) => pair.key, make, (node, pair) => {
    const [pill, text] = node.children;
    const path = paths.get(pair.key);
    const length = path.getTotalLength();
    const said = `${count(pair.requests)} × · ${bytesText(pair.bytes)}`;
    const width = 7.4 * said.length + 14;
    const free = (at) => taken.every((other) => Math.abs(other.x - at.x) > (other.width + width) / 2 || Math.abs(other.y - at.y) > 22);
    const spots = PLACES.map((share) => path.getPointAtLength(length * share));
    const at = spots.find(free) ?? spots[0];
    taken.push({ x: at.x, y: at.y, width });
    setText(text, said);
    text.setAttribute("x", at.x.toFixed(1));
    text.setAttribute("y", (at.y + 4).toFixed(1));
    pill.setAttribute("x", (at.x - width / 2).toFixed(1));
    pill.setAttribute("y", (at.y - 10).toFixed(1));
    pill.setAttribute("width", width.toFixed(1));
  });
}

// The same as a table: what a screen reader has, and a phone.
function list(all, data) {
  setText($("flow-caption"), all.length ? `KV flows of the last ${data.flows.window_s} seconds` : `No KV moved in the last ${data.flows.window_s} seconds`);
  $("flow-rows").parentElement.tHead.hidden = !all.length;
  const make = () => h("tr", {}, h("td"), h("td"), h("td"), h("td", { class: "num" }), h("td", { class: "num" }));
  keyed($("flow-rows"), all, (pair) => pair.key, make, (node, pair) => {
    const source = pair.source === "store" ? "KV store" : pair.source;
    const texts = [source, pair.target, [...pair.pipes].join(", ") || NOTHING, count(pair.requests), bytesText(pair.bytes)];
    texts.forEach((text, at) => setText(node.children[at], text));
  });
}

export function showMiddle(data, prefills, decodes) {
  const stored = data.flows.items.some((item) => item.path === "store");
  $("store").hidden = !stored;
  const moving = data.flows.items.some((item) => item.path !== "local");
  let text = "";
  if (!data.instances.length) text = "Waiting for instances. They register with --routers HOST:PORT.";
  else if (!decodes.some((x) => x.status === "ready")) text = "No decode instance is ready: requests wait, then get 503.";
  else if (!prefills.length) text = "No prefill instances: decode instances compute prompts by themselves.";
  else if (!moving) text = `No KV moved in the last ${data.flows.window_s} s.`;
  setText($("flow-empty"), text);
}
