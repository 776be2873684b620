"""Neither the cut into micro-batches nor what masked slots hold may change loss, gradient or statistics."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from megatron_sparse_rl.algorithms.settings import AlgorithmSettings
from megatron_sparse_rl.kernels.loss_stats import max_stat, mean_stat, merge_stats, min_stat, reduce_stats
from megatron_sparse_rl.kernels.policy_loss import policy_loss
from tests.unit.policy_loss_cases import (
    algorithm_settings,
    as_columns,
    batch_weight_scale,
    draw_batch,
    gradient,
)
from tests.unit.policy_loss_oracle import Sequence

MAX_RESPONSE_TOKENS = 9
ROUNDING = 1e-14


@st.composite
def cut_batches(draw: st.DrawFn) -> list[list[Sequence]]:
    """Micro-batches of whole sequences, some of them empty or fully masked."""
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=7))
    keep = draw(st.sampled_from([0.0, 0.3, 0.8, 1.0]))
    flags = {name: draw(st.booleans()) for name in ("old", "stage")}
    batch = draw_batch(draw(st.integers(0, 10**6)), lengths, **flags, ref=True, keep=keep)
    cuts = sorted(draw(st.lists(st.integers(0, len(batch)), max_size=4)))
    return [batch[a:b] for a, b in zip([0, *cuts], [*cuts, len(batch)], strict=True)]


def global_result(
    parts: list[list[Sequence]], algorithm: AlgorithmSettings, poison: float = 0.0
) -> tuple[float, int, torch.Tensor, dict[str, float]]:
    """(loss sum, count, gradient, statistics) of the batch processed in these micro-batches."""
    loss, count, gradients, stats = 0.0, 0, [], []
    scale = batch_weight_scale([sequence for part in parts for sequence in part], algorithm)
    for part in parts:
        logprobs, entropy, columns = as_columns(part, poison=poison, weight_scale=scale)
        result = policy_loss(logprobs, entropy, columns, algorithm, MAX_RESPONSE_TOKENS)
        loss, count = loss + result.loss.item(), count + int(result.count)
        gradients.append(torch.stack(gradient(result.loss, logprobs, entropy)))
        stats.append(result.stats)
    return loss, count, torch.cat(gradients, dim=1), reduce_stats(stats)


def assert_same(one: tuple, other: tuple) -> None:
    """But for the rounding of float64 sums that were added in another order."""
    assert one[0] == pytest.approx(other[0], rel=ROUNDING, abs=1e-12)
    assert one[1] == other[1]
    torch.testing.assert_close(one[2], other[2], rtol=ROUNDING, atol=1e-13)
    assert one[3] == pytest.approx(other[3], rel=ROUNDING, abs=1e-12, nan_ok=True)


@given(parts=cut_batches(), algorithm=algorithm_settings())
@hypothesis_settings(max_examples=150, deadline=None)
def test_the_cut_into_micro_batches_changes_nothing(
    parts: list[list[Sequence]], algorithm: AlgorithmSettings
) -> None:
    batch = [sequence for part in parts for sequence in part]
    whole = global_result([batch], algorithm)
    assert_same(global_result(parts, algorithm), whole)
    assert_same(global_result([[sequence] for sequence in batch], algorithm), whole)


@given(
    parts=cut_batches(),
    algorithm=algorithm_settings(),
    poison=st.sampled_from([math.nan, math.inf, -math.inf]),
)
@hypothesis_settings(max_examples=150, deadline=None)
def test_masked_slots_are_never_read(
    parts: list[list[Sequence]], algorithm: AlgorithmSettings, poison: float
) -> None:
    clean, poisoned = global_result(parts, algorithm), global_result(parts, algorithm, poison)
    assert_same(poisoned, clean)
    assert math.isfinite(poisoned[0])
    assert poisoned[2].isfinite().all()


@pytest.mark.parametrize("loss", ["ppo", "gspo", "cispo"])
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "fixed_length"])
@pytest.mark.parametrize("lengths", [[], [1], [3, 2]])
def test_nothing_to_learn_gives_zero_with_a_graph(loss: str, aggregation: str, lengths: list[int]) -> None:
    """No token at all, and every token masked: backward works and gives zeros."""
    algorithm = AlgorithmSettings(
        loss=loss, aggregation=aggregation, kl_coefficient=0.1, entropy_coefficient=0.1
    )
    batch = draw_batch(0, lengths, old=True, ref=True, keep=0.0)
    logprobs, entropy, columns = as_columns(batch, poison=-math.inf)
    result = policy_loss(logprobs, entropy, columns, algorithm, MAX_RESPONSE_TOKENS)
    result.loss.backward()
    assert result.loss.item() == 0
    assert result.count.item() == (len(lengths) if aggregation == "fixed_length" else 0)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [0.0] * sum(lengths)
    stats = reduce_stats([result.stats])
    assert all(math.isnan(stats[name]) for name in ("entropy", "ratio_mean", "max/ratio", "min/ratio"))


def test_a_part_without_tokens_does_not_shift_means_or_extremes() -> None:
    """A gap of 0 from an empty part would hide a minimum of 2 or a maximum of -3."""
    full = torch.ones(2, dtype=torch.bool)
    parts = []
    for values, mask in ((torch.tensor([2.0, 5.0]), full), (torch.tensor([9.0, 9.0]), ~full)):
        parts.append(
            {
                "mean": mean_stat(values, mask),
                "min/x": min_stat(values, mask),
                "max/negative": max_stat(-values - 1, mask),
            }
        )
    assert all(entry.tolist() == [0, 0] for name, entry in parts[1].items() if name != "mean")
    expected = {"mean": 3.5, "min/x": 2.0, "max/negative": -3.0}
    assert reduce_stats(parts) == expected
    assert reduce_stats([merge_stats(parts[:1]), merge_stats(parts[1:])]) == expected
    assert reduce_stats([]) == {}


def test_token_weighted_means_over_parts_of_different_size() -> None:
    # 1 token of value 10 and 4 tokens of value 0: the mean is 2, the mean of means would be 5.
    parts = [
        {"x": mean_stat(torch.tensor([10.0]), torch.tensor([True]))},
        {"x": mean_stat(torch.zeros(5), torch.tensor([True] * 4 + [False]))},
    ]
    assert reduce_stats(parts) == {"x": 2.0}
