"""The policy loss against hand-computed numbers and an independent slow version."""

import itertools
import math

import pytest
import torch

from megatron_sparse_rl.algorithms.settings import AlgorithmSettings
from megatron_sparse_rl.kernels.loss_columns import LossColumns
from megatron_sparse_rl.kernels.loss_stats import merge_stats, reduce_stats
from megatron_sparse_rl.kernels.policy_loss import PolicyLoss, kl_estimate, policy_loss
from tests.unit.policy_loss_cases import as_columns, draw_batch, gradient
from tests.unit.policy_loss_oracle import loop_loss

AGGREGATIONS = ("token_mean", "sequence_mean", "fixed_length")
# cispo takes no dual clip: the settings refuse it.
LOSSES = (("ppo", 0.0), ("ppo", 1.6), ("gspo", 0.0), ("gspo", 1.3), ("cispo", 0.0))


def one_sequence(
    ratios: list[float], advantage: float, settings: AlgorithmSettings, pi: float = -1.0
) -> tuple[PolicyLoss, torch.Tensor]:
    """(result, d loss / d pi) of one unmasked sequence: ratios pi/p as given, every log-prob `pi`."""
    logprobs = torch.full((len(ratios),), pi, dtype=torch.float64, requires_grad=True)
    columns = LossColumns(
        advantages=torch.full((len(ratios),), advantage, dtype=torch.float64),
        mask=torch.ones(len(ratios), dtype=torch.bool),
        sequence_index=torch.zeros(len(ratios), dtype=torch.int64),
        sampler_logprobs=logprobs.detach(),
        sequences=1,
        old_logprobs=logprobs.detach() - torch.tensor(ratios, dtype=torch.float64).log(),
    )
    result = policy_loss(logprobs, torch.zeros_like(logprobs), columns, settings, 8)
    return result, torch.autograd.grad(result.loss, logprobs)[0]


@pytest.mark.parametrize(
    ("ratio", "advantage", "dual_clip", "loss", "slope"),
    [
        (1.1, 2.0, 0.0, -2.2, -2.2),  # inside the clip
        (1.5, 2.0, 0.0, -2.56, 0.0),  # A > 0: 1.28 * 2
        (0.5, 2.0, 0.0, -1.0, -1.0),  # A > 0 has no lower clip
        (0.5, -2.0, 0.0, 1.6, 0.0),  # A < 0: 0.8 * 2
        (5.0, -2.0, 0.0, 10.0, 10.0),  # A < 0 has no upper clip ...
        (5.0, -2.0, 3.0, 6.0, 0.0),  # ... but the dual one
        (2.5, -2.0, 3.0, 5.0, 5.0),
    ],
)
def test_ppo_by_hand(ratio: float, advantage: float, dual_clip: float, loss: float, slope: float) -> None:
    settings = AlgorithmSettings(clip_low=0.2, clip_high=0.28, dual_clip=dual_clip)
    result, grad = one_sequence([ratio], advantage, settings)
    assert result.loss.item() == pytest.approx(loss, abs=1e-12)
    assert grad.item() == pytest.approx(slope, abs=1e-12)


def test_gspo_by_hand() -> None:
    # Token ratios 2 and 1/2 are far outside the clip, their geometric mean 1 is not.
    result, grad = one_sequence([2.0, 0.5], 3.0, AlgorithmSettings(loss="gspo"))
    assert result.loss.item() == pytest.approx(-6.0, abs=1e-12)
    assert grad.tolist() == pytest.approx([-3.0, -3.0], abs=1e-12)
    # Ratios 4 and 1: sequence ratio 2, clipped at 1.2 for both tokens.
    result, grad = one_sequence([4.0, 1.0], 3.0, AlgorithmSettings(loss="gspo"))
    assert result.loss.item() == pytest.approx(-2 * 1.2 * 3, abs=1e-12)
    assert grad.tolist() == [0.0, 0.0]


def test_gspo_gradient_is_that_of_the_sequence_ratio() -> None:
    # For one advantage per sequence GSPO-token has the gradient of s A with s = exp(mean(pi - p)).
    ratios = torch.tensor([1.2, 0.9, 1.05], dtype=torch.float64)
    _, grad = one_sequence(ratios.tolist(), -1.5, AlgorithmSettings(loss="gspo", aggregation="sequence_mean"))
    pi = torch.full((3,), -1.0, dtype=torch.float64, requires_grad=True)
    direct = -(pi - (pi.detach() - ratios.log())).mean().exp() * -1.5
    torch.testing.assert_close(grad, torch.autograd.grad(direct, pi)[0], rtol=1e-12, atol=0)


@pytest.mark.parametrize(("ratio", "weight"), [(1.1, 1.1), (2.0, 1.28), (0.5, 0.8)])
@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_cispo_by_hand(ratio: float, weight: float, advantage: float) -> None:
    settings = AlgorithmSettings(loss="cispo", clip_low=0.2, clip_high=0.28)
    result, grad = one_sequence([ratio], advantage, settings, pi=-1.5)
    assert result.loss.item() == pytest.approx(weight * advantage * 1.5, abs=1e-12)
    assert grad.item() == pytest.approx(-weight * advantage, abs=1e-12)  # clipped tokens still learn


@pytest.mark.parametrize(
    ("estimator", "value", "slope"),
    [("k1", math.log(2), 1.0), ("k2", math.log(2) ** 2 / 2, math.log(2)), ("k3", math.log(2) - 0.5, 0.5)],
)
def test_kl_estimators_by_hand(estimator: str, value: float, slope: float) -> None:
    # pi = 1/2 where q = 1/4.
    pi = torch.tensor([math.log(0.5)], dtype=torch.float64, requires_grad=True)
    kl = kl_estimate(pi, torch.tensor([math.log(0.25)], dtype=torch.float64), estimator)
    assert kl.item() == pytest.approx(value, abs=1e-12)
    assert torch.autograd.grad(kl, pi)[0].item() == pytest.approx(slope, abs=1e-12)


def test_aggregations_by_hand() -> None:
    """Lengths 3 and 1 and one fully masked, A = 1 and ratio 1: each unmasked token's loss is -1."""
    expected = {"token_mean": (-4.0, 4), "sequence_mean": (-2.0, 2), "fixed_length": (-4 / 8, 3)}
    n = torch.tensor([3, 1, 2])
    columns = LossColumns(
        advantages=torch.ones(6, dtype=torch.float64),
        mask=torch.tensor([True] * 4 + [False] * 2),
        sequence_index=torch.arange(3).repeat_interleave(n),
        sampler_logprobs=torch.zeros(6),
        sequences=3,
    )
    for aggregation, (loss, count) in expected.items():
        zeros = torch.zeros(6, dtype=torch.float64)
        result = policy_loss(zeros, zeros, columns, AlgorithmSettings(aggregation=aggregation), 8)
        assert (result.loss.item(), result.count.item()) == (loss, count), aggregation
        assert not result.count.is_floating_point()


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize(("loss", "dual_clip"), LOSSES)
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_equals_the_slow_version(loss: str, dual_clip: float, aggregation: str, estimator: str) -> None:
    for seed, old, ref in itertools.product(range(4), (True, False), (True, False)):
        settings = AlgorithmSettings(
            loss=loss,
            dual_clip=dual_clip,
            aggregation=aggregation,
            kl_estimator=estimator,
            kl_coefficient=0.3 if ref else 0.0,
            entropy_coefficient=0.1 * (seed % 2),
            clip_low=0.15,
            clip_high=0.25,
        )
        batch = draw_batch(seed, [5, 1, 8, 3, 1, 6], old=old, ref=ref)
        slow, count, stats = loop_loss(batch, settings, 11)
        logprobs, entropy, columns = as_columns(batch)
        fast = policy_loss(logprobs, entropy, columns, settings, 11)
        assert fast.loss.item() == pytest.approx(slow.item(), abs=1e-10)
        assert fast.count.item() == count
        slow_inputs = [x for s in batch for x in s.pi] + [x for s in batch for x in s.entropy]
        slow_grad = torch.stack(gradient(slow, *slow_inputs))
        fast_grad = torch.cat(gradient(fast.loss, logprobs, entropy))
        torch.testing.assert_close(fast_grad, slow_grad, rtol=0, atol=1e-10)
        assert reduce_stats([fast.stats]) == pytest.approx(stats, abs=1e-10)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_gradcheck_where_smooth(aggregation: str, estimator: str) -> None:
    """Ratios well inside a wide clip; not gspo and cispo, whose stop-gradients no finite difference sees."""
    settings = AlgorithmSettings(
        clip_low=0.9,
        clip_high=9.0,
        aggregation=aggregation,
        kl_estimator=estimator,
        kl_coefficient=0.5,
        entropy_coefficient=0.2,
    )
    logprobs, entropy, columns = as_columns(draw_batch(3, [4, 1, 3], old=True, ref=True, spread=0.2))
    assert torch.autograd.gradcheck(
        lambda x, h: policy_loss(x, h, columns, settings, 7).loss, (logprobs, entropy)
    )


def test_float32_stays_finite_when_policies_are_far_apart() -> None:
    """log-ratios of +-200 overflow float32's exp; the bound keeps value and gradient finite."""
    for loss, estimator in itertools.product(("ppo", "gspo", "cispo"), ("k1", "k2", "k3")):
        settings = AlgorithmSettings(loss=loss, kl_estimator=estimator, kl_coefficient=0.1)
        for advantage, far in itertools.product((1.0, -1.0), (200.0, -200.0)):
            logprobs = torch.tensor([-201.0, -1.0], requires_grad=True)
            columns = LossColumns(
                advantages=torch.full((2,), advantage),
                mask=torch.ones(2, dtype=torch.bool),
                sequence_index=torch.tensor([0, 1]),
                sampler_logprobs=logprobs.detach() + far,
                sequences=2,
                old_logprobs=logprobs.detach() + far,
                ref_logprobs=logprobs.detach() + far,
            )
            result = policy_loss(logprobs, torch.zeros(2), columns, settings, 4)
            assert math.isfinite(result.loss.item())
            assert torch.autograd.grad(result.loss, logprobs)[0].isfinite().all()
            assert all(math.isfinite(x) for x in reduce_stats([result.stats]).values())


def test_without_old_logprobs_it_is_the_policy_gradient() -> None:
    # One optimizer step: the gradient of every surrogate is -A, whatever the sampler reported.
    batch = draw_batch(1, [4, 2], old=False, ref=False, keep=1.0)
    for loss in ("ppo", "gspo", "cispo"):
        logprobs, entropy, columns = as_columns(batch)
        result = policy_loss(logprobs, entropy, columns, AlgorithmSettings(loss=loss), 8)
        torch.testing.assert_close(torch.autograd.grad(result.loss, logprobs)[0], -columns.advantages)
        stats = reduce_stats([result.stats])
        assert stats["approx_kl_old"] == 0
        assert stats["max/ratio"] == stats["min/ratio"] == 1
        assert stats["logprob_diff_mean_abs"] > 0.1


@pytest.mark.parametrize("loss", ["ppo", "gspo", "cispo"])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_nothing_is_read_on_the_host(loss: str, aggregation: str) -> None:
    """Meta tensors have no values: `.item()`, a branch on a tensor or an index by mask would raise."""
    column = torch.zeros(6, device="meta", requires_grad=True)
    columns = LossColumns(
        advantages=column.detach(),
        mask=torch.ones(6, dtype=torch.bool, device="meta"),
        sequence_index=torch.zeros(6, dtype=torch.int64, device="meta"),
        sampler_logprobs=column.detach(),
        sequences=2,
        old_logprobs=column.detach(),
        ref_logprobs=column.detach(),
    )
    settings = AlgorithmSettings(loss=loss, aggregation=aggregation, kl_coefficient=0.1)
    result = policy_loss(column, column, columns, settings, 8)
    assert torch.autograd.grad(result.loss, column)[0].is_meta
    assert all(entry.is_meta and entry.shape == (2,) for entry in merge_stats([result.stats] * 2).values())


def test_wrong_inputs_are_refused() -> None:
    logprobs, entropy, columns = as_columns(draw_batch(0, [3], old=False, ref=False))
    with pytest.raises(ValueError, match=r"kl_coefficient=0\.1 needs ref_logprobs"):
        policy_loss(logprobs, entropy, columns, AlgorithmSettings(kl_coefficient=0.1), 8)
    with pytest.raises(ValueError, match="bfloat16"):
        policy_loss(logprobs.bfloat16(), entropy, columns, AlgorithmSettings(), 8)
    with pytest.raises(ValueError, match=r"\[2\]"):
        policy_loss(logprobs[:2], entropy, columns, AlgorithmSettings(), 8)
    with pytest.raises(ValueError, match="sampler_logprobs is"):
        LossColumns(columns.advantages, columns.mask, columns.sequence_index, torch.zeros(2), 1)
    with pytest.raises(ValueError, match=r"mask is torch\.int64"):
        LossColumns(columns.advantages, columns.mask.long(), columns.sequence_index, torch.zeros(3), 1)
