"""Decides which graph replays a step, and when a graph is captured. Pure Python, without torch.

A capture stops the engine for some milliseconds. So likely shapes are captured before the first request, and
others while the engine is idle. Under load a shape is captured once its steps have lost as much time as a
capture takes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Iterator

from penstock.runner.graph_keys import Key

USES_BEFORE_CAPTURE = 2  # uses of a shape before it is captured under load
MAX_KNOWN = 4096  # shapes whose steps are counted
MAX_PLANNED = 160  # shapes that are captured before a step needs them
SMALL_STEP = 512  # tokens; a step of unknown cost up to this size may use a graph of twice its size
# A graph saves nothing for a step whose device time is this many times its host time. The exception: under
# many small requests the device waits for the host anyway, because requests cost the host more than launches.
MAX_DEVICE_SHARE = 1.5
MAX_GAP_S = 0.005  # between steps; a longer gap means that the engine was idle
# Idle share of the device under load: above the first value it waits for the host, until below the second.
_HOST_BOUND, _DEVICE_BUSY = 0.15, 0.03
_GAP_WEIGHT = 1 / 32  # weight of the newest gap in the mean
_HOST_GAIN = 0.5  # share of host time that a graph of a large step saves while the device waits for the host
MIN_IDLE_S = 0.02  # idle time before a graph is captured
IDLE_SHARE = 4.0  # idle time before a capture, as a multiple of its duration
_DEVICE_BOUND = 1.2  # if the device took this many times the host's time, its time is a valid measurement
_MIN_GAIN = 0.1  # share of host time that a graph saves at least, if its gain is small or unknown
_MAX_BORROW_TIME = 0.95  # time of a step in a larger graph, as a share of its eager time


class StepTimes:
    """Measured times of this model's steps, eager and in graphs."""

    def __init__(self) -> None:
        self.host_s = float("inf")  # minimum; it hardly depends on a step's size
        self._device: dict[int, float] = {}  # tokens of a bucket → minimum device time
        self._sizes: list[int] = []  # keys of `_device`, sorted
        self.waits_for_host = False  # whether the device waits for the host under load
        self._idle_share = 0.0

    def followed(self, gap_s: float, device_s: float) -> None:
        """Record how long the device was idle before a step."""
        if gap_s > MAX_GAP_S:
            return
        share = max(gap_s, 0.0) / (max(gap_s, 0.0) + max(device_s, 1e-6))
        self._idle_share += _GAP_WEIGHT * (share - self._idle_share)
        self.waits_for_host = self._idle_share > (_DEVICE_BUSY if self.waits_for_host else _HOST_BOUND)

    def ran_eagerly(self, tokens: int, host_s: float, device_s: float) -> None:
        """Record an eager step. Its device time counts only if the device did not wait for the host."""
        self.host_s = min(self.host_s, host_s)
        if device_s > _DEVICE_BOUND * host_s:
            self._note(tokens, device_s)

    def replayed(self, tokens: int, device_s: float) -> None:
        self._note(tokens, device_s)

    def _note(self, tokens: int, device_s: float) -> None:
        is_new = tokens not in self._device
        self._device[tokens] = min(device_s, self._device.get(tokens, device_s))
        if is_new:  # update last, because another thread may read
            self._sizes = sorted(self._device)

    def device_s(self, tokens: int) -> float | None:
        """Estimate the device time of a step of this size; None: no measurements. Between measured sizes it
        is interpolated. Outside them it is proportional to the nearest, which may be the only one."""
        if not (sizes := self._sizes):
            return None
        at = bisect_left(sizes, tokens)
        if at in (0, len(sizes)):
            nearest = sizes[min(at, len(sizes) - 1)]
            return self._device[nearest] * tokens / nearest
        below, above = self._device[sizes[at - 1]], self._device[sizes[at]]
        return below + (above - below) * (tokens - sizes[at - 1]) / (sizes[at] - sizes[at - 1])

    def gain_s(self, tokens: int) -> float:
        """Seconds that a graph saves a step of this size; 0: none, or the host time is unknown."""
        host_s, device_s = self.host_s, self.device_s(tokens)
        if host_s == float("inf"):
            return 0.0
        if device_s is not None and device_s > MAX_DEVICE_SHARE * host_s:
            return _HOST_GAIN * host_s if self.waits_for_host else 0.0
        return max(host_s - (device_s or 0.0), _MIN_GAIN * host_s)


class GraphPolicy:
    """Counts the steps of each shape and decides about captures. It outlives the graphs, which are dropped
    when the model sleeps or memory runs out."""

    def __init__(self) -> None:
        self.times = StepTimes()
        self.uses: Counter[Key] = Counter()
        self._lost_s: dict[Key, float] = {}  # time that steps lost because they had no graph of their own
        self._planned: dict[Key, None] = {}  # in capture order
        self._capture_s: float | None = None  # moving average of capture times

    def note_use(self, key: Key) -> None:
        """Count a step. The number of shapes is unbounded, so rarely used shapes are forgotten."""
        self.uses[key] += 1
        if len(self.uses) > MAX_KNOWN:
            self.uses = Counter(dict(self.uses.most_common(MAX_KNOWN // 2)))
            self._lost_s = {key: lost_s for key, lost_s in self._lost_s.items() if key in self.uses}

    def plan(self, keys: Iterable[Key]) -> None:
        """Plan these shapes, in this order, before all shapes planned so far."""
        self._planned = dict.fromkeys((*keys, *self._planned))
        for key in list(self._planned)[MAX_PLANNED:]:
            del self._planned[key]

    def plan_largest_first(self) -> None:
        """Move the planned shape with the most tokens to the front: all graphs share one memory pool, and the
        memory of the largest is enough for every other."""
        worthwhile = [key for key in self._planned if self._is_worthwhile(key)]
        if worthwhile:
            self.plan([max(worthwhile, key=lambda key: key.bucket.tokens)])

    @property
    def num_planned(self) -> int:
        return len(self._planned)

    def plan_nothing(self) -> None:
        self._planned.clear()

    @property
    def capture_s(self) -> float:
        """Expected duration of a capture: an eager run, and the recorded one."""
        if self._capture_s is not None:
            return self._capture_s
        return 0.0 if self.times.host_s == float("inf") else 2 * self.times.host_s

    def captured(self, key: Key, elapsed_s: float) -> None:
        known = elapsed_s if self._capture_s is None else self._capture_s
        self._capture_s = known + (elapsed_s - known) / 4
        self._lost_s.pop(key, None)
        self._planned.pop(key, None)

    def may_borrow(self, key: Key, larger: Key) -> bool:
        """Whether the padding of a larger graph costs a step less than an eager run."""
        tokens, larger_tokens = key.bucket.tokens, larger.bucket.tokens
        times = self.times
        device_s = times.device_s(larger_tokens)
        if device_s is None or times.host_s == float("inf"):
            return tokens <= SMALL_STEP and larger_tokens <= 2 * tokens
        own_s = times.device_s(tokens) or 0.0
        eager_s = own_s + _HOST_GAIN * times.host_s if times.waits_for_host else own_s
        return device_s < _MAX_BORROW_TIME * max(times.host_s, eager_s)

    def prefers_eager(self, key: Key) -> bool:
        """Whether a step is faster without its graph: if the device is busy anyway, padding only costs
        time."""
        return self.times.host_s < float("inf") and not self.times.gain_s(key.bucket.tokens)

    def is_due(self, key: Key, borrowed: Key | None) -> bool:
        """Count a step without its own graph, and return whether to capture one under load. A planned shape
        is due at once if no larger graph can replay it, because it is known to be frequent."""
        if key in self._planned and borrowed is None and self._is_worthwhile(key):
            return True
        lost_s = self._lost_s[key] = self._lost_s.get(key, 0.0) + self._loss_s(key, borrowed)
        return self.uses[key] > USES_BEFORE_CAPTURE and lost_s > 0 and lost_s >= self.capture_s

    def _loss_s(self, key: Key, borrowed: Key | None) -> float:
        """Seconds that a step loses because it has no graph of its own."""
        tokens, times = key.bucket.tokens, self.times
        if borrowed is None:
            return times.gain_s(tokens)
        borrowed_s, own_s = times.device_s(borrowed.bucket.tokens), times.device_s(tokens)
        if borrowed_s is None or own_s is None:
            return 0.0
        return max(0.0, borrowed_s - own_s)

    @property
    def min_idle_s(self) -> float:
        """Required idle time before a capture. It is long enough that requests rarely arrive during one."""
        return max(MIN_IDLE_S, IDLE_SHARE * self.capture_s)

    def next_planned(self, unavailable: Collection[Key]) -> Key | None:
        """Remove and return the next planned shape. `unavailable`: shapes that are captured or refused."""
        while self._planned:
            key = next(iter(self._planned))
            del self._planned[key]
            if key not in unavailable and self._is_worthwhile(key):
                return key
        return None

    def next_idle(self, unavailable: Collection[Key]) -> Key | None:
        """The shape to capture while the engine is idle: a planned one, or the one that has lost the most
        time."""
        if (key := self.next_planned(unavailable)) is not None:
            return key
        lost = {key: lost_s for key, lost_s in self._lost_s.items() if lost_s > 0 and not key.adapter_rank}
        waiting = [key for key in lost if key not in unavailable]
        return max(waiting, key=lost.__getitem__, default=None)

    def has_idle_work(self, unavailable: Collection[Key]) -> bool:
        """Whether `next_idle` may return a shape. Called before every wait of an idle engine."""
        if self._planned:
            return True
        return any(
            lost_s > 0 and not key.adapter_rank and key not in unavailable
            for key, lost_s in self._lost_s.items()
        )

    def _is_worthwhile(self, key: Key) -> bool:
        times = self.times
        return times.host_s == float("inf") or times.gain_s(key.bucket.tokens) > 0

    def most_used(self) -> Iterator[tuple[Key, int]]:
        """Shapes with their uses, ordered by the time that their graphs have saved, most first."""

        def saved_s(used: tuple[Key, int]) -> float:
            gain_s = self.times.gain_s(used[0].bucket.tokens)
            return used[1] * (gain_s if self.times.host_s < float("inf") else 1.0)

        return iter(sorted(self.uses.items(), key=saved_s, reverse=True))
