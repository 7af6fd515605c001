// The page that asks for the admin token.

import { ApiError, ask, session } from "./api.js";
import { el } from "./dom.js";
import { field, notice, valuesOf } from "./parts.js";

// `entered` is called once a token was right; `why`: why it is asked for again.
export function loginPage(entered, why) {
  const problem = el("div", { role: "alert" }, why && notice(why, "bad"));

  async function enter(event) {
    const { token } = valuesOf(event);
    if (!token) return;
    const button = event.currentTarget.querySelector("button");
    button.disabled = true;
    try {
      await ask("state", { token });
      session.enter(token);
      entered();
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      problem.replaceChildren(notice(error.message, "bad"));
    } finally {
      button.disabled = false;
    }
  }

  return el(
    "main",
    { id: "main", class: "login" },
    el("img", { src: "icon.svg", alt: "", width: 48, height: 48 }),
    el("h1", {}, "Loomserve"),
    el(
      "form",
      { onsubmit: enter },
      field(
        "Admin token",
        el("input", {
          name: "token",
          type: "password",
          autocomplete: "off",
          spellcheck: "false",
          required: true,
          autofocus: true,
        }),
        "Of a platform on this machine: cat ~/.cache/loomserve/admin-token",
      ),
      problem,
      el("button", { type: "submit", class: "primary" }, "Enter"),
    ),
    el("p", { class: "about" }, "It is kept in this tab until you leave or close it."),
  );
}
