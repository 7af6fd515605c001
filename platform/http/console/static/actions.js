// Changes that an operator asks for: confirmed where they take something away, told when done.

import { ApiError, ask } from "./api.js";
import { el } from "./dom.js";

let afterwards = () => {};

// Have `look` called after each change, so that the page shows it.
export function afterEachChange(look) {
  afterwards = look;
}

// A button that asks the admin API for a change: `change` gives [path, options]. `confirm`: a
// question that is asked first. `done`: what is said when it has been done.
export function changeButton(
  text,
  change,
  { confirm, done, kind = "plain", label, disabled } = {},
) {
  return el(
    "button",
    {
      type: "button",
      class: kind,
      "aria-label": label,
      disabled,
      onclick: async ({ currentTarget: button }) => {
        if (confirm && !(await confirmed(confirm, text))) return;
        button.disabled = true; // no change is asked for twice
        await carryOut(change(), done ?? `${label ?? text}: done.`);
        button.disabled = false;
      },
    },
    text,
  );
}

// Ask for a change, and say how it went; what the API answers, or null where it refused.
export async function carryOut([path, options], done) {
  try {
    const answer = await ask(path, options);
    say(typeof done === "function" ? done(answer) : done, "good");
    afterwards();
    return answer ?? {};
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    say(error.message, "bad");
    afterwards();
    return null;
  }
}

// Say something at the lower edge; what went wrong stays until it is closed.
export function say(text, kind = "plain") {
  const toast = el(
    "div",
    { class: `toast ${kind}` },
    el("p", {}, text),
    el(
      "button",
      { type: "button", class: "quiet", "aria-label": "Close", onclick: () => toast.remove() },
      "×",
    ),
  );
  const all = document.getElementById("toasts");
  all.append(toast);
  while (all.children.length > 3) all.firstChild.remove();
  if (kind !== "bad") setTimeout(() => toast.remove(), 5000);
}

function confirmed(question, text) {
  return new Promise((resolve) => {
    const dialog = el(
      "dialog",
      { "aria-labelledby": "question" },
      el("p", { id: "question" }, question),
      el(
        "div",
        { class: "buttons" },
        el(
          "button",
          { type: "button", class: "plain", autofocus: true, onclick: () => dialog.close("") },
          "Leave it",
        ),
        el("button", { type: "button", class: "danger", onclick: () => dialog.close("yes") }, text),
      ),
    );
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(dialog.returnValue === "yes");
    });
    document.body.append(dialog);
    dialog.showModal();
  });
}
