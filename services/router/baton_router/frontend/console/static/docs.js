// Renders openapi.json: endpoints, the fields of their bodies and answers, statuses. Nothing comes from elsewhere.
import { $, h } from "./dom.js";

const nameOf = (ref) => ref.split("/").pop();

function typeOf(schema) {
  if (schema.$ref) return nameOf(schema.$ref);
  if (schema.anyOf) return schema.anyOf.map(typeOf).join(" | ");
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" | ");
  if ("const" in schema) return JSON.stringify(schema.const);
  if (schema.type === "array") return `[${schema.items ? typeOf(schema.items) : "any"}]`;
  const least = schema.minimum ?? schema.exclusiveMinimum;
  const range = least !== undefined || schema.maximum !== undefined ? ` ${least ?? ""} to ${schema.maximum ?? ""}` : "";
  return `${[schema.type ?? "any"].flat().join(" | ")}${range}`;
}

function fields(name, schemas) {
  const { properties = {}, required = [] } = schemas[name];
  const rows = Object.entries(properties).map(([field, schema]) =>
    h("tr", {}, h("td", {}, h("code", {}, field), required.includes(field) ? " (required)" : ""), h("td", {}, h("code", {}, typeOf(schema))), h("td", {}, schema.description ?? "")));
  return h("details", {}, h("summary", {}, h("code", {}, name)), h("table", {}, ...rows));
}

// All schemas that one names, itself first.
function closure(node, schemas, found = new Set()) {
  if (node === null || typeof node !== "object") return found;
  if (node.$ref && !found.has(nameOf(node.$ref))) {
    found.add(nameOf(node.$ref));
    closure(schemas[nameOf(node.$ref)], schemas, found);
  }
  for (const value of Object.values(node)) closure(value, schemas, found);
  return found;
}

function operation(method, path, spec, schemas) {
  const parts = [h("p", {}, spec.summary)];
  if (spec.security.length) parts.push(h("p", {}, "Wants an API key: Authorization: Bearer KEY."));
  for (const item of spec.parameters ?? []) parts.push(h("p", {}, h("code", {}, item.name), ` (${item.in}): ${item.description}`));
  const lists = [["Body", spec.requestBody], ["Answer", spec.responses[200]]];
  for (const [title, node] of lists) {
    const names = node ? [...closure(node, schemas)] : [];
    if (names.length) parts.push(h("p", {}, title), ...names.map((name) => fields(name, schemas)));
  }
  const statuses = Object.entries(spec.responses).map(([status, answer]) => `${status} ${answer.description}`);
  parts.push(h("p", {}, `Statuses: ${statuses.join(", ")}`));
  return h("details", {}, h("summary", {}, h("code", {}, `${method.toUpperCase()} ${path}`), ` ${spec.summary}`), h("section", {}, ...parts));
}

const answer = await fetch("openapi.json");
const { paths, components } = await answer.json();
for (const [path, methods] of Object.entries(paths)) {
  for (const [method, spec] of Object.entries(methods)) {
    if (spec.responses) $("endpoints").append(operation(method, path, spec, components.schemas));
  }
}
