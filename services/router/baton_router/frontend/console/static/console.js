// Asks for a snapshot every second and shows it.

import { $, h, setText } from "./dom.js";
import { span } from "./format.js";
import { showTiles } from "./tiles.js";
import { condition, showCards, showIndex } from "./instances.js";
import { drawFlows, showMiddle } from "./flows.js";
import { focusRow, followKeys, placeOf, showDecisions } from "./decisions.js";
import { showExplanation, showMissing } from "./explain.js";

const EVERY_MS = 1000;
const HIDDEN_EVERY_MS = 10000;
const SLOWEST_MS = 8000;
const LIMIT_MS = 6000;
const THEMES = ["auto", "light", "dark"];

const state = { data: null, key: "", explained: "", place: 0, lost: 0, conditions: new Map(), timer: 0, prefills: [], decodes: [] };

class Refused extends Error {}

// --- talking to the router ---

async function ask(path) {
  const headers = state.key ? { authorization: `Bearer ${state.key}` } : {};
  const answer = await fetch(path, { headers, cache: "no-store", signal: AbortSignal.timeout(LIMIT_MS) });
  if (answer.status === 401) throw new Refused();
  if (!answer.ok && answer.status !== 404) throw new Error(`the router answers ${answer.status}`);
  return { status: answer.status, body: await answer.json() };
}

async function look() {
  clearTimeout(state.timer);
  let wait = document.hidden ? HIDDEN_EVERY_MS : EVERY_MS;
  try {
    show((await ask("debug/console")).body);
  } catch (error) {
    if (error instanceof Refused) return askForKey();
    wait = Math.min(SLOWEST_MS, EVERY_MS * 2 ** state.lost);
    lose();
  }
  state.timer = setTimeout(look, wait);
}

function lose() {
  state.lost += 1;
  $("live").dataset.state = "lost";
  setText($("live-text"), "Not connected");
  $("main").classList.add("stale");
  const since = state.data ? ` What you see is ${span(Date.now() / 1000 - state.seenAt)} old.` : "";
  setText($("banner"), `The router does not answer; trying again.${since}`);
  $("banner").hidden = false;
}

function askForKey() {
  const dialog = $("key");
  state.key = "";
  remember("session", "baton-key", "");
  setText($("live-text"), "API key wanted");
  if (!dialog.open) dialog.showModal();
}

// --- showing ---

function show(data) {
  state.data = data;
  state.seenAt = Date.now() / 1000;
  state.lost = 0;
  $("live").dataset.state = "live";
  setText($("live-text"), "Live");
  $("banner").hidden = true;
  $("main").classList.remove("stale");
  showFacts(data);
  showTiles($("tiles"), data);
  state.prefills = showCards("prefill", data);
  state.decodes = showCards("decode", data);
  showMiddle(data, state.prefills, state.decodes);
  const most = Math.max(state.prefills.length, state.decodes.length);
  $("topology").className = `topology ${most > 8 ? "compact" : most > 4 ? "medium" : "roomy"}`;
  drawFlows(data, state.prefills, state.decodes);
  showDecisions(data, (id) => { location.hash = `request=${encodeURIComponent(id)}`; });
  showIndex(data);
  tellChanges(data);
  const explained = data.decisions.find((x) => x.id === state.explained);
  if (state.explained && explained?.outcome === "running") explain();
}

function showFacts(data) {
  const ready = (role) => data.instances.filter((x) => x.role === role && x.status === "ready" && !x.silent).length;
  const lost = data.instances.filter((x) => x.status === "lost").length;
  const ratio = `${ready("prefill")}P${ready("decode")}D${lost ? `, ${lost} lost` : ""}`;
  const facts = [["model", data.model ?? "none yet"], ["ratio", ratio], ["policy", data.policy], ["up", span(data.uptime_s)]];
  const list = $("facts");
  if (!list.children.length) list.append(...facts.map(([name]) => h("div", {}, h("dt", {}, name), h("dd"))));
  facts.forEach(([, value], at) => setText(list.children[at].lastElementChild, value));
}

// Say, for who cannot see it, which instances came, went or changed.
function tellChanges(data) {
  const now = new Map(data.instances.map((x) => [x.id, condition(x)[0].toLowerCase()]));
  const news = [];
  for (const [id, word] of now) if (state.conditions.has(id) && state.conditions.get(id) !== word) news.push(`${id} is ${word}`);
  for (const id of state.conditions.keys()) if (!now.has(id)) news.push(`${id} left`);
  state.conditions = now;
  if (news.length) setText($("news"), news.join(". "));
}

// --- one decision ---

async function explain() {
  const id = state.explained;
  try {
    const { status, body } = await ask(`debug/decisions/${encodeURIComponent(id)}`);
    if (id !== state.explained) return;
    if (status === 404) showMissing("The router does not remember this request any more.");
    else showExplanation(body);
  } catch (error) {
    if (error instanceof Refused) askForKey();
    else showMissing("The router does not answer.");
  }
}

function followHash() {
  state.explained = new URLSearchParams(location.hash.slice(1)).get("request") ?? "";
  const sheet = $("explain");
  if (!state.explained) return sheet.open && sheet.close();
  $("explain-id").textContent = state.explained;
  state.place = Math.max(placeOf(state.explained), 0);
  if (!sheet.open) sheet.showModal();
  return explain();
}

// The browser gives the focus back to the row that had it, unless that has left the list.
function leaveExplanation() {
  const place = placeOf(state.explained);
  focusRow(place < 0 ? state.place : place);
  state.explained = "";
  if (location.hash) history.replaceState(null, "", location.pathname);
}

// --- what the viewer chose ---

// Read what was kept (no value), keep it, or forget it (an empty value).
function remember(where, name, value) {
  try {
    const store = where === "session" ? sessionStorage : localStorage;
    if (value) store.setItem(name, value);
    else if (value === "") store.removeItem(name);
    return store.getItem(name) ?? "";
  } catch {
    return value ?? ""; // storage may be switched off: then it lasts as long as the page
  }
}

function setTheme(name) {
  const dark = name === "dark" || (name === "auto" && matchMedia("(prefers-color-scheme: dark)").matches);
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  setText($("theme"), `Theme: ${name}`);
  $("theme").dataset.name = name;
}

function begin() {
  const saved = remember("local", "baton-theme");
  setTheme(THEMES.includes(saved) ? saved : "auto");
  state.key = remember("session", "baton-key");
  $("theme").addEventListener("click", () => {
    const next = THEMES[(THEMES.indexOf($("theme").dataset.name) + 1) % THEMES.length];
    remember("local", "baton-theme", next);
    setTheme(next);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => setTheme($("theme").dataset.name));
  $("key-form").addEventListener("submit", () => {
    state.key = remember("session", "baton-key", $("key-input").value.trim());
    $("key-input").value = "";
    look();
    if (state.explained) explain();
  });
  $("explain-close").addEventListener("click", () => $("explain").close());
  $("explain").addEventListener("close", leaveExplanation);
  $("explain").addEventListener("click", (event) => { if (event.target === $("explain")) $("explain").close(); });
  addEventListener("hashchange", followHash);
  document.addEventListener("visibilitychange", () => { if (!document.hidden && !$("key").open) look(); });
  new ResizeObserver(() => { if (state.data) drawFlows(state.data, state.prefills, state.decodes); }).observe($("topology"));
  followKeys();
  followHash();
  look();
}

begin();
