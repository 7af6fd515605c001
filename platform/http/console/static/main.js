// The console: which page is shown, and who may see it.

import { afterEachChange } from "./actions.js";
import { session } from "./api.js";
import { el, morph } from "./dom.js";
import { Live } from "./live.js";
import { loginPage } from "./login.js";
import { notice } from "./parts.js";
import * as batches from "./pages/batches.js";
import * as events from "./pages/events.js";
import * as fleet from "./pages/fleet.js";
import * as keys from "./pages/keys.js";
import * as kv from "./pages/kv.js";
import * as models from "./pages/models.js";
import * as plans from "./pages/plans.js";
import * as requests from "./pages/requests.js";
import * as chat from "./pages/chat.js";

// Each page is a module with `title`, `paths` (what of the admin API it shows) and `show(data,
// redraw, rest)`, which gives its nodes; `rest` is what stands behind its name in the address.
const PAGES = { fleet, models, chat, requests, plans, kv, batches, keys, events };
const app = document.getElementById("app");
let live = null;
let current = null;
// Why the platform did not answer last; null: it did.
let away = null;

function route() {
  const [name, ...rest] = location.hash.replace(/^#\/?/, "").split("/");
  return { name: name in PAGES ? name : "fleet", rest: rest.map(decoded).join("/") };
}

function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

function open() {
  live?.stop();
  if (!session.token) {
    showLogin();
    return;
  }
  const { name, rest } = route();
  const page = PAGES[name];
  current = { rest, page };
  away = null;
  document.title = `${page.title} · Loomserve`;
  app.replaceChildren(frame(name));
  live = new Live(
    page.paths,
    (error) => {
      away = error;
      draw();
    },
    () => showLogin("The token is no longer right."),
  );
  afterEachChange(() => live.look());
  showLink(app.querySelector("[aria-current]"));
}

// On a phone the pages' names are wider than the screen. scrollIntoView would have Tab begin here.
function showLink(link) {
  const nav = link.parentElement;
  nav.scrollLeft = link.offsetLeft - nav.offsetLeft - (nav.clientWidth - link.clientWidth) / 2;
}

function showLogin(why) {
  live?.stop();
  session.leave();
  current = null;
  document.title = "Loomserve";
  app.replaceChildren(loginPage(open, why));
  app.querySelector("input").focus();
}

// Nothing of what was shown or said stays in the tab.
function leave() {
  session.leave();
  location.reload();
}

function frame(name) {
  const links = Object.entries(PAGES).map(([each, page]) =>
    el("a", { href: `#/${each}`, "aria-current": each === name ? "page" : null }, page.title),
  );
  return el(
    "div",
    { class: "frame" },
    el(
      "header",
      { class: "side" },
      el(
        "a",
        { class: "brand", href: "#/fleet" },
        el("img", { src: "icon.svg", alt: "", width: 24, height: 24 }),
        "Loomserve",
      ),
      el("nav", { "aria-label": "Pages" }, links),
      el("button", { type: "button", class: "quiet leave", onclick: leave }, "Leave"),
    ),
    el("main", { id: "main", tabindex: "-1" }, el("p", { class: "empty" }, "Asking the platform…")),
  );
}

function draw() {
  if (!current) return;
  const known = Object.keys(current.page.paths).every((name) => name in live.data);
  const shown = known ? current.page.show(live.data, draw, current.rest) : [];
  const fresh = el(
    "main",
    { id: "main", tabindex: "-1" },
    away && notice(saying(away), "bad"),
    shown,
  );
  morph(document.getElementById("main"), fresh);
}

function saying(error) {
  const since = live.lastAnswer && Math.round((Date.now() - live.lastAnswer) / 1000);
  return `${error.message} ${since ? `What is shown is ${since} s old. ` : ""}It is asked again every two seconds.`;
}

addEventListener("hashchange", () => {
  open();
  // Whoever goes to another page reads on there; at the first one the way begins at its top.
  document.querySelector("main").focus();
});
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  document.getElementById("main")?.focus();
});
open();
