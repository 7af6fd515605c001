// A plan is applied or aborted.

import { changeButton } from "./actions.js";
import { inPath } from "./api.js";
import { el } from "./dom.js";

export function planButtons({ id, status }) {
  return el(
    "div",
    { class: "buttons" },
    status === "proposed" &&
      changeButton("Apply", () => [`plans/${inPath(id)}/apply`, { method: "POST" }], {
        label: `Apply ${id}`,
        kind: "primary",
        confirm: `Carry ${id} out?`,
        done: `${id} is carried out.`,
      }),
    ["proposed", "running"].includes(status) &&
      changeButton("Abort", () => [`plans/${inPath(id)}/abort`, { method: "POST" }], {
        label: `Abort ${id}`,
        kind: "danger",
        confirm: `Leave what of ${id} has not begun, and take back what is under way? What was done stands.`,
        done: `${id} is aborted.`,
      }),
  );
}
