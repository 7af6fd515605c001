// Elements from data. Text becomes text only: nothing here, or anywhere, writes HTML.

const SVG = "http://www.w3.org/2000/svg";
const SVG_TAGS = new Set(["svg", "g", "rect", "path", "polyline", "text", "line", "circle"]);
const HANDLERS = ["onclick", "onchange", "oninput", "onsubmit", "onkeydown"];

// An element. Functions among the properties are handlers, all else are attributes; null, undefined
// and false leave one out. Children are nodes, texts, numbers, or lists of them.
export function el(tag, properties = {}, ...children) {
  const node = SVG_TAGS.has(tag) ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") node[name] = value;
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.flat(Infinity).filter(shown).map(asNode));
  return node;
}

// Make `old` what `fresh` is, and keep its nodes: so focus, scrolling and what was typed stay while
// a page is drawn anew every two seconds. Handlers must not hold nodes of the tree they came with.
export function morph(old, fresh) {
  if (!alike(old, fresh)) {
    old.replaceWith(fresh);
    return;
  }
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== fresh.data) old.data = fresh.data;
    return;
  }
  morphAttributes(old, fresh);
  for (const name of HANDLERS) old[name] = fresh[name];
  morphChildren(old, fresh);
}

function shown(child) {
  return child !== null && child !== undefined && child !== false;
}

function asNode(child) {
  return child instanceof Node ? child : document.createTextNode(String(child));
}

function keyOf(node) {
  return node.nodeType === Node.ELEMENT_NODE ? node.getAttribute("data-key") : null;
}

function alike(one, other) {
  return one.nodeName === other.nodeName && keyOf(one) === keyOf(other);
}

function morphAttributes(old, fresh) {
  for (const { name } of [...old.attributes]) {
    // Whoever reads the page opens and shuts these.
    if (name === "open") continue;
    if (!fresh.hasAttribute(name)) old.removeAttribute(name);
  }
  for (const { name, value } of fresh.attributes) {
    if (name !== "open" && old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
}

function morphChildren(old, fresh) {
  const keyed = new Map();
  for (const child of old.childNodes) {
    if (keyOf(child) !== null) keyed.set(keyOf(child), child);
  }
  let at = old.firstChild;
  for (const wanted of [...fresh.childNodes]) {
    const known = keyed.get(keyOf(wanted));
    if (known && known !== at && alike(known, wanted)) {
      old.insertBefore(known, at);
      morph(known, wanted);
    } else if (at && alike(at, wanted)) {
      const next = at.nextSibling;
      morph(at, wanted);
      at = next;
    } else {
      old.insertBefore(wanted, at);
    }
  }
  while (at) {
    const next = at.nextSibling;
    at.remove();
    at = next;
  }
}
