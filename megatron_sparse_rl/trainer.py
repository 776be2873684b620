"""The training loop: roll out, score, learn, reshard the weights into the engine.

In: a checked configuration and this process's context; every rank runs the same loop. Out: checkpoints,
metrics and a summary below `output_dir`.
"""

import logging
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from transformers import AutoTokenizer

from megatron_sparse_rl.algorithms.filters import has_signal
from megatron_sparse_rl.algorithms.prepare import prepare
from megatron_sparse_rl.colocation import Colocation
from megatron_sparse_rl.config import Config, to_yaml
from megatron_sparse_rl.data.sources import build_sources
from megatron_sparse_rl.launch import ProcessContext
from megatron_sparse_rl.learner.checkpoints import Checkpoints
from megatron_sparse_rl.learner.learner import Learner, UpdateResult
from megatron_sparse_rl.observability.cache_records import CacheRecords
from megatron_sparse_rl.observability.ledger import TimeLedger, memory_metrics
from megatron_sparse_rl.observability.metrics import (
    PASS_AT_1,
    evaluation_metrics,
    policy_metrics,
    rollout_metrics,
    staleness_metrics,
    throughput_metrics,
)
from megatron_sparse_rl.observability.observer import Observer, sample_texts
from megatron_sparse_rl.observability.progress import RolloutProgress
from megatron_sparse_rl.observability.report import draw_reward_curve
from megatron_sparse_rl.observability.run_record import write_summary
from megatron_sparse_rl.observability.timeline import Timeline
from megatron_sparse_rl.rewards.pool import RewardPool
from megatron_sparse_rl.rollout.buffer import TrajectoryBuffer
from megatron_sparse_rl.rollout.collector import Collector, Rollout
from megatron_sparse_rl.rollout.engine import Engine
from megatron_sparse_rl.rollout.sparse_kv.report import CacheReport
from megatron_sparse_rl.settings import SettingError
from megatron_sparse_rl.weights.architecture import read_architecture
from megatron_sparse_rl.weights.default_model import resolve_model
from megatron_sparse_rl.weights.layouts import check_layouts

logger = logging.getLogger(__name__)


def train(config: Config, context: ProcessContext) -> None:
    """Train from the start, or from the newest intact checkpoint, to the last step."""
    with Trainer(config, context) as trainer:
        trainer.run()


def evaluate(config: Config, context: ProcessContext) -> None:
    """Evaluate the newest checkpoint of `output_dir`, or the model itself where there is none."""
    with Trainer(config, context) as trainer:
        trainer.evaluate_policy()


class Trainer:
    """One rank's parts of a run, and the loop over them."""

    def __init__(self, config: Config, context: ProcessContext) -> None:
        self.config = config
        self.context = context
        self.started = time.time()
        self.ledger = TimeLedger()
        self.output = Path(config.output_dir)
        self.step = 0
        self.scoring: dict[str, int] = {}
        self.saved_step = 0
        self.record: dict[str, Any] = {
            "seconds": 0.0,
            "evaluated_step": None,
            "pass_at_1_before": None,
            "pass_at_1_last": None,
            "entropy_last": None,
        }
        folder = resolve_model(config.model)
        arch = read_architecture(folder)
        check_layouts(arch, config.parallel, config.rollout.tensor)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.prompts, self.held_out = build_sources(
            config.data, self.tokenizer, max_prompt_tokens=config.rollout.max_prompt_tokens, seed=config.seed
        )
        self.rewards = RewardPool(config.reward)
        self.buffer = TrajectoryBuffer()
        self.learner = Learner(config, arch, folder, context.device)
        self.checkpoints = Checkpoints(config.checkpoint, self.output, self.learner)
        collected = self._resume()
        self.learner.offload_optimizer()  # the engine takes its share of the memory when it is built
        self.engine = Engine(config, str(folder), device=context.device.type)
        self.colocation = Colocation(self.learner, self.engine, verify=config.rollout.verify_weights)
        self.progress = RolloutProgress(enabled=config.observability.progress and context.rank == 0)
        self.collector = Collector(
            config,
            self.engine,
            self.prompts,
            self.buffer,
            lambda groups: self.rewards.score(groups, self.decode),
            has_signal=has_signal if config.algorithm.dynamic_sampling else None,
            progress=self.progress,
        )
        if collected is not None:
            self.collector.load_state_dict(collected)
        self.observer = Observer(
            config.observability, self.output, rank=context.rank, total_steps=config.steps
        )

        self.timeline = Timeline(self.output, config.observability.timeline_steps)
        self.cache_records = CacheRecords(self.output, config.observability.retained_steps)

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(self, *error: object) -> None:
        self.observer.close()
        self.rewards.close()

    def run(self) -> None:
        """The loop. Before it the weights go to the engine, so that a resumed run never samples from stale
        ones."""
        self._begin()
        self._evaluate_before()
        self.ledger.begin_step()
        for step in self.remaining_steps():
            rollout = self._roll_out(step)
            batch = prepare(rollout.groups, self.config.algorithm, self.config.rollout.max_response_tokens)
            with self.ledger.phase("learn"), self.colocation.learning():
                if self.config.algorithm.correction.proximal == "stage":
                    self.buffer.record_stage(step - 1, self.learner.logprobs)
                result = self.learner.update(batch)
            with self.ledger.phase("sync"):
                self.colocation.publish(step)
            self.step = step
            self._observe(rollout, result)
            self._evaluate_and_save(last=step == self.config.steps or self.collector.exhausted)
        self._finish()

    def remaining_steps(self) -> Iterator[int]:
        """Steps are counted from 1; step k trains on what policy version k - 1 sampled. They end early when
        the data does."""
        for step in range(self.step + 1, self.config.steps + 1):
            if self.collector.exhausted:
                logger.warning(
                    "the training problems are exhausted: the run ends after %d of %d steps",
                    self.step,
                    self.config.steps,
                )
                return
            yield step

    def _roll_out(self, step: int) -> Rollout:
        settings = self.config.rollout
        answers = settings.groups_per_step * settings.samples_per_group // self.engine.count
        before = self.rewards.counters
        with self.ledger.phase("rollout"), self.progress.showing(f"step {step}: sampling", answers):
            rollout = self.collector.collect(step)
        self.scoring = _summed({name: n - before[name] for name, n in self.rewards.counters.items()})
        return rollout

    def decode(self, token_ids: Any) -> str:
        """The answer as the verifiers and people read it."""
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)

    # ---- evaluation ----

    def evaluate_policy(self) -> dict[str, float]:
        """Publish the learner's weights and evaluate them on the held-out problems; the metrics are
        printed."""
        self.colocation.publish(self.step)
        return self._evaluate()

    def _evaluate(self) -> dict[str, float]:
        settings = self.config.evaluation
        problems = self.held_out[: settings.problems]
        if not problems:
            return {}
        answers = len(problems) * settings.samples // self.engine.count
        with self.ledger.phase("evaluation"), self.progress.showing("evaluating", answers):
            groups = self.collector.evaluate(problems, settings.samples, settings.temperature)
        metrics = evaluation_metrics(groups)
        self.observer.evaluation(self.step, metrics)
        self.record["evaluated_step"] = self.step
        self.record["pass_at_1_last"] = metrics[PASS_AT_1]
        return metrics

    def _evaluate_before(self) -> None:
        if self.step == 0 and (metrics := self._evaluate()):
            self.record["pass_at_1_before"] = metrics[PASS_AT_1]

    # ---- observing and saving ----

    def _observe(self, rollout: Rollout, result: UpdateResult) -> None:
        times = self.ledger.step_metrics()
        metrics = {
            **rollout_metrics(rollout.groups),
            **{f"rollout/{name}": value for name, value in rollout.counters.items()},
            **(rollout.cache.metrics(rollout.counters["seconds_generating"]) if rollout.cache else {}),
            **staleness_metrics(rollout.groups, self.step - 1),
            **policy_metrics(result.stats),
            **throughput_metrics(times, rollout.counters["tokens_generated"], result.tokens),
            "optimizer/lr": result.lr,
            "optimizer/grad_norm": result.grad_norm,
            "optimizer/skipped_steps": float(result.skipped),
            **{f"reward/{name}": float(count) for name, count in self.scoring.items()},
            **times,
            **memory_metrics(),
        }
        self.record["entropy_last"] = metrics.get("policy/entropy")
        texts = sample_texts(
            self.step, rollout.groups, self.decode, self.config.observability.samples_per_step
        )
        self.observer.step(self.step, metrics, texts)
        if self.context.rank == 0:
            self.timeline.step(self.step, [asdict(span) for span in rollout.spans])
            if rollout.cache is not None:
                self._record_cache(rollout.cache)

    def _record_cache(self, report: CacheReport) -> None:
        retained = report.retained
        self.cache_records.step(
            self.step,
            [asdict(usage) for usage in report.usages],
            None if retained is None else retained.heads,
            1 if retained is None else retained.kv_heads,
        )

    def _evaluate_and_save(self, *, last: bool) -> None:
        """What is due after this step: every so many steps, and after the last one. A step is evaluated and
        saved once; a checkpoint's record holds the evaluation of its step."""
        every = self.config.evaluation.every
        if self.record["evaluated_step"] != self.step and (last or (every and self.step % every == 0)):
            self._evaluate()
        if self.saved_step != self.step and self.checkpoints.due(self.step, last=last):
            with self.ledger.phase("checkpoint"):
                self.checkpoints.save(self.step, *self._state())
            self.saved_step = self.step

    def _state(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        buffered, arrays = self.buffer.state_dict()
        record = {**self.record, "seconds": self._seconds()}
        state = {
            "data": self.prompts.state_dict(),
            "buffer": buffered,
            "collector": self.collector.state_dict(),
            "record": record,
        }
        return state, arrays

    def _resume(self) -> dict[str, Any] | None:
        """Go on from the newest checkpoint, if there is one; the state of the collector, which needs the
        engine and is not built yet.
        """
        if self.config.checkpoint.resume == "never" or (loaded := self.checkpoints.load_newest()) is None:
            return None
        self.step, state, arrays = loaded
        self.saved_step = self.step
        self.prompts.load_state_dict(state["data"])
        self.buffer.load_state_dict(state["buffer"], arrays)
        self.record = state["record"]
        return dict(state["collector"])

    def _seconds(self) -> float:
        """Wall time of the run, over all its starts."""
        return self.record["seconds"] + time.time() - self.started

    def _begin(self) -> None:
        """Write down what runs, and bring the weights into the engine."""
        if self.step > self.config.steps:
            raise SettingError(
                f"steps={self.config.steps}, but the run in output_dir={str(self.output)!r} has done "
                f"{self.step} already; raise steps, or choose another output_dir"
            )
        if self.context.rank == 0:
            (self.output / "config.yaml").write_text(to_yaml(self.config), encoding="utf-8")
        self.colocation.publish(self.step)

    def _finish(self) -> None:
        """Evaluate and save the last step unless that is done, and leave summary and picture behind."""
        self._evaluate_and_save(last=True)
        self.observer.close()
        if self.context.rank == 0:
            self._write_summary()
        dist.barrier()

    def _write_summary(self) -> None:
        summary = {
            "steps": self.step,
            "pass_at_1_before": self.record["pass_at_1_before"],
            "pass_at_1_after": self.record["pass_at_1_last"],
            "entropy_last": self.record["entropy_last"],
            "seconds": self._seconds(),
        }
        path = write_summary(self.output, summary)
        metrics, picture = self.output / "metrics.jsonl", self.output / "reward_curve.png"
        if metrics.is_file():
            draw_reward_curve(metrics, picture)
        before, after = summary["pass_at_1_before"], summary["pass_at_1_after"]
        if before is not None and after is not None:
            print(f"held-out pass@1: {before:.3f} before, {after:.3f} after {self.step} steps")
        print(f"summary: {path}\ncurve:   {picture}")


def _summed(counts: dict[str, int]) -> dict[str, int]:
    """The counts added up over all ranks."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, counts)
    return {name: sum(part[name] for part in gathered) for name in counts}
