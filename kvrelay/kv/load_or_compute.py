"""Whether a prompt's blocks are loaded from the store or computed, decided from what both have cost lately. Pure.

Times are in seconds. The engine may compute from the front while the store gives the last blocks
(`kvrelay.kv.meeting`), so a store that turns out slow costs no more than the head start it was given.
"""

from __future__ import annotations

from dataclasses import dataclass

SMOOTHING = 0.3  # weight of the latest measurement
RECOVERED = 0.5  # of what is known of the store: a measurement below that replaces it, as after a fault
# Of the time that computing takes: what a store that gives nothing may cost. The rest of the way to a first token that
# is at most 1.2 times as late is for the noise.
HEAD_START_SHARE = 0.15
# Of a prompt so short that this is more: a round trip takes a few milliseconds however little is asked for.
SHORT_HEAD_START_S = 0.02
SHORT_GAIN = 0.5  # and then loading must be expected to take at most so much of the time that computing takes
UNMEASURED_HEAD_START_S = 0.2  # before anything is known of this engine
MIN_SAVED = 0.1  # of the time that computing takes; for less the store is not asked
TRY_EVERY = 16  # prompts that are not loaded: then one is, without a head start, to see whether the store has recovered


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """`head_start_s` is the time a load gets before the engine begins to compute from the front."""

    loads: bool
    head_start_s: float = 0.0


class LoadOrCompute:
    """What the engine's tokens and the store's blocks cost here. Belongs to the event loop."""

    def __init__(
        self,
        block_tokens: int,
        *,
        always_head_start_s: float | None = None,
        unmeasured_head_start_s: float = UNMEASURED_HEAD_START_S,
    ) -> None:
        """With `always_head_start_s` everything is loaded, whatever it costs, with that head start."""
        self._block_tokens = block_tokens
        self._always_head_start_s = always_head_start_s
        self._unmeasured_head_start_s = unmeasured_head_start_s
        self._token_s: float | None = None  # one token, in a step with many
        self._first_s: float | None = None  # from asking the store to the first block, Match included
        self._block_s: float | None = None  # each later block
        self._num_skipped = 0

    def computed(self, num_tokens: int, seconds: float) -> None:
        """A step of the engine took `seconds`; one of less than a block tells little of prompts."""
        if num_tokens >= self._block_tokens:
            self._token_s = _smooth(self._token_s, seconds / num_tokens)

    def loaded(self, num_blocks: int, first_s: float, seconds: float) -> None:
        """`num_blocks`, at least one, came within `seconds`, the first after `first_s`."""
        self._first_s = _recovering(self._first_s, first_s)
        if num_blocks > 1:
            self._block_s = _recovering(self._block_s, (seconds - first_s) / (num_blocks - 1))

    def stalled(self, waited_s: float) -> None:
        """Nothing came in `waited_s`, and would not for some time more."""
        self._first_s = max(waited_s, self._first_s or 0.0)

    def choose(self, num_blocks: int, num_waiting_tokens: int = 0) -> LoadPlan:
        """For a prompt of which the store may have `num_blocks`, while the engine has others' tokens to compute."""
        if num_blocks == 0:
            return LoadPlan(loads=False)
        if self._always_head_start_s is not None:
            return LoadPlan(loads=True, head_start_s=self._always_head_start_s)
        if self._token_s is None:
            return LoadPlan(loads=True, head_start_s=self._unmeasured_head_start_s)
        wait_s = num_waiting_tokens * self._token_s
        compute_s = wait_s + num_blocks * self._block_tokens * self._token_s
        head_start_s = HEAD_START_SHARE * compute_s
        if self._first_s is None:
            return LoadPlan(loads=True, head_start_s=head_start_s)
        load_s = self._first_s + (self._block_s or 0.0) * (num_blocks - 1)
        if load_s <= head_start_s:
            return LoadPlan(loads=True, head_start_s=head_start_s)
        if load_s <= min(SHORT_HEAD_START_S, SHORT_GAIN * compute_s):
            return LoadPlan(loads=True, head_start_s=min(SHORT_HEAD_START_S, 2 * load_s))
        if self._saved(num_blocks, wait_s, compute_s) >= MIN_SAVED:
            return LoadPlan(loads=True)
        self._num_skipped += 1
        return LoadPlan(loads=self._num_skipped % TRY_EVERY == 0)

    def _saved(self, num_blocks: int, wait_s: float, compute_s: float) -> float:
        """Share of `compute_s` by which the two ends meet earlier than one alone would arrive."""
        assert self._token_s is not None
        assert self._first_s is not None
        computes = 1.0 / (self._block_tokens * self._token_s)  # blocks a second, after wait_s
        loads = 1.0 / max(self._block_s or 0.0, 1e-9)  # after the first
        met_s = (num_blocks - 1 + wait_s * computes + self._first_s * loads) / (computes + loads)
        return 1.0 - max(met_s, self._first_s) / compute_s


def _smooth(before: float | None, latest: float) -> float:
    return latest if before is None else before + SMOOTHING * (latest - before)


def _recovering(before: float | None, latest: float) -> float:
    return latest if before is not None and latest < RECOVERED * before else _smooth(before, latest)
