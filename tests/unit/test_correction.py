"""The correction: each switch by hand, every combination against the slow version, settings that are
refused."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from pydantic import ValidationError

from megatron_sparse_rl.algorithms.batch_correction import check_stages, correct_batch
from megatron_sparse_rl.algorithms.correction import Correction, correct, recentre, weight_scale
from megatron_sparse_rl.algorithms.settings import PRESETS, AlgorithmSettings, CorrectionSettings
from megatron_sparse_rl.config import from_tree, load_config, to_tree
from megatron_sparse_rl.kernels.loss_stats import reduce_stats
from megatron_sparse_rl.kernels.policy_loss import policy_loss
from megatron_sparse_rl.trajectory import TrajectoryBatch
from tests.batches import random_batch
from tests.unit.correction_oracle import slow_correction, slow_scale
from tests.unit.policy_loss_cases import (
    algorithm_settings,
    as_columns,
    batch_weight_scale,
    correction_settings,
    draw_batch,
    gradient,
)
from tests.unit.policy_loss_oracle import loop_loss

# Two sequences: ratios 2, 1/2, 1 (product 1) and 3, 1e-5 (the last masked), 4 (product 12).
RATIOS = ([2.0, 0.5, 1.0], [3.0, 1e-5, 4.0])
MASK = torch.tensor([True, True, True, True, False, True])
INDEX = torch.tensor([0, 0, 0, 1, 1, 1])


def by_hand(**given: object) -> Correction:
    log_ratio = torch.tensor([x for row in RATIOS for x in row], dtype=torch.float64).log()
    return correct(torch.where(MASK, log_ratio, 0.0), MASK, INDEX, 2, CorrectionSettings(**given))


@pytest.mark.parametrize(
    ("given", "weight"),
    [
        ({}, [1, 1, 1, 1, 0, 1]),
        ({"weight": "token"}, [2, 0.5, 1, 3, 0, 4]),
        ({"weight": "sequence"}, [1, 1, 1, 12, 0, 12]),
        ({"weight": "geometric"}, [1, 1, 1, math.sqrt(12), 0, math.sqrt(12)]),
        ({"weight": "token", "weight_bound": "truncate", "weight_high": 2.5}, [2, 0.5, 1, 2.5, 0, 2.5]),
        (
            {"weight": "token", "weight_bound": "clip", "weight_low": 0.8, "weight_high": 2.5},
            [2, 0.8, 1, 2.5, 0, 2.5],
        ),
        (
            {"weight": "token", "weight_bound": "mask", "weight_low": 0.8, "weight_high": 3.5},
            [2, 0, 1, 3, 0, 0],
        ),
        ({"weight": "sequence", "weight_bound": "mask", "weight_high": 5}, [1, 1, 1, 0, 0, 0]),
        ({"token_mask_low": 0.6}, [1, 0, 1, 1, 0, 1]),
        ({"token_mask_high": 2.5, "weight": "token"}, [2, 0.5, 1, 0, 0, 0]),
        ({"reject": "sequence", "reject_high": 11}, [1, 1, 1, 0, 0, 0]),
        ({"reject": "sequence", "reject_low": 2}, [0, 0, 0, 1, 0, 1]),
        ({"reject": "geometric", "reject_high": 3.4}, [1, 1, 1, 0, 0, 0]),
        ({"reject": "geometric", "reject_high": 3.5}, [1, 1, 1, 1, 0, 1]),
        # The masked ratio of 1e-5 vetoes nothing.
        ({"veto_threshold": 1e-4}, [1, 1, 1, 1, 0, 1]),
        ({"veto_threshold": 0.6}, [0, 0, 0, 1, 0, 1]),
    ],
)
def test_switches_by_hand(given: dict, weight: list[float]) -> None:
    assert by_hand(**given).weight.tolist() == pytest.approx(weight, abs=1e-12)


def test_normalised_weights_by_hand() -> None:
    """Over tokens (2 + 1/2 + 1 + 3 + 4) / 5 = 2.1, over sequences (1 + 12) / 2 = 6.5, over the accepted 1."""
    for switches, mean in (
        ({"weight": "token"}, 2.1),
        ({"weight": "sequence"}, 6.5),
        ({"weight": "sequence", "reject": "sequence", "reject_high": 11.0}, 1.0),
        ({"weight": "token", "veto_threshold": 0.6}, 3.5),
    ):
        settings = CorrectionSettings(**switches, normalise_weights=True)
        assert weight_scale(by_hand(**switches), INDEX, settings) == pytest.approx(1 / mean, rel=1e-12)
    nothing = by_hand(weight="token", token_mask_low=9.0)
    assert weight_scale(nothing, INDEX, CorrectionSettings(weight="token")) == 1.0


def test_recentring_by_hand() -> None:
    advantages = torch.tensor([1.0, 0.0, -1.0, 3.0, -3.0, 2.0], dtype=torch.float64)
    groups = torch.tensor([7, 7, 7, 2, 2, 5])
    accepted = torch.tensor([True, True, False, False, False, True])
    assert recentre(advantages, groups, accepted).tolist() == [0.5, -0.5, -1.0, 3.0, -3.0, 0.0]


@given(
    algorithm=algorithm_settings(),
    lengths=st.lists(st.integers(1, 20), max_size=5),
    seed=st.integers(0, 10**6),
    keep=st.sampled_from([0.0, 0.7, 1.0]),
    flags=st.tuples(st.booleans(), st.booleans()),
)
@hypothesis_settings(max_examples=200, deadline=None)
def test_loss_with_any_correction_equals_the_slow_version(
    algorithm: AlgorithmSettings, lengths: list[int], seed: int, keep: float, flags: tuple[bool, bool]
) -> None:
    batch = draw_batch(seed, lengths, old=flags[0], stage=flags[1], ref=True, keep=keep)
    slow, count, stats = loop_loss(batch, algorithm, 11)
    scale = batch_weight_scale(batch, algorithm)
    logprobs, entropy, columns = as_columns(batch, weight_scale=scale)
    fast = policy_loss(logprobs, entropy, columns, algorithm, 11)
    assert fast.loss.item() == pytest.approx(slow.item(), abs=1e-10, rel=1e-10)
    assert fast.count.item() == count
    found = {name: value for name, value in reduce_stats([fast.stats]).items() if not math.isnan(value)}
    if any(s.kept() for s in batch):
        assert found == pytest.approx(stats, abs=1e-10, rel=1e-10)
        slow_grad = torch.stack(gradient(slow, *[x for s in batch for x in (*s.pi, *s.entropy)]))
        expected = torch.cat([g.view(2, -1) for g in slow_grad.split([2 * n for n in lengths])], dim=1)
        found_grad = torch.stack(gradient(fast.loss, logprobs, entropy))
        torch.testing.assert_close(found_grad, expected, rtol=1e-10, atol=1e-10)


@given(settings=correction_settings(), seed=st.integers(0, 10**6))
@hypothesis_settings(max_examples=100, deadline=None)
def test_the_scale_makes_the_mean_accepted_weight_one(settings: CorrectionSettings, seed: int) -> None:
    algorithm = AlgorithmSettings(correction=settings)
    batch = draw_batch(seed, [3, 1, 6], old=True, ref=False, stage=True)
    scale = batch_weight_scale(batch, algorithm)
    slow = [s.correction(algorithm) for s in batch]
    expected = slow_scale(slow, settings) if settings.normalise_weights else 1.0
    assert scale == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "fixed_length"])
@pytest.mark.parametrize("denominator", ["all", "accepted"])
def test_all_rejected_gives_zero_and_is_counted(aggregation: str, denominator: str) -> None:
    settings = AlgorithmSettings(
        aggregation=aggregation,
        correction=CorrectionSettings(preset="sparse_rl", veto_threshold=0.999999, denominator=denominator),
    )
    batch = draw_batch(0, [4, 1, 3], old=False, ref=False, keep=1.0)
    for sequence in batch:
        sequence.sampler[0] = sequence.pi[0].item() + 200.0  # float32's exp would not hold its inverse
    logprobs, entropy, columns = as_columns(batch, dtype=torch.float32)
    result = policy_loss(logprobs, entropy, columns, settings, 8)
    result.loss.backward()
    assert result.loss.item() == 0
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [0.0] * 8
    count = {"token_mean": 8, "sequence_mean": 3, "fixed_length": 3}[aggregation]
    assert result.count.item() == (count if denominator == "all" else 0)
    stats = reduce_stats([result.stats])
    assert stats["correction/sequence_veto_fraction"] == stats["correction/sequence_reject_fraction"] == 1
    assert stats["correction/accepted_fraction"] == 0
    assert stats["min/correction/ratio"] == pytest.approx(math.exp(-20))


def test_a_rejected_sequence_keeps_its_kl_and_its_place_in_the_denominator() -> None:
    settings = {"kl_coefficient": 0.5, "kl_estimator": "k2"}
    rejecting = CorrectionSettings(veto_threshold=0.5)
    batch = draw_batch(0, [2, 2], old=True, ref=True, keep=1.0, spread=0.01)
    batch[0].sampler[1] += 1.0  # xi = 1/e
    logprobs, entropy, columns = as_columns(batch)
    both = policy_loss(logprobs, entropy, columns, AlgorithmSettings(**settings, correction=rejecting), 8)
    slopes = torch.autograd.grad(both.loss, logprobs)[0]
    assert columns.ref_logprobs is not None
    kl = 0.5 * (logprobs - columns.ref_logprobs).detach()
    torch.testing.assert_close(slopes[:2], kl[:2], rtol=1e-12, atol=0)
    assert both.count.item() == 4
    accepted = CorrectionSettings(veto_threshold=0.5, denominator="accepted")
    one = policy_loss(logprobs, entropy, columns, AlgorithmSettings(**settings, correction=accepted), 8)
    assert torch.autograd.grad(one.loss, logprobs)[0][:2].tolist() == [0.0, 0.0]
    assert one.count.item() == 2


def test_presets_and_overrides() -> None:
    assert CorrectionSettings() == CorrectionSettings(preset="none")
    staged = CorrectionSettings(preset="sparse_copris_staged", veto_threshold=0.01)
    assert (staged.proximal, staged.weight, staged.veto_threshold) == ("stage", "token", 0.01)
    for name in PRESETS:
        overrides = [f"preset={name}", "reject_high=2", "reject=geometric"]
        config = load_config(None, [f"algorithm.correction.{item}" for item in overrides])
        assert config.algorithm.correction.preset == name
        assert config.algorithm.correction.reject == "geometric"
        assert from_tree(to_tree(config)) == config


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"preset": "copris", "weight": "token"}, "count p/mu twice"),
        ({"weight_bound": "clip", "weight_high": 2.0}, "weight=none makes weight_bound=clip"),
        ({"normalise_weights": True}, "weight=none makes"),
        ({"weight": "token", "weight_high": 2.0}, "weight_bound=none makes"),
        ({"weight": "token", "weight_bound": "truncate", "weight_low": 0.1}, "needs weight_high"),
        ({"weight": "token", "weight_bound": "mask"}, "weight_bound=mask needs"),
        ({"token_mask_low": 2.0, "token_mask_high": 1.0}, "token_mask_low=2.0 is not below"),
        ({"reject": "geometric"}, "reject=geometric does not go with"),
        ({"reject_high": 2.0}, "reject=none does not go with"),
        ({"recentre": True}, "recentre=true has no effect"),
        ({"preset": ["sparse_rl"]}, "preset"),
    ],
)
def test_settings_without_effect_are_refused(given: dict, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        CorrectionSettings(**given)


def with_dense(batch: TrajectoryBatch) -> TrajectoryBatch:
    """With old log-probs near the sampler's, and stage log-probs for about half of the tokens."""
    rng = np.random.default_rng(5)

    def near(column: np.ndarray) -> np.ndarray:
        return (column + rng.normal(0, 0.5, len(column))).astype(np.float32)

    def stage(column: np.ndarray) -> np.ndarray:
        return np.where(rng.random(len(column)) < 0.5, np.float32("nan"), near(column))

    return batch.with_trajectories(
        tuple(
            t.with_columns(old_logprobs=near(t.sampler_logprobs), stage_logprobs=stage(t.sampler_logprobs))
            for t in batch
        )
    )


@pytest.mark.parametrize("proximal", ["old", "stage"])
def test_a_batch_is_corrected_as_the_slow_version_says(proximal: str) -> None:
    settings = CorrectionSettings(
        proximal=proximal, weight="token", veto_threshold=0.4, normalise_weights=True, recentre=True
    )
    batch = with_dense(random_batch())
    done = correct_batch(batch, settings)
    slow = []
    for t, mask in zip(batch, batch.loss_mask, strict=True):
        dense = t.old_logprobs
        if proximal == "stage":
            dense = np.where(np.isnan(t.stage_logprobs), dense, t.stage_logprobs)
        slow.append(slow_correction((dense - t.sampler_logprobs).tolist(), mask.tolist(), settings))
    assert done.weight_scale == pytest.approx(slow_scale(slow, settings), rel=1e-5)
    rejected = [c.rejected for c in slow]
    assert 0 < sum(rejected) < len(batch)
    for group in {t.group_id for t in batch}:
        kept = [
            i
            for i, t in enumerate(batch)
            if t.group_id == group and not rejected[i] and batch.loss_mask[i].any()
        ]
        assert sum(float(done.advantages[i][0]) for i in kept) == pytest.approx(0, abs=1e-6)
        assert [done.advantages[i][0] - done.advantages[kept[0]][0] for i in kept] == pytest.approx(
            [batch.advantages[i][0] - batch.advantages[kept[0]][0] for i in kept], abs=1e-6
        )
    for i, out in enumerate(rejected):
        if out:
            assert np.array_equal(done.advantages[i], batch.advantages[i])


def test_a_batch_that_needs_no_correction_is_left_alone() -> None:
    batch = random_batch()
    assert correct_batch(batch, CorrectionSettings(preset="sparse_rl")) is batch
    with pytest.raises(ValueError, match="0/0 has no old_logprobs"):
        correct_batch(batch, CorrectionSettings(preset="sparse_rl_released"))
    assert (
        len(correct_batch(TrajectoryBatch((), (), ()), CorrectionSettings(preset="sparse_rl_released"))) == 0
    )


def test_tokens_of_earlier_stages_need_their_log_probs() -> None:
    staged = CorrectionSettings(preset="sparse_copris_staged")
    batch = random_batch(groups=1, samples=2)
    first, second = batch.trajectories
    versions = np.full(second.length, 3, np.int32)
    check_stages(batch, staged)  # all of one stage
    mixed = batch.with_trajectories((first, second.with_columns(policy_versions=versions)))
    check_stages(mixed, CorrectionSettings(preset="sparse_copris"))
    with pytest.raises(
        ValueError, match="0/0 has tokens of a policy version before 3 without stage_logprobs"
    ):
        check_stages(mixed, staged)
    known = first.with_columns(stage_logprobs=first.sampler_logprobs)
    check_stages(mixed.with_trajectories((known, mixed.trajectories[1])), staged)
