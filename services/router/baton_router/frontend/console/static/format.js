// Numbers as people read them.

export const NOTHING = "–";

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export function count(value) {
  if (value === null || value === undefined) return NOTHING;
  if (value >= 1e6) return `${trim(value / 1e6)}M`;
  if (value >= 1e4) return `${trim(value / 1e3)}k`;
  return whole.format(value);
}

function trim(value) {
  return value >= 100 ? value.toFixed(0) : value.toFixed(1).replace(/\.0$/, "");
}

export function rate(value) {
  if (value === null || value === undefined) return NOTHING;
  if (value === 0) return "0";
  return value < 10 ? value.toFixed(value < 1 ? 2 : 1) : count(value);
}

export function bytes(value) {
  if (value === null || value === undefined) return [NOTHING, ""];
  for (const [size, unit] of [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]) {
    if (value >= size) return [trim(value / size), unit];
  }
  return [whole.format(value), "B"];
}

export function bytesText(value) {
  return bytes(value).join(" ").trim();
}

// Milliseconds as a number and its unit.
export function time(ms) {
  if (ms === null || ms === undefined) return [NOTHING, ""];
  if (ms >= 60000) return [trim(ms / 60000), "min"];
  if (ms >= 1000) return [(ms / 1000).toFixed(ms >= 10000 ? 1 : 2), "s"];
  return [ms >= 100 ? ms.toFixed(0) : ms >= 10 ? ms.toFixed(1) : ms.toFixed(2), "ms"];
}

export function timeText(ms) {
  const [value, unit] = time(ms);
  return `${value.replace(/(\.\d)\d$/, "$1")} ${unit}`.trim();
}

export function percent(share) {
  return share === null || share === undefined ? NOTHING : `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)}%`;
}

export function span(seconds) {
  const s = Math.floor(seconds);
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
}

export function clock(unix) {
  return new Date(unix * 1000).toLocaleTimeString("en-GB");
}

// What a person calls a request: without what the router put before and after it.
export function shortId(id) {
  const name = id.replace(/-[0-9a-f]{32}$/, "").replace(/^(chatcmpl|cmpl|gen)-/, "");
  if (/^[0-9a-f]{32}$/.test(name)) return name.slice(0, 8);
  return name.length > 22 ? `${name.slice(0, 21)}…` : name;
}
