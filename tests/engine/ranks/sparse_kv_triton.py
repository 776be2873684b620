"""What a compacted cache needs on a GPU, run on a CPU with TRITON_INTERPRET=1, in the real engine against the
simulation: Triton attention, metadata, rings, the layout and the kernel that moves rows. Then the metadata
builders of all backends. Argument: checkpoint folder. Prints `ok <check>` lines.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from megatron_sparse_rl.rollout import engine_arguments
from megatron_sparse_rl.rollout.settings import SparseKVSettings
from megatron_sparse_rl.rollout.sparse_kv.layout import CacheLayout
from megatron_sparse_rl.rollout.vllm_compat import preserved_process, quiet_start, replaced, set_environment
from tests.engine import gpu_metadata
from tests.engine.models import load_model, random_prompts, request
from tests.engine.ranks.sparse_kv import RULE, build, check_simulation, inside
from tests.engine.sparse_kv_simulation import prepare

ANSWER = 16  # enough for a compaction while each answers, beside those of their prompts
REQUESTS = {"rkv": 2, "streaming_llm": 1}


@contextmanager
def interpreted_triton() -> Iterator[None]:
    """Put Triton attention in the place of the CPU's, with Triton, which vLLM leaves out on a CPU."""
    import triton
    import triton.language
    from vllm import triton_utils

    with ExitStack() as stack:
        for name, real in {"triton": triton, "tl": triton.language}.items():
            stack.enter_context(replaced(triton_utils, name, real))
        stack.enter_context(replaced(torch.cuda, "get_device_capability", lambda *_: (9, 0)))
        from megatron_sparse_rl.rollout.sparse_kv import cpu_attention, cuda_triton_attn

        backend = cuda_triton_attn.SparseTritonAttentionBackend
        stack.enter_context(replaced(cpu_attention, "SparseCPUAttentionBackend", backend))
        stack.enter_context(replaced(engine_arguments, "SPARSE_CPU_WORKER", f"{__name__}.TritonOnCPUWorker"))
        yield


def make_worker() -> type:
    """A CPU worker with the GPU's parts."""
    from megatron_sparse_rl.rollout.sparse_kv.cuda_cache import CUDACacheLayout
    from megatron_sparse_rl.rollout.sparse_kv.worker import SparseWorker
    from megatron_sparse_rl.rollout.vllm_cpu_worker import ColocatedCPUWorker

    class TritonOnCPUWorker(SparseWorker, ColocatedCPUWorker):
        def make_layout(self, layers: Sequence[Any], block_size: int) -> CacheLayout:
            return CUDACacheLayout(layers, block_size=block_size)

    return TritonOnCPUWorker


def __getattr__(name: str) -> Any:
    """vLLM asks for the worker by name, after it has been imported."""
    if name == "TritonOnCPUWorker":
        return make_worker()
    raise AttributeError(name)


def main(folder: str) -> None:
    dist.init_process_group("gloo")
    model = prepare(load_model(folder))
    with preserved_process():
        set_environment(local_rank=0, cpu=True)
        with quiet_start(), interpreted_triton():
            kinds = [(45, 0), (80, None)]
            asked = [
                request(f"{n}", ids[:n], 40 + n, prompt_tokens=p, max_tokens=ANSWER, stop_token_ids=())
                for (n, p), ids in zip(kinds, random_prompts(2, 96), strict=True)
            ]
            for policy, count in REQUESTS.items():
                engine = build(folder, 1, {"policy": policy, **RULE})
                got = engine.sample(asked[:count])
                check_simulation(model, SparseKVSettings(policy=policy, **RULE), asked[:count], got)
                worker = inside(engine)[1]
                backend = next(iter(worker.model_runner.attn_groups[0])).backend.get_name()
                assert backend == "TRITON_ATTN", backend
                report = engine.take_cache_report()
                assert report.compactions == sum(usage.compactions for usage in report.usages) == 2 * count
                print(f"ok {policy}", flush=True)
            spec = replace(inside(engine)[1].requests._spec, block_size=gpu_metadata.BLOCK)
            with gpu_metadata.recorded_flashinfer():
                for name in gpu_metadata.BACKENDS:
                    gpu_metadata.check_backend(name, worker.vllm_config, spec)
                    print(f"ok {name}", flush=True)
            gpu_metadata.check_v2_runner(worker.vllm_config, spec)
            print("ok v2 runner", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
