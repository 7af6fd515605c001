"""Division of an engine's time into prompts, attention and the rest, from its steps' times."""

from __future__ import annotations

from operator import mul

# Share of a step's weight that is kept at the next step: about the last thousand count.
_KEPT = 0.999
_LEAST_STEPS = 30
# The parts are found again after so many.
_FOUND_AGAIN = 16
# Ridge penalty for features that have not varied yet: the constant part then gets all of a step.
_RIDGE = 1e-3


class EngineWork:
    """Sums of seconds and tokens since the engine started; take differences of two readings.

    Steps that only decode are fitted, by least squares, to a constant, the requests and the KV in
    use; the part that grows with the KV is attention. A step that also computes prompts takes
    longer than a step that only decodes, by the time of the prompts.

    What a GPU's step of few requests takes, one of many takes as well: its weights are read once.
    So of the constant only the share counts that the step's requests have of those that it could
    have; the rest of it is left to others.

    Attributes:
        prefill_s: Seconds of prompts.
        attention_s: Seconds of attention in decoding.
        linear_s: Seconds of everything else in decoding.
        tokens: Tokens whose KV was written, of prompts and generated.
    """

    def __init__(self, most_running: int | None = None) -> None:
        """``most_running``: requests that a step of a GPU may have; None: this is no GPU."""
        self._most_running = most_running
        self.prefill_s = self.attention_s = self.linear_s = 0.0
        self.tokens = 0
        # A row for each feature: its products with all of them, and with the seconds.
        self._sums = [[0.0] * 4 for _ in range(3)]
        self._each: list[float] = []
        """Seconds of one of each feature; empty: not known yet."""
        self._steps = 0

    def step(
        self, seconds: float, *, running: int, generated: int, computed: int, kv_usage: float
    ) -> None:
        """Take in a step of ``seconds``.

        Args:
            running: Requests in the batch after the step.
            generated: Generated tokens, first ones included.
            computed: Tokens of the prompts that the step completed.
            kv_usage: Share of KV memory in use.
        """
        self.tokens += generated + computed
        features = (1.0, generated, kv_usage)
        decoding, attention, constant = self._predicted(features)
        # A request whose prompt is not done is in the batch without a generated token.
        if generated and not computed and generated >= running:
            self._fit(features, seconds)
            decoding = seconds
        elif not generated:
            decoding = 0.0
        decoding = min(decoding, seconds)
        self.prefill_s += seconds - decoding
        self.attention_s += decoding * attention
        left = constant * (1 - self._fullness(generated, kv_usage))
        self.linear_s += decoding * max(0.0, 1 - attention - left)

    def _fullness(self, generated: int, kv_usage: float) -> float:
        """Share of the requests that a step could have, for which there must be KV memory, too."""
        if self._most_running is None:
            return 1.0
        return min(1.0, max(generated / self._most_running, kv_usage))

    def _predicted(self, features: tuple[float, ...]) -> tuple[float, float, float]:
        """Predict the seconds of a step that only decodes, and of them the shares of attention and
        of what is the same for any number of requests."""
        parts = list(map(mul, self._each, features))
        whole = sum(parts)
        if whole <= 0:
            return 0.0, 0.0, 0.0
        constant, _, attention = (min(max(part / whole, 0.0), 1.0) for part in parts)
        return whole, attention, constant

    def _seconds_each(self) -> list[float]:
        """Seconds of one of each feature: Gaussian elimination of the normal equations."""
        rows = [list(row) for row in self._sums]
        for at in (1, 2):
            rows[at][at] += _RIDGE * max(rows[at][at], 1e-12)
        for at, pivot in enumerate(rows):
            for row in rows[at + 1 :]:
                share = row[at] / pivot[at]
                row[at:] = [
                    value - share * other for value, other in zip(row[at:], pivot[at:], strict=True)
                ]
        _, second, third = rows
        usage = third[3] / third[2]
        generated = (second[3] - second[2] * usage) / second[1]
        return [
            (rows[0][3] - rows[0][1] * generated - rows[0][2] * usage) / rows[0][0],
            generated,
            usage,
        ]

    def _fit(self, features: tuple[float, ...], seconds: float) -> None:
        for of, row in zip(features, self._sums, strict=True):
            row[:] = [
                _KEPT * each + of * x for each, x in zip(row, (*features, seconds), strict=True)
            ]
        self._steps += 1
        if self._steps >= _LEAST_STEPS and not (self._each and self._steps % _FOUND_AGAIN):
            self._each = self._seconds_each()
