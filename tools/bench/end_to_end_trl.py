"""One side of the end-to-end benchmark: TRL's GRPOTrainer on the CPU, with the settings of our side's run.

Generation is Transformers' batched `generate` with a KV cache, all samples of a step at once. Gradient
checkpointing, which TRL turns on by default, is off; attention is SDPA; AdamW is torch's fused kernel.

In: one request on stdin, {"config": YAML file, "overrides": [...], "micro_batch": samples}. Out: the
settings, and of every step its seconds, those of sampling among them, and the mean length of its answers.
"""

import re
import tempfile
import time
from typing import Any

import torch
from common import peak_rss_bytes, serve
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from megatron_sparse_rl.config import Config, load_config
from megatron_sparse_rl.data.sources import build_sources
from megatron_sparse_rl.rewards.verifiers import number
from megatron_sparse_rl.weights.default_model import resolve_model


class Stopwatch(TrainerCallback):
    """Seconds of every optimizer step, with the sampling and the passes it needs, and of its sampling."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.began = 0.0
        self.sampling = 0.0

    def on_step_begin(self, *arguments: Any, **unused: Any) -> None:
        self.began, self.sampling = time.perf_counter(), 0.0

    def on_step_end(self, *arguments: Any, **unused: Any) -> None:
        seconds = time.perf_counter() - self.began
        self.steps.append({"step": seconds, "rollout": self.sampling, "learn": seconds - self.sampling})

    def time_sampling(self, model: Any) -> None:
        """Count what `model.generate` takes."""
        generate = model.generate

        def timed(*arguments: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return generate(*arguments, **options)
            finally:
                self.sampling += time.perf_counter() - began

        model.generate = timed


def grpo_config(config: Config, micro_batch: int, output: str) -> GRPOConfig:
    """TRL's names for our settings."""
    samples = config.rollout.groups_per_step * config.rollout.samples_per_group
    optimizer = config.optimizer
    return GRPOConfig(
        output_dir=output,
        use_cpu=True,
        bf16=config.learner.precision == "bf16",
        max_steps=config.steps,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=samples // micro_batch,
        num_generations=config.rollout.samples_per_group,
        max_completion_length=config.rollout.max_response_tokens,
        temperature=config.rollout.temperature,
        beta=0.0,
        epsilon=config.algorithm.clip_low,
        epsilon_high=config.algorithm.clip_high,
        loss_type="dapo",  # the mean over all tokens of the batch
        scale_rewards="group",
        learning_rate=optimizer.lr,
        lr_scheduler_type="constant",
        weight_decay=optimizer.weight_decay,
        adam_beta1=optimizer.beta1,
        adam_beta2=optimizer.beta2,
        max_grad_norm=optimizer.clip_grad,
        optim="adamw_torch_fused",
        gradient_checkpointing=False,
        shuffle_dataset=False,
        save_strategy="no",
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        seed=config.seed,
    )


def read_prompts(config: Config, tokenizer: Any) -> Dataset:
    """The prompts of our side, in its order, as text; raises ValueError if TRL would see other tokens."""
    source, _ = build_sources(
        config.data, tokenizer, max_prompt_tokens=config.rollout.max_prompt_tokens, seed=config.seed
    )
    prompts = source.take(config.rollout.groups_per_step * config.steps)
    for prompt in prompts:
        if tokenizer(prompt.text)["input_ids"] != prompt.token_ids.tolist():
            raise ValueError(f"prompt {prompt.index} is tokenised differently from its text alone")
    return Dataset.from_list([{"prompt": prompt.text, "answer": prompt.answer} for prompt in prompts])


def train(request: dict[str, Any]) -> dict[str, Any]:
    config = load_config(request["config"], request["overrides"])
    folder = str(resolve_model(config.model))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    pattern = re.compile(config.reward.answer_pattern)

    def reward(completions: list[str], answer: list[str], **unused: Any) -> list[float]:
        return [number(text, wanted, pattern) for text, wanted in zip(completions, answer, strict=True)]

    watch = Stopwatch()
    watch.time_sampling(model)
    with tempfile.TemporaryDirectory() as output:
        settings = grpo_config(config, request["micro_batch"], output)
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=settings,
            train_dataset=read_prompts(config, tokenizer),
            processing_class=tokenizer,
            callbacks=[watch],
        )
        trainer.train()
    logged = [entry for entry in trainer.state.log_history if "completions/mean_length" in entry]
    for step, entry in zip(watch.steps, logged, strict=True):
        step["response_length"] = entry["completions/mean_length"]
    return {
        "steps": watch.steps,
        "peak_rss": peak_rss_bytes(),
        "settings": {
            "samples_per_micro_batch": settings.per_device_train_batch_size,
            "gradient_accumulation_steps": settings.gradient_accumulation_steps,
            "gradient_checkpointing": settings.gradient_checkpointing,
            "optim": str(settings.optim),
            "attention": "sdpa",
            "generation": "transformers generate, dynamic KV cache, all samples of a step in one batch",
            "threads": torch.get_num_threads(),
        },
    }


if __name__ == "__main__":
    serve(train)
