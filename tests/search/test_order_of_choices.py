"""The order in which choices come up: the quickest that fits is found, however wrong the first bounds of its time are."""

from types import SimpleNamespace

from helpers.profile import NIGHTLY
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shardlib.search.space import Choice
from shardlib.search.verb import Searching

CHOICES = [Choice((("data", 1),), number, 1) for number in range(1, 6)]


class Known(Searching):
    """A search in which all is known of each choice: bound, time on the clock and exact time, and bytes."""

    def __init__(self, facts, within):
        self.choices, self.rejected, self.timed = list(facts), {}, {}
        self._facts, self._within, self._all = facts, within, set(facts)
        self._after = {"recompute": {None: "no more"}, "offload": {None: "no more"}}
        self._times = SimpleNamespace(soonest=lambda choice, plain: facts[choice][0][0])

    def _plain(self):
        return ()

    def _bound(self, choice):
        (_, bound, *_), (least, _) = self._facts[choice]
        return bound, least

    def _clocked(self, choice):
        (_, _, clock, _), (least, _) = self._facts[choice]
        return clock, least

    def _exact(self, choice):
        return None, self._facts[choice][1][1]

    def _ran(self, choice):
        return SimpleNamespace(choice=choice, seconds=self._facts[choice][0][3])


def growing(size):
    """Numbers of which none is below the one before: what is known of a choice, the more the later."""
    return st.lists(st.integers(1, 20), min_size=size, max_size=size).map(sorted)


@given(
    st.lists(st.tuples(growing(4), growing(2)), min_size=1, max_size=5), st.integers(1, 20), st.sampled_from([0, 0.25])
)
@example([([1, 1, 1, 9], [1, 1]), ([2, 2, 2, 3], [1, 1])], 20, 0)  # the first to be planned is not the quickest
@settings(max_examples=1000 if NIGHTLY else 100)
def test_the_quickest_that_fits_is_found(facts, budget, within):
    facts = dict(zip(CHOICES, facts, strict=False))
    found = Known(facts, within).quickest(budget)
    fitting = [seconds for (*_, seconds), (_, held) in facts.values() if held <= budget]
    if not fitting:
        assert found is None
    else:
        assert facts[found.choice][1][1] <= budget
        assert found.seconds * (1 - within) <= min(fitting)
