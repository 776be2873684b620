"""The rule of physical lengths: against a cache that is simulated token by token."""

from hypothesis import given
from hypothesis import strategies as st

from megatron_sparse_rl.rollout.sparse_kv.lengths import Lengths

RULES = st.builds(Lengths, budget=st.integers(1, 200), buffer=st.integers(1, 80))


@given(rule=RULES, protected=st.integers(0, 150), logical=st.integers(0, 900))
def test_lengths_are_those_of_a_growing_cache(rule: Lengths, protected: int, logical: int) -> None:
    physical = peak = compactions = 0
    for n in range(1, logical + 1):
        physical += 1
        peak = max(peak, physical)
        due = physical == protected + rule.budget + rule.buffer
        assert rule.is_compacted_at(n, protected) == due
        if due:
            physical -= rule.buffer
            compactions += 1
        assert rule.physical(n, protected) == physical
    assert rule.compactions(logical, protected) == compactions
    assert rule.peak(logical, protected) == peak


@given(rule=RULES, protected=st.integers(0, 150), logical=st.integers(0, 900))
def test_next_compaction_is_the_nearest(rule: Lengths, protected: int, logical: int) -> None:
    end = rule.next_compaction(logical, protected)
    assert rule.is_compacted_at(end, protected)
    assert not any(rule.is_compacted_at(n, protected) for n in range(logical + 1, end))
    # Everything up to it fits into the peak, so no step needs more blocks than the bound.
    assert rule.physical(logical, protected) + end - logical == protected + rule.budget + rule.buffer
