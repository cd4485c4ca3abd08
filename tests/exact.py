"""Chance that follows every branch: the tool with which the tests prove losslessness instead of sampling it."""
from collections import defaultdict
from collections.abc import Callable, Iterator

import torch

from speculative import Randomness


class Replay(Randomness):
    """Repeats the given choices, then takes the first possible one each time and notes the others as `alternatives`."""

    def __init__(self, choices: tuple[int, ...]):
        self.given, self.taken, self.weight, self.alternatives = choices, (), 1.0, []

    def _choose(self, chances: list[float]) -> int:
        possible = [i for i, chance in enumerate(chances) if chance > 0]
        if len(self.taken) < len(self.given):
            choice = self.given[len(self.taken)]
        else:
            choice = possible[0]
            self.alternatives += [(*self.taken, other) for other in possible[1:]]
        self.taken += (choice,)
        self.weight *= chances[choice]
        return choice

    def flip(self, probability: float) -> bool:
        assert 0 <= probability <= 1
        return self._choose([probability, 1 - probability]) == 0

    def draw(self, probs: torch.Tensor) -> int:
        chances = probs.double()
        assert torch.isfinite(chances).all() and abs(chances.sum() - 1) < 1e-5
        return self._choose((chances / chances.sum()).tolist())


def every_outcome(run: Callable[[Randomness], object]) -> Iterator[tuple[float, object]]:
    """Yields (probability, run's result) for every sequence of chance outcomes; the probabilities sum to 1."""
    waiting = [()]
    while waiting:
        replay = Replay(waiting.pop())
        result = run(replay)
        waiting += replay.alternatives
        yield replay.weight, result


def distribution(run: Callable[[Randomness], tuple]) -> dict[tuple, float]:
    """Result -> probability, over all outcomes."""
    total = defaultdict(float)
    for weight, result in every_outcome(run):
        total[result] += weight
    assert abs(sum(total.values()) - 1) < 1e-5
    return dict(total)


def assert_same(found: dict, wanted: dict, tolerance: float = 2e-6) -> None:
    for key in found.keys() | wanted.keys():
        assert abs(found.get(key, 0.0) - wanted.get(key, 0.0)) < tolerance, (key, found.get(key), wanted.get(key))
