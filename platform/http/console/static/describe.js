// An action of a plan in words.

import { bytes, plural } from "./format.js";

export function describe(action) {
  switch (action.action) {
    case "move":
      return `${amountOf(action)} of ${action.engine} ${action.back ? "home from" : "to"} ${action.lender}`;
    case "move_requests":
      return `${plural(action.requests, "request")} of ${action.engine} to ${action.to}`;
    case "set_role":
      return `${action.engine} becomes ${action.role}`;
    case "add_replica":
      return `one more replica of ${action.model} on ${action.device}`;
    case "remove_replica":
      return `${action.engine} ends`;
    default:
      return action.action;
  }
}

function amountOf({ kind, amount }) {
  if (kind === "requests") return `${bytes(amount)} of KV`;
  return kind === "heads" ? plural(amount, "KV head") : plural(amount, "layer");
}
