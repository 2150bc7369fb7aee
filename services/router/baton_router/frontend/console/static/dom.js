// Small helpers to build and update elements. Text is only ever set as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

export const $ = (id) => document.getElementById(id);

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// Make a list's elements those of `items`, in order, keeping those that are there: focus and animations survive.
export function keyed(list, items, key, make, update) {
  const known = new Map([...list.children].map((node) => [node.dataset.key, node]));
  let place = list.firstElementChild;
  for (const item of items) {
    const name = key(item);
    let node = known.get(name);
    known.delete(name);
    if (!node) {
      node = make(item);
      node.dataset.key = name;
    }
    update(node, item);
    if (node === place) place = place.nextElementSibling;
    else list.insertBefore(node, place);
  }
  for (const node of known.values()) node.remove();
}

export function part(node, name) {
  return node.querySelector(`[data-part="${name}"]`);
}
