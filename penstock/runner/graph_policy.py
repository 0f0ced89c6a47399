"""Which steps are replayed by which graph, and when a graph is captured. Pure Python, without torch.

A capture stops the engine for some milliseconds. So likely shapes are captured before the first request,
others while nobody waits, and under load only a shape whose steps have lost as much time as a capture takes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Iterator

from penstock.runner.graph_keys import Key

USES_BEFORE_CAPTURE = 2  # of a shape, under load
MAX_KNOWN = 4096  # shapes whose steps are counted
MAX_PLANNED = 160  # shapes that are captured before they come
SMALL_STEP = 512  # tokens; a step of unknown cost up to this size may borrow a graph of twice its size
# A step that keeps the device busy this many times the host's work gains nothing, unless the device waits for
# the host all the same: many small requests cost it more than the launches.
MAX_DEVICE_SHARE = 1.5
MAX_GAP_S = 0.005  # between steps; after a longer one there was nothing to run
# Of the time under load: from the first on the device waits for the host, until it is below the second.
_HOST_BOUND, _DEVICE_BUSY = 0.15, 0.03
_GAP_WEIGHT = 1 / 32  # of the newest gap in the mean
_HOST_GAIN = 0.5  # of the host's time: what a graph of a large step gains where the device waits for the host
MIN_IDLE_S = 0.02  # without any work, before a graph is captured
IDLE_SHARE = 4.0  # times a capture's duration without any work, before it begins
_DEVICE_BOUND = 1.2  # the device took so much longer than the host that its own time was measured
_MIN_GAIN = 0.1  # of the host's time, where a graph's gain is small or not known
_MIN_BORROW_GAIN = 0.95  # of the time without a graph: what a borrowed graph may take


class StepTimes:
    """What steps of this model take: launched one kernel after another, and by graphs."""

    def __init__(self) -> None:
        self.host_s = float("inf")  # the least; it hardly depends on a step's size
        self._device: dict[int, float] = {}  # tokens of a bucket → the least time on the device
        self._sizes: list[int] = []  # those that are known, sorted
        self.waits_for_host = False  # the device does, under load
        self._idle_share = 0.0

    def followed(self, gap_s: float, device_s: float) -> None:
        """Note for how long the device had nothing to do before a step."""
        if gap_s > MAX_GAP_S:
            return
        share = max(gap_s, 0.0) / (max(gap_s, 0.0) + max(device_s, 1e-6))
        self._idle_share += _GAP_WEIGHT * (share - self._idle_share)
        self.waits_for_host = self._idle_share > (_DEVICE_BUSY if self.waits_for_host else _HOST_BOUND)

    def ran_eagerly(self, tokens: int, host_s: float, device_s: float) -> None:
        """Note a step without a graph. While the device waits for the host, its time says nothing."""
        self.host_s = min(self.host_s, host_s)
        if device_s > _DEVICE_BOUND * host_s:
            self._note(tokens, device_s)

    def replayed(self, tokens: int, device_s: float) -> None:
        self._note(tokens, device_s)

    def _note(self, tokens: int, device_s: float) -> None:
        is_new = tokens not in self._device
        self._device[tokens] = min(device_s, self._device.get(tokens, device_s))
        if is_new:  # last: another thread may read
            self._sizes = sorted(self._device)

    def device_s(self, tokens: int) -> float | None:
        """The time of a step of such a bucket on the device; None: nothing is known. Beyond the sizes that
        are known it is in proportion, below them too: a large step may be the only one whose time shows."""
        if not (sizes := self._sizes):
            return None
        at = bisect_left(sizes, tokens)
        if at in (0, len(sizes)):
            nearest = sizes[min(at, len(sizes) - 1)]
            return self._device[nearest] * tokens / nearest
        below, above = self._device[sizes[at - 1]], self._device[sizes[at]]
        return below + (above - below) * (tokens - sizes[at - 1]) / (sizes[at] - sizes[at - 1])

    def gain_s(self, tokens: int) -> float:
        """What a graph saves a step of such a bucket; 0: nothing, or the host's time is not known."""
        host_s, device_s = self.host_s, self.device_s(tokens)
        if host_s == float("inf"):
            return 0.0
        if device_s is not None and device_s > MAX_DEVICE_SHARE * host_s:
            return _HOST_GAIN * host_s if self.waits_for_host else 0.0
        return max(host_s - (device_s or 0.0), _MIN_GAIN * host_s)


class GraphPolicy:
    """Counts the steps of each shape and decides. It outlives the graphs, which sleep and memory shortage
    drop."""

    def __init__(self) -> None:
        self.times = StepTimes()
        self.uses: Counter[Key] = Counter()
        self._lost_s: dict[Key, float] = {}  # by steps without a graph of their own
        self._planned: dict[Key, None] = {}  # in the order in which they are captured
        self._capture_s: float | None = None  # of the last captures

    def note_use(self, key: Key) -> None:
        """Count a step. Callers can make any number of shapes, so those that come rarely are forgotten."""
        self.uses[key] += 1
        if len(self.uses) > MAX_KNOWN:
            self.uses = Counter(dict(self.uses.most_common(MAX_KNOWN // 2)))
            self._lost_s = {key: lost_s for key, lost_s in self._lost_s.items() if key in self.uses}

    def plan(self, keys: Iterable[Key]) -> None:
        """Capture these before all others that are planned, the first of them first."""
        self._planned = dict.fromkeys((*keys, *self._planned))
        for key in list(self._planned)[MAX_PLANNED:]:
            del self._planned[key]

    def plan_largest_first(self) -> None:
        """Capture the planned shape with the most tokens before the others: all graphs share one memory pool,
        and what the largest takes is enough for each of them."""
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
        """How long a capture takes: a run without a graph, and one that is recorded."""
        if self._capture_s is not None:
            return self._capture_s
        return 0.0 if self.times.host_s == float("inf") else 2 * self.times.host_s

    def captured(self, key: Key, elapsed_s: float) -> None:
        known = elapsed_s if self._capture_s is None else self._capture_s
        self._capture_s = known + (elapsed_s - known) / 4
        self._lost_s.pop(key, None)
        self._planned.pop(key, None)

    def may_borrow(self, key: Key, larger: Key) -> bool:
        """Whether a step loses less by the padding of a larger graph than by running without one."""
        tokens, roomy = key.bucket.tokens, larger.bucket.tokens
        times = self.times
        device_s = times.device_s(roomy)
        if device_s is None or times.host_s == float("inf"):
            return tokens <= SMALL_STEP and roomy <= 2 * tokens
        own_s = times.device_s(tokens) or 0.0
        without_s = own_s + _HOST_GAIN * times.host_s if times.waits_for_host else own_s
        return device_s < _MIN_BORROW_GAIN * max(times.host_s, without_s)

    def prefers_eager(self, key: Key) -> bool:
        """Whether a step is better run without its graph: the device is busy anyway, and padding costs it."""
        return self.times.host_s < float("inf") and not self.times.gain_s(key.bucket.tokens)

    def is_due(self, key: Key, borrowed: Key | None) -> bool:
        """Count a step that has no graph of its own, and say whether one should be captured under load. A
        planned shape that can borrow no graph is: it is known to come often."""
        if key in self._planned and borrowed is None and self._is_worthwhile(key):
            return True
        lost_s = self._lost_s[key] = self._lost_s.get(key, 0.0) + self._loss_s(key, borrowed)
        return self.uses[key] > USES_BEFORE_CAPTURE and lost_s > 0 and lost_s >= self.capture_s

    def _loss_s(self, key: Key, borrowed: Key | None) -> float:
        """What a step loses by having no graph of its own."""
        tokens, times = key.bucket.tokens, self.times
        if borrowed is None:
            return times.gain_s(tokens)
        roomy_s, own_s = times.device_s(borrowed.bucket.tokens), times.device_s(tokens)
        if roomy_s is None or own_s is None:
            return 0.0
        return max(0.0, roomy_s - own_s)

    @property
    def min_idle_s(self) -> float:
        """How long nothing must have run or waited before a graph is captured: so long that a request which
        comes during the capture is the exception."""
        return max(MIN_IDLE_S, IDLE_SHARE * self.capture_s)

    def next_planned(self, unavailable: Collection[Key]) -> Key | None:
        """The next planned shape, which is planned no longer. `unavailable`: captured, or refused."""
        while self._planned:
            key = next(iter(self._planned))
            del self._planned[key]
            if key not in unavailable and self._is_worthwhile(key):
                return key
        return None

    def next_idle(self, unavailable: Collection[Key]) -> Key | None:
        """The shape to capture while nobody waits: a planned one, or that which has lost the most."""
        if (key := self.next_planned(unavailable)) is not None:
            return key
        lost = {key: lost_s for key, lost_s in self._lost_s.items() if lost_s > 0 and not key.adapter_rank}
        waiting = [key for key in lost if key not in unavailable]
        return max(waiting, key=lost.__getitem__, default=None)

    def has_idle_work(self, unavailable: Collection[Key]) -> bool:
        """Whether `next_idle` may have something; asked before every wait of an idle engine."""
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
        """Shapes with their uses, those first whose graphs have saved the most."""

        def saved_s(used: tuple[Key, int]) -> float:
            gain_s = self.times.gain_s(used[0].bucket.tokens)
            return used[1] * (gain_s if self.times.host_s < float("inf") else 1.0)

        return iter(sorted(self.uses.items(), key=saved_s, reverse=True))
