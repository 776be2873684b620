"""The Megatron learner against Transformers: log-probs, gradients and statistics under every parallel
layout."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_sparse_rl.algorithms.batch_correction import correct_batch
from megatron_sparse_rl.config import load_config
from megatron_sparse_rl.kernels.loss_stats import reduce_stats
from megatron_sparse_rl.kernels.policy_loss import policy_loss
from megatron_sparse_rl.learner.packing import loss_columns
from tests.batches import random_batch
from tests.processes import run_ranks

SCRIPT = Path(__file__).with_name("learner_ranks.py")
BASE = ["learner.precision=fp32", "rollout.max_response_tokens=16", "rollout.temperature=0.8"]
FLOAT32_RELATIVE = 1.3e-6  # what torch.testing allows float32 results beside the absolute tolerance
MODELS = [
    ("llama", True),
    ("llama", False),
    ("qwen2", True),
    ("qwen2", False),
    ("qwen3", True),
    ("qwen3", False),
]


def expected(folder: str, overrides: list[str], beginning: int = 0) -> dict:
    """Log-probs, mean gradients and statistics from a Transformers model, one unpacked sequence at a time,
    in float64."""
    config = load_config(None, overrides)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    batch = random_batch(beginning=beginning)
    logprobs, entropies = [], []
    for trajectory in batch:
        ids = torch.tensor([[*trajectory.prompt_ids, *trajectory.response_ids]])
        logits = model(ids).logits[0, len(trajectory.prompt_ids) - 1 : -1] / config.rollout.temperature
        log_p = torch.log_softmax(logits, -1)
        logprobs.append(log_p.gather(1, torch.from_numpy(trajectory.response_ids)[:, None])[:, 0])
        entropies.append(-(log_p.exp() * log_p).sum(-1))
    old = [column.detach().float().numpy() for column in logprobs]
    batch = batch.with_trajectories(
        tuple(t.with_columns(old_logprobs=column) for t, column in zip(batch, old, strict=True))
    )
    columns = loss_columns(correct_batch(batch, config.algorithm.correction), tuple(range(len(batch))))
    changes = {"old_logprobs": None}
    if config.algorithm.kl_coefficient > 0:
        changes["ref_logprobs"] = torch.cat(logprobs).detach()
    columns = type(columns)(**{**vars(columns), **changes})
    result = policy_loss(torch.cat(logprobs), torch.cat(entropies), columns, config.algorithm, 16)
    (result.loss / result.count).backward()
    return {
        "logprobs": [column.detach() for column in logprobs],
        "gradients": {name: p.grad for name, p in model.named_parameters()},
        "stats": reduce_stats([result.stats]),
        "count": int(result.count),
    }


def run(cases: list[dict], world: int, folder: Path, timeout: float) -> dict[str, dict]:
    listing = folder / "cases.json"
    listing.write_text(json.dumps(cases))
    run_ranks(SCRIPT, world, timeout=timeout, args=[str(listing), str(folder)])
    return {case["name"]: torch.load(folder / f"{case['name']}.pt", weights_only=True) for case in cases}


def check(found: dict, wanted: dict, tolerance: float = 1e-5) -> None:
    for ours, theirs in zip(found["logprobs"], wanted["logprobs"], strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=FLOAT32_RELATIVE, atol=tolerance)
    assert found["count"] == wanted["count"]
    stats = reduce_stats([{name: torch.tensor(v, dtype=torch.float64) for name, v in found["stats"].items()}])
    for name, value in wanted["stats"].items():
        assert stats[name] == pytest.approx(value, abs=tolerance, rel=1e-4), name
    for name, gradient in wanted["gradients"].items():
        torch.testing.assert_close(
            found["gradients"][name].double(), gradient, rtol=FLOAT32_RELATIVE, atol=tolerance, msg=name
        )


def test_one_process_equals_transformers_for_every_family(checkpoint, tmp_path):
    """Also: packing with and without shared prompts, a beginning that all prompts share, many micro-batches,
    recomputation, all aggregations, KL and entropy."""
    overrides = {
        "plain": BASE,
        "separate": [*BASE, "learner.share_prompts=never"],
        "many": [*BASE, "learner.tokens_per_micro_batch=24", "learner.recompute=full"],
        "one_each": [*BASE, "learner.tokens_per_micro_batch=1", "learner.logprob_chunk_tokens=3"],
        "sequence": [*BASE, "algorithm.aggregation=sequence_mean", "learner.tokens_per_micro_batch=24"],
        "fixed": [*BASE, "algorithm.aggregation=fixed_length", "algorithm.entropy_coefficient=0.1"],
        "kl": [*BASE, "algorithm.kl_coefficient=0.3", "learner.tokens_per_micro_batch=40"],
    }
    cases = [
        {"name": f"{family}-{tied}", "folder": checkpoint(family, tied=tied), "overrides": BASE}
        for family, tied in MODELS
    ]
    cases += [
        {"name": name, "folder": checkpoint("llama", tied=True), "overrides": o}
        for name, o in overrides.items()
    ]
    cases += [
        {
            "name": f"beginning-{name}",
            "folder": checkpoint("qwen3", tied=True),
            "beginning": 9,
            "overrides": o,
        }
        for name, o in (("plain", BASE), ("many", overrides["many"]))
    ]
    found = run(cases, 1, tmp_path, timeout=240)
    for case in cases:
        check(found[case["name"]], expected(case["folder"], case["overrides"], case.get("beginning", 0)))
    assert found["many"]["micro_batches"] > 1
    assert found["one_each"]["micro_batches"] == 12


LAYOUTS = {
    "tp2": ["parallel.tensor=2"],
    "tp2_sp": ["parallel.tensor=2", "parallel.sequence=true"],
    "tp2_sp_recompute": ["parallel.tensor=2", "parallel.sequence=true", "learner.recompute=full"],
    "pp2": ["parallel.pipeline=2", "learner.tokens_per_micro_batch=24"],
    "dp2": ["learner.tokens_per_micro_batch=24"],
}


def test_two_processes_equal_transformers_under_every_layout(checkpoint, tmp_path):
    models = [("llama", True), ("qwen2", False), ("qwen3", True)]
    cases = [
        {"name": f"{layout}-{family}", "folder": checkpoint(family, tied=tied), "overrides": [*BASE, *extra]}
        for layout, extra in LAYOUTS.items()
        for family, tied in models
    ]
    found = run(cases, 2, tmp_path, timeout=300)
    for family, tied in models:
        wanted = expected(checkpoint(family, tied=tied), BASE)
        for layout in LAYOUTS:
            check(found[f"{layout}-{family}"], wanted)


def correction(*items: str) -> list[str]:
    return [f"algorithm.correction.{item}" for item in items]


# Bounds that cut some of the ratios of `random_batch` under this checkpoint, which are small: 0.0001 to 2.
CORRECTIONS = {
    "veto": [*correction("preset=sparse_rl", "veto_threshold=0.003"), "algorithm.aggregation=sequence_mean"],
    "released": [
        *correction("preset=sparse_rl_released", "veto_threshold=0.0005", "token_mask_low=0.01"),
        "algorithm.kl_coefficient=0.3",
    ],
    "recentre": [
        *correction("veto_threshold=0.003", "recentre=true", "denominator=accepted"),
        "algorithm.aggregation=fixed_length",
    ],
    "sequence": [
        *correction("weight=geometric", "weight_bound=clip", "weight_low=0.03", "weight_high=0.1"),
        *correction("normalise_weights=true", "reject=geometric", "reject_low=0.015"),
    ],
    "copris": [*correction("preset=copris"), "algorithm.clip_high=0.5", "algorithm.dual_clip=3"],
}
SPLITS = {
    "whole": [],
    "micro_batches": ["learner.tokens_per_micro_batch=24", "learner.logprob_chunk_tokens=5"],
    "one_each": ["learner.tokens_per_micro_batch=1", "learner.logprob_chunk_tokens=3"],
}


def test_corrections_do_not_depend_on_the_split_or_the_layout(checkpoint, tmp_path):
    """Loss, gradient and every statistic, also against a Transformers model with the whole batch in one."""
    folder = checkpoint("llama", tied=True)

    def cases(layouts: dict[str, list[str]]) -> list[dict]:
        return [
            {"name": f"{layout}-{name}", "folder": folder, "overrides": [*BASE, *o, *extra]}
            for layout, extra in layouts.items()
            for name, o in CORRECTIONS.items()
        ]

    two = {name: LAYOUTS[name] for name in ("tp2", "pp2", "dp2")}
    found = run(cases(SPLITS), 1, tmp_path, timeout=200) | run(cases(two), 2, tmp_path, timeout=300)
    for name, overrides in CORRECTIONS.items():
        wanted = expected(folder, [*BASE, *overrides])
        accepted = wanted["stats"]["correction/accepted_fraction"]
        assert accepted == 1 if name == "copris" else 0 < accepted < 1
        for layout in (*SPLITS, *two):
            check(found[f"{layout}-{name}"], wanted)


def test_four_processes_train_like_one(checkpoint, tmp_path):
    """Several optimizer steps under TP 2 x PP 2 and DP 2 x PP 2 give the losses and gradient norms of one
    process."""
    folder = checkpoint("llama", tied=True)
    steps = [*BASE, "optimizer.lr=3e-3", "learner.tokens_per_micro_batch=24", "learner.steps_per_rollout=1"]
    alone = run(
        [{"name": "alone", "folder": folder, "overrides": steps, "updates": 4}], 1, tmp_path, timeout=120
    )
    layouts = {
        "tp2_pp2": ["parallel.tensor=2", "parallel.pipeline=2", "parallel.sequence=true"],
        "dp2_pp2": ["parallel.pipeline=2"],
        "dp2_tp2": ["parallel.tensor=2"],
    }
    cases = [
        {"name": name, "folder": folder, "overrides": [*steps, *extra], "updates": 4}
        for name, extra in layouts.items()
    ]
    found = run(cases, 4, tmp_path, timeout=300)
    for name in layouts:
        assert found[name]["losses"] == pytest.approx(alone["alone"]["losses"], abs=2e-5)
        assert found[name]["norms"] == pytest.approx(alone["alone"]["norms"], rel=1e-3)
    assert alone["alone"]["losses"][0] != alone["alone"]["losses"][3]
