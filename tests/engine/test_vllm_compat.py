"""What `rollout/vllm_compat.py` and `vllm_cpu_worker.py` rely on, looked up in the installed vLLM's source.

A failure here means that vLLM has changed under a work-around: read the named file again before anything
else.
"""

import importlib.util
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from megatron_sparse_rl.rollout.engine_arguments import CPU_HEAD_DIMS
from megatron_sparse_rl.rollout.vllm_compat import HANDLED_WARNINGS, replaced

READ_VERSION = "0.32.0"

RELIED_ON = [
    ("v1/worker/cpu_worker.py", "torch.ops._C.init_cpu_memory_env([memory_node])"),
    ("v1/worker/cpu_worker.py", "torch.set_num_threads = skip_set_num_threads"),
    ("v1/worker/cpu_worker.py", "os.path.basename(init_method.removeprefix"),
    ("v1/worker/cpu_worker.py", 'CPUModelRunner(self.vllm_config, torch.device("cpu"))'),
    ("distributed/device_communicators/cpu_communicator.py", 'os.environ["VLLM_DIST_IDENT"]'),
    ("v1/worker/cpu/shm.py", "torch.cuda.Stream = _StreamPlaceholder"),
    ("v1/worker/gpu_model_runner.py", "gen.set_offset(gen.get_offset() - 4)"),
    ("v1/worker/gpu_model_runner.py", "self.discard_request_mask.np[:num_reqs]"),
    ("v1/worker/gpu_input_batch.py", "generators=self.generators,"),
    (
        "v1/sample/ops/topk_topp_sampler.py",
        "seeds = torch.randint(0, 2**31, (batch_size,), dtype=torch.long)",
    ),
    ("model_executor/layers/linear.py", "dispatch_cpu_unquantized_gemm(layer, remove_weight=True)"),
    ("model_executor/layers/vocab_parallel_embedding.py", "import dispatch_cpu_unquantized_gemm"),
    ("v1/executor/uniproc_executor.py", 'rank = int(os.environ["RANK"])'),
    ("v1/engine/core_client.py", "self._finalizer = weakref.finalize(self, self.engine_core.shutdown)"),
    ("v1/engine/core.py", "enable_envs_cache()"),
    ("v1/engine/input_processor.py", 'f"{request.external_req_id}-{random_uuid():.8}"'),
    ("v1/core/sched/scheduler.py", "self.kv_cache_config = kv_cache_config"),
    ("v1/engine/core.py", "freeze_gc_heap()"),
    ("distributed/parallel_state.py", "# the layout order is: ExternalDP x DP x PP x PCP x TP"),
    ("platforms/cpu.py", "int(os.environ[env_key])"),
    ("platforms/cpu.py", 'os.environ["LD_PRELOAD"] = ld_preload_str'),
    ("envs.py", '"VLLM_USE_V2_MODEL_RUNNER"'),
    ("envs.py", '"VLLM_NO_USAGE_STATS"'),
    ("envs.py", '"VLLM_ENABLE_V1_MULTIPROCESSING"'),
    ("v1/attention/backends/cpu_attn.py", f"return {list(CPU_HEAD_DIMS)}"),
]


def source(path: str) -> str:
    found = importlib.util.find_spec("vllm")
    assert found is not None
    assert found.origin is not None
    return (Path(found.origin).parent / path).read_text(encoding="utf-8")


def test_version() -> None:
    try:
        installed = version("vllm-cpu")
    except PackageNotFoundError:
        installed = version("vllm")
    assert installed == READ_VERSION, f"the compatibility modules were written for vLLM {READ_VERSION}"


@pytest.mark.parametrize(("path", "text"), RELIED_ON)
def test_relied_on_source(path: str, text: str) -> None:
    assert text in source(path), f"vllm/{path} no longer has {text!r}"


@pytest.mark.parametrize("name", HANDLED_WARNINGS)
def test_handled_warnings_exist(name: str) -> None:
    text = source(name.removeprefix("vllm.").replace(".", "/") + ".py")
    assert all(part in text for part in HANDLED_WARNINGS[name])


def test_replaced_restores_and_refuses_unknown_names() -> None:
    class Owner:
        value = 1

    with replaced(Owner, "value", 2):
        assert Owner.value == 2
    assert Owner.value == 1
    with pytest.raises(AttributeError), replaced(Owner, "other", 2):
        pass
    assert not hasattr(Owner, "other")
