"""How the settings of the compressed KV cache reach the engine, and each request."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from megatron_sparse_rl.config import Config, from_tree
from megatron_sparse_rl.rollout.buffer import TrajectoryBuffer
from megatron_sparse_rl.rollout.collector import Collector
from megatron_sparse_rl.rollout.engine_arguments import (
    cache_tokens_per_request,
    check_engine,
    engine_arguments,
)
from megatron_sparse_rl.rollout.open_group import OpenGroup, SamplingRule
from megatron_sparse_rl.rollout.sampling import SampledTokens
from megatron_sparse_rl.rollout.settings import SparseKVSettings
from megatron_sparse_rl.rollout.sparse_kv.lengths import Lengths
from megatron_sparse_rl.rollout.sparse_kv.report import CacheReport, cache_usage
from megatron_sparse_rl.rollout.sparse_kv.requests import protected_tokens, protection
from megatron_sparse_rl.settings import SettingError
from megatron_sparse_rl.trajectory import Prompt
from tests.simulated_engine import Prompts, SimulatedEngine, scored
from tests.unit.test_rollout_engine_arguments import MODEL

RULE = {"policy": "snapkv", "budget": 100, "buffer": 20, "protect_prompt": 50, "reserve": False}


def config(sparse: dict[str, Any], *, evaluation: dict[str, Any] | None = None, **rollout: Any) -> Config:
    return from_tree({"rollout": {"sparse_kv": sparse, **rollout}, "evaluation": evaluation or {}})


def test_engine_gets_the_settings_as_plain_data() -> None:
    arguments = engine_arguments(config(RULE), "m", cuda=False)
    assert arguments["enable_prefix_caching"] is True
    assert arguments["worker_cls"].endswith("sparse_kv.cpu_worker.SparseCPUWorker")
    assert arguments["scheduler_cls"].endswith("sparse_kv.scheduler.SparseScheduler")
    assert SparseKVSettings(**arguments["additional_config"]["sparse_kv"]) == SparseKVSettings(**RULE)


def test_dense_engines_are_left_alone() -> None:
    arguments = engine_arguments(config({"budget": 100}), "m", cuda=False)
    assert arguments["enable_prefix_caching"] is True
    assert not {"scheduler_cls", "additional_config"} & arguments.keys()


@pytest.mark.parametrize(
    ("sparse", "rollout", "tokens"),
    [
        (RULE, {}, 192),  # 50 + 100 + 20 in blocks of 32
        (RULE, {"max_prompt_tokens": 10}, 160),  # only 10 tokens of a prompt there are to protect
        (RULE, {"max_prompt_tokens": 30, "max_response_tokens": 50}, 96),  # never as long as the bound
        ({}, {}, 2048),
    ],
)
def test_cache_of_the_longest_request(sparse: dict, rollout: dict, tokens: int) -> None:
    assert cache_tokens_per_request(config(sparse, **rollout)) == tokens


def test_memory_is_checked_for_what_will_run() -> None:
    """SmolLM2 in bf16 takes 45 KiB a token: 7 blocks hold a compacted request, 65 a whole one."""
    pool = 7 * 32 * 2 * 30 * 3 * 64 * 2 / 2**30
    sparse_only = config(RULE, evaluation={"sparse_kv": True}, kv_cache_gib=pool)
    check_engine(sparse_only, MODEL, world_size=1, cuda=False)
    check_engine(config(RULE, evaluation={"problems": 0}, kv_cache_gib=pool), MODEL, world_size=1, cuda=False)
    with pytest.raises(SettingError, match="holds no full sequence of 2048 tokens"):
        check_engine(config(RULE, kv_cache_gib=pool), MODEL, world_size=1, cuda=False)
    too_small = config(RULE, evaluation={"sparse_kv": True}, kv_cache_gib=pool * 0.99)
    with pytest.raises(SettingError, match="holds no full sequence of 192 tokens"):
        check_engine(too_small, MODEL, world_size=1, cuda=False)


def test_a_gpu_gets_its_own_worker() -> None:
    arguments = engine_arguments(config(RULE), "m", cuda=True)
    assert arguments["worker_cls"].endswith("sparse_kv.cuda_worker.SparseCUDAWorker")
    assert arguments["scheduler_cls"].endswith("sparse_kv.scheduler.AsyncSparseScheduler")
    assert arguments["enforce_eager"] is False
    assert "worker_cls" not in engine_arguments(config({}), "m", cuda=True)
    check_engine(config(RULE), MODEL, world_size=1, cuda=True)


def test_protection_travels_with_the_request() -> None:
    class Parameters:
        extra_args: dict[str, int] | None = None

    parameters = Parameters()
    assert protected_tokens(parameters, 30, 50) == 30
    assert protected_tokens(parameters, 70, 50) == 50
    assert protected_tokens(None, 70, 50) == 50
    parameters.extra_args = protection(7)
    assert protected_tokens(parameters, 70, 50) == 7


def test_a_resumed_answer_protects_its_prompt_alone() -> None:
    group = OpenGroup.fresh(Prompt(3, np.arange(10), "", ""), 1)
    rule = SamplingRule("train", 0, 1.0, 64, (1,))
    assert group.request(0, rule).prompt_tokens == 10
    sampled = SampledTokens("3/0", np.arange(5), np.zeros(5, np.float32), np.zeros(5, np.int32), "partial")
    resumed = group.extended(0, sampled).request(0, rule)
    assert (len(resumed.token_ids), resumed.prompt_tokens, resumed.dense) == (15, 10, False)
    assert group.request(0, SamplingRule("evaluate", 0, 1.0, 64, (1,), dense=True)).dense


@pytest.fixture(scope="module")
def _single_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class ReportingEngine(SimulatedEngine):
    """Reports every request as one of a hundred tokens."""

    def take_cache_report(self) -> CacheReport:
        asked, self.asked = self.asked, []
        lengths = {"logical": 100, "longest": 100, "protected": 0, "shared": 0}
        rule = {"rule": Lengths(100, 20), "block_size": 32, "reserve": False}
        usages = [cache_usage(r.request_id, **lengths, **rule) for r in asked]
        return CacheReport(tuple(usages), 1024, len(usages), 0.5)


@pytest.mark.usefixtures("_single_process")
@pytest.mark.parametrize("sparse_evaluation", [False, True])
def test_evaluations_are_dense_unless_asked_for(sparse_evaluation: bool) -> None:
    settings = config(
        RULE, evaluation={"sparse_kv": sparse_evaluation}, groups_per_step=2, samples_per_group=3
    )
    engine = SimulatedEngine(lambda prompt, sample: 4)
    engine.take_cache_report = lambda: CacheReport((), 1, 0, 0.0)
    collector = Collector(settings, engine, Prompts(), TrajectoryBuffer(), scored)
    collector.evaluate(Prompts().take(2), 2, 1.0)
    assert [request.dense for request in engine.asked] == [not sparse_evaluation] * 4
    engine.asked.clear()
    collector.collect(1)
    assert [request.dense for request in engine.asked] == [False] * 6


@pytest.mark.usefixtures("_single_process")
def test_a_step_reports_its_own_requests() -> None:
    settings = config(RULE, groups_per_step=2, samples_per_group=3)
    collector = Collector(
        settings, ReportingEngine(lambda prompt, sample: 4), Prompts(), TrajectoryBuffer(), scored
    )
    collector.evaluate(Prompts().take(2), 2, 1.0)
    rollout = collector.collect(1)
    assert rollout.cache is not None
    assert len(rollout.cache.usages) == 6
    dense = Collector(
        config({}), SimulatedEngine(lambda prompt, sample: 4), Prompts(), TrajectoryBuffer(), scored
    )
    assert dense.collect(1).cache is None
