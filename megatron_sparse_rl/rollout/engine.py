"""One rank of a vLLM engine that lives in the learner's process.

In: sample requests, equal on every rank of the engine. Out: tokens, the log-probs they were drawn with, and
the policy version of each. Every process of the run builds its rank at the same time, after
`torch.distributed` is initialised (gloo on the CPU, nccl on CUDA); with W processes and tensor-parallel size
t there are W/t engines, and ranks e*t .. e*t+t-1 form engine e (vllm/distributed/parallel_state.py,
initialize_model_parallel: ExternalDP x TP).
"""

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist

from megatron_sparse_rl.config import Config
from megatron_sparse_rl.rollout import vllm_compat
from megatron_sparse_rl.rollout.engine_arguments import (
    cache_tokens_per_request,
    check_engine,
    engine_arguments,
    max_model_tokens,
)
from megatron_sparse_rl.rollout.residency import Residency
from megatron_sparse_rl.rollout.sampling import SampledTokens, SampleRequest, read_stop_token_ids
from megatron_sparse_rl.rollout.sparse_kv.lengths import Lengths
from megatron_sparse_rl.rollout.sparse_kv.report import CacheReport, CacheUsage, cache_usage
from megatron_sparse_rl.rollout.sparse_kv.requests import protection, sharing_salt
from megatron_sparse_rl.trajectory import FinishReason
from megatron_sparse_rl.weights.architecture import read_architecture

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]  # (tokens sampled so far, requests finished so far)


@dataclass
class _Answer:
    """What one running request has yielded so far."""

    request: SampleRequest
    shared_tokens: int = 0  # found in the prefix cache
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None

    def extend(self, completion: Any) -> None:
        """Take in the tokens of one engine step; raises RuntimeError unless each has its log-prob."""
        token_ids, logprobs = list(completion.token_ids), list(completion.logprobs.logprobs)
        if len(token_ids) != len(logprobs):
            raise RuntimeError(
                f"request {self.request.request_id}: the engine returned {len(token_ids)} tokens with "
                f"{len(logprobs)} log-probs"
            )
        self.token_ids += token_ids
        self.logprobs += logprobs
        self.finish_reason = completion.finish_reason

    def finished(self, version: int) -> SampledTokens:
        """Raises RuntimeError when the engine ended the request for another reason than stop or length."""
        if self.finish_reason not in ("stop", "length"):
            raise RuntimeError(
                f"request {self.request.request_id}: the engine ended it with {self.finish_reason!r} after "
                f"{len(self.token_ids)} tokens, not by a stop token or its length"
            )
        return self._sampled(version, cast(Any, self.finish_reason))

    def partial(self, version: int) -> SampledTokens:
        """What an unfinished request has yielded."""
        return self._sampled(version, "partial")

    def _sampled(self, version: int, finish_reason: FinishReason) -> SampledTokens:
        return SampledTokens(
            request_id=self.request.request_id,
            token_ids=np.asarray(self.token_ids, dtype=np.int64),
            logprobs=np.asarray(self.logprobs, dtype=np.float32),
            policy_versions=np.full(len(self.token_ids), version, dtype=np.int32),
            finish_reason=finish_reason,
        )


class Engine:
    """This process's rank of its engine. Its weights count as stale at first, see `Residency`."""

    def __init__(self, config: Config, model_path: str, *, device: str) -> None:
        """Build the engine; the caller's environment, random states and thread count are as before
        afterwards.

        `device` is "cpu" or "cuda" (then the current CUDA device is used). Raises SettingError for settings
        that this model or world cannot have, RuntimeError when torch.distributed is not initialised.
        """
        if not dist.is_initialized():
            raise RuntimeError("torch.distributed must be initialised before an engine is built")
        cuda = device.startswith("cuda")
        world_size = dist.get_world_size()
        check_engine(config, read_architecture(model_path), world_size=world_size, cuda=cuda)
        self.stop_token_ids = read_stop_token_ids(model_path, config.rollout.extra_stop_token_ids)
        self.max_model_tokens = max_model_tokens(config)
        local_rank = torch.cuda.current_device() if cuda else int(os.environ.get("LOCAL_RANK", "0"))
        with vllm_compat.preserved_process():
            vllm_compat.set_environment(local_rank=local_rank, cpu=not cuda)
            with vllm_compat.quiet_start():
                from vllm import LLM

                if config.rollout.sparse_kv.enabled:
                    from megatron_sparse_rl.rollout.sparse_kv.plugin import register

                    register()  # vLLM does it where the package is installed, not where it is only imported
                self._llm = LLM(**engine_arguments(config, model_path, cuda=cuda))
        vllm_compat.keep_process_groups(self._llm)
        self.tensor_rank, self.tensor_size = vllm_compat.tensor_rank_and_size()
        self.index, self.count = dist.get_rank() // self.tensor_size, world_size // self.tensor_size
        self.residency = Residency(self._llm, releases_memory=cuda)
        self._max_running = config.rollout.max_running
        self._sparse_kv = config.rollout.sparse_kv
        self._cache_tokens_per_request = cache_tokens_per_request(config)
        self._running: dict[str, _Answer] = {}
        self._block_size = config.rollout.block_size
        self._cache_usages: list[CacheUsage] = []
        logger.info("engine %d of %d, tensor rank %d, ready", self.index, self.count, self.tensor_rank)

    @property
    def is_leader(self) -> bool:
        """Whether this is the rank of its engine that acts on results (scores, logs)."""
        return self.tensor_rank == 0

    @property
    def version(self) -> int:
        """The policy version of the engine's weights."""
        return self.residency.version

    def parameters(self) -> dict[str, torch.Tensor]:
        """This rank's live parameters by vLLM's names, to be written before `weights_written`."""
        return vllm_compat.engine_parameters(self._llm)

    def sleep(self) -> None:
        """Make room for the learner: weights and KV cache leave the GPU and are forgotten."""
        self.residency.sleep()

    def wake_weights(self) -> None:
        """Allocate the weights, so that they can be written."""
        self.residency.wake_weights()

    def weights_written(self, version: int) -> None:
        """Declare that `parameters()` hold policy `version`; the prefix cache is reset."""
        self.residency.weights_written(version)

    def wake_kv(self) -> None:
        """Allocate the KV cache, once weights are written and the memory they came from is free."""
        self.residency.wake_kv()

    @property
    def full_length_requests(self) -> int:
        """Training requests of full length that the KV cache holds at one time, at least 1; none of so many
        is ever preempted.
        """
        held = vllm_compat.kv_cache_tokens(self._llm) // self._cache_tokens_per_request
        return max(1, min(held, self._max_running))

    @property
    def in_flight(self) -> int:
        """Requests submitted and neither finished nor cancelled."""
        return len(self._running)

    def sample(
        self, requests: Sequence[SampleRequest], progress: Progress | None = None
    ) -> list[SampledTokens]:
        """Sample every request to its end; results in the order of `requests`.

        Every rank of an engine must pass equal requests in equal order. Raises what `submit` and `advance`
        raise; whatever still runs then is cancelled.
        """
        finished: dict[str, SampledTokens] = {}
        try:
            for request in requests:
                self.submit(request)
            while self.in_flight:
                for answer in self.advance():
                    finished[answer.request_id] = answer
                if progress is not None:
                    running = sum(len(answer.token_ids) for answer in self._running.values())
                    progress(running + sum(len(s.token_ids) for s in finished.values()), len(finished))
        except Exception as error:
            error.add_note(f"while the engine ran requests {sorted(self._running)[:8]}")
            raise
        finally:
            self.cancel()
        return [finished[request.request_id] for request in requests]

    def submit(self, request: SampleRequest) -> None:
        """Put a request in flight; every rank of the engine submits the same ones in the same order.

        Raises ValueError for a request that cannot run, and RuntimeError when the engine is not ready.
        """
        from vllm.inputs import tokens_input

        self.residency.require_ready()
        self._check_request(request)
        extra_arguments = salt = None
        if self._sparse_kv.enabled:
            protected = self._protected(request)
            extra_arguments, salt = protection(protected), sharing_salt(protected)
        with vllm_compat.preserved_random_state():
            self._llm.llm_engine.add_request(
                request.request_id,
                tokens_input(request.token_ids.tolist(), cache_salt=salt),
                _sampling_params(request, extra_arguments),
            )
        self._running[request.request_id] = _Answer(request)

    def advance(self) -> list[SampledTokens]:
        """One engine step; the requests it finished.

        Log-probs are those of the distribution that was drawn from, so after temperature; at temperature 0
        the likeliest token is taken and its log-prob is that of the untempered distribution. Raises
        RuntimeError, naming the request, when the engine ends one otherwise than by stop or length.
        """
        finished = []
        with vllm_compat.preserved_random_state():
            outputs = self._llm.llm_engine.step()
        for output in outputs:
            answer = self._running[output.request_id]
            (completion,) = output.outputs
            answer.extend(completion)
            answer.shared_tokens = output.num_cached_tokens or 0
            if output.finished:
                finished.append(answer.finished(self.version))
                self._ended(self._running.pop(output.request_id))
        return finished

    def cancel(self) -> list[SampledTokens]:
        """End whatever is in flight; what it has yielded so far, with finish reason "partial", in the order
        of submission.
        """
        cancelled = list(self._running.values())
        if cancelled:
            self._llm.llm_engine.abort_request(list(self._running))
        self._running.clear()
        for answer in cancelled:
            self._ended(answer)
        return [answer.partial(self.version) for answer in cancelled]

    def take_cache_report(self) -> CacheReport:
        """The KV caches of requests that ended since the last call; with `rollout.sparse_kv` only."""
        ((compactions, seconds, retained),) = self._llm.collective_rpc("take_sparse_kv_counts")
        usages, self._cache_usages = tuple(self._cache_usages), []
        if retained is not None:
            retained = replace(retained, request_id=vllm_compat.submitted_id(retained.request_id))
        block_bytes = vllm_compat.kv_block_bytes(self._llm) * self.tensor_size
        return CacheReport(usages, block_bytes, compactions, seconds, retained)

    def _protected(self, request: SampleRequest) -> int:
        """Tokens that a compacted cache has to retain: all of a dense request's."""
        if request.dense:
            return self.max_model_tokens
        prompt_tokens = len(request.token_ids) if request.prompt_tokens is None else request.prompt_tokens
        return min(prompt_tokens, self._sparse_kv.protect_prompt)

    def _ended(self, answer: _Answer) -> None:
        """Note down how much cache the request used. The last token was sampled, but never fed."""
        if not self._sparse_kv.enabled:
            return
        request, settings = answer.request, self._sparse_kv
        usage = cache_usage(
            request.request_id,
            logical=len(request.token_ids) + max(0, len(answer.token_ids) - 1),
            longest=len(request.token_ids) + request.max_tokens,
            protected=self._protected(request),
            shared=answer.shared_tokens,
            rule=Lengths(settings.budget, settings.buffer),
            block_size=self._block_size,
            reserve=settings.reserve,
        )
        self._cache_usages.append(usage)

    def _check_request(self, request: SampleRequest) -> None:
        if request.request_id in self._running:
            raise ValueError(
                f"request {request.request_id} is in flight already; different requests need different ids"
            )
        if request.max_tokens < 1 or len(request.token_ids) < 1:
            raise ValueError(
                f"request {request.request_id} has {len(request.token_ids)} context tokens and may sample "
                f"{request.max_tokens}; both must be at least 1"
            )
        length = len(request.token_ids) + request.max_tokens
        if length > self.max_model_tokens:
            raise ValueError(
                f"request {request.request_id}: {len(request.token_ids)} context tokens and "
                f"{request.max_tokens} to sample exceed rollout.max_prompt_tokens + "
                f"rollout.max_response_tokens = {self.max_model_tokens}"
            )


def _sampling_params(request: SampleRequest, extra_arguments: dict[str, int] | None) -> Any:
    """vLLM's parameters: whole vocabulary, one answer, its own seed, no other stop than the request's."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        n=1,
        temperature=request.temperature,
        max_tokens=request.max_tokens,
        seed=request.seed,
        stop_token_ids=list(request.stop_token_ids),
        ignore_eos=True,  # the end-of-sequence ids are all among stop_token_ids
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        extra_args=extra_arguments,
    )
