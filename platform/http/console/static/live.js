// What a page shows is asked for every two seconds, while somebody looks at it.

import { ApiError, ask } from "./api.js";

const PERIOD_MS = 2000;

export class Live {
  #paths;
  #changed;
  #refused;
  #timer = null;
  #round = 0;
  #asking = false;
  data = {};
  lastAnswer = null;

  // `paths`: of the admin API, by the names under which their answers are to be found in `data`:
  // as values, or as ApiErrors. `changed` is called after each round, and with the error where the
  // platform did not answer; `refused` when it no longer takes the token.
  constructor(paths, changed, refused) {
    this.#paths = Object.entries(paths);
    this.#changed = changed;
    this.#refused = refused;
    document.addEventListener("visibilitychange", this.#seen);
    void this.look();
  }

  // Ask at once, as after a change.
  async look() {
    clearTimeout(this.#timer);
    const round = ++this.#round;
    this.#asking = true;
    const answers = await Promise.all(this.#paths.map(([name, path]) => this.#ask(name, path)));
    if (round !== this.#round) return; // it has been stopped, or a newer one is under way
    this.#asking = false;
    this.#take(answers);
    if (!document.hidden) this.#timer = setTimeout(() => this.look(), PERIOD_MS);
  }

  // What this platform does not have, such as a KV store, it will not have two seconds later.
  #ask(name, path) {
    const known = this.data[name];
    if (known instanceof ApiError && known.status === 404) return known;
    return ask(path).catch((error) => error);
  }

  stop() {
    this.#round += 1;
    clearTimeout(this.#timer);
    document.removeEventListener("visibilitychange", this.#seen);
  }

  #seen = () => {
    if (!document.hidden && !this.#asking) void this.look();
  };

  #take(answers) {
    const away = answers.find((each) => each instanceof ApiError && isAway(each));
    if (answers.some((each) => each instanceof ApiError && each.status === 401)) {
      this.#refused();
      return;
    }
    answers.forEach((answer, at) => {
      // What it was last is shown on while the platform is away.
      if (!(answer instanceof ApiError && isAway(answer))) this.data[this.#paths[at][0]] = answer;
    });
    if (!away) this.lastAnswer = Date.now();
    this.#changed(away ?? null);
  }
}

function isAway(error) {
  return error.status === 0 || error.status >= 500;
}
