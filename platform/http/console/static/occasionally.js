// What takes the platform more work than the rest is asked for less often.

// `look` asks; what is given is called at each drawing, with what draws anew, and gives the last
// answer: null before the first, and where the last attempt failed.
export function occasionally(look, periodMs) {
  let known = null;
  let askedAt = 0;

  async function refresh(redraw) {
    askedAt = Date.now();
    known = await look().catch(() => null);
    redraw();
  }

  return (redraw) => {
    if (Date.now() - askedAt > periodMs) void refresh(redraw);
    return known;
  };
}
