// Models come, sleep and are unloaded.

import { changeButton } from "./actions.js";
import { inPath } from "./api.js";

// Sleep, wake and unload, as far as a model's state has room for them.
export function presenceButtons({ name, status }) {
  const change = (what) => () => [`models/${inPath(name)}/${what}`, { method: "POST" }];
  const there = ["ready", "degraded"].includes(status);
  return [
    there &&
      changeButton("Sleep", change("sleep"), {
        label: `Have ${name} sleep`,
        done: `${name} gives its memory back.`,
      }),
    ["asleep", "unloaded"].includes(status) &&
      changeButton("Wake", change("wake"), {
        label: `Wake ${name}`,
        done: `${name} comes.`,
        kind: "primary",
      }),
    (there || status === "asleep") &&
      changeButton("Unload", change("unload"), {
        label: `Unload ${name}`,
        confirm: `End the engines of ${name}? Its name stays, and the next request loads it again, which takes some seconds.`,
        done: `${name} has no engine until somebody asks for it.`,
      }),
  ];
}
