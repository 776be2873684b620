"""Programs and the single-process path of a synchronisation; several processes: tests/distributed."""

from collections import defaultdict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_sparse_rl.learner.settings import ParallelSettings
from megatron_sparse_rl.weights.checksums import WeightMismatch
from megatron_sparse_rl.weights.layouts import engine_layouts, learner_layouts, megatron_layout, vllm_layout
from megatron_sparse_rl.weights.plan import Plan, Transfer, make_plan
from megatron_sparse_rl.weights.sync import WeightSync
from megatron_sparse_rl.weights.transfer import Round, execute, make_program
from tests.weight_shards import Tensors, architecture, cut, empty, random_tensors


def single(dtype: torch.dtype, *, verify: bool = True) -> tuple[WeightSync, Tensors, Tensors]:
    arch = architecture("qwen3", tied=True)
    learner = megatron_layout(arch, 1, 0, 1, 0, transformer_engine=False)
    engine = vllm_layout(arch, 1, 0)
    sources, destinations = cut(learner, random_tensors(arch)), empty(engine, dtype=dtype)
    return WeightSync([learner], [engine], sources, destinations, 0, verify=verify), sources, destinations


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sync_writes_in_place_and_again(dtype: torch.dtype) -> None:
    sync, sources, destinations = single(dtype)
    arch = architecture("qwen3", tied=True)
    storage = {name: tensor.data_ptr() for name, tensor in destinations.items()}
    for seed in range(2):
        whole = random_tensors(arch, seed=seed)
        for name, value in cut(megatron_layout(arch, 1, 0, 1, 0, transformer_engine=False), whole).items():
            sources[name].copy_(value)
        report = sync.sync()
        expected = cut(vllm_layout(arch, 1, 0), whole, dtype=dtype)
        assert all(torch.equal(destinations[name], expected[name]) for name in expected)
        assert report.verified
        assert report.received_bytes == 0
    real = sum(value.numel() for value in random_tensors(arch).values())
    assert report.local_bytes == real * dtype.itemsize
    assert {name: tensor.data_ptr() for name, tensor in destinations.items()} == storage


def test_verify_sees_weights_that_are_not_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    sync, _, _ = single(torch.float32)
    monkeypatch.setattr("megatron_sparse_rl.weights.sync.execute", lambda *args, **kwargs: None)
    with pytest.raises(WeightMismatch, match="differ between source and destination"):
        sync.sync()


def test_tensors_that_do_not_fit_the_layout_are_refused() -> None:
    arch = architecture()
    learner, engine = megatron_layout(arch, 1, 0, 1, 0, transformer_engine=False), vllm_layout(arch, 1, 0)
    sources, destinations = empty(learner), empty(engine)

    def build(given_sources: Tensors, given_destinations: Tensors) -> WeightSync:
        return WeightSync([learner], [engine], given_sources, given_destinations, 0, verify=False)

    without = {name: value for name, value in sources.items() if name != "output_layer.weight"}
    with pytest.raises(ValueError, match=r"learner .* missing \['output_layer\.weight'\]"):
        build(without, destinations)
    with pytest.raises(ValueError, match=r"engine .* unknown \['x'\]"):
        build(sources, {**destinations, "x": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"model\.norm\.weight has shape \(3,\), the layout says \(16,\)"):
        build(sources, {**destinations, "model.norm.weight": torch.zeros(3)})
    with pytest.raises(ValueError, match="share one dtype"):
        build(sources, {**destinations, "model.norm.weight": torch.zeros(16, dtype=torch.bfloat16)})


def test_padding_is_cleared_at_every_execution() -> None:
    arch = architecture(vocab=151)
    learner, engine = megatron_layout(arch, 1, 0, 1, 0, transformer_engine=False), vllm_layout(arch, 1, 0)
    sources, destinations = cut(learner, random_tensors(arch)), empty(engine)
    execute(make_program(make_plan([learner], [engine]), 0, dtype=torch.float32), sources, destinations)
    rows = destinations["model.embed_tokens.weight"]
    assert rows.shape[0] == 192
    assert torch.equal(rows[151:], torch.zeros(41, 16))
    assert not rows.isnan().any()


@given(bucket=st.sampled_from([1, 64, 1000, 2**20]), engine=st.sampled_from([1, 2, 4]))
def test_both_ends_of_every_message_meet_in_one_round(bucket: int, engine: int) -> None:
    arch = architecture("qwen2", layers=4)
    parallel = ParallelSettings(tensor=2, pipeline=2, sequence=False)
    plan = make_plan(
        learner_layouts(arch, parallel, 4, transformer_engine=False), engine_layouts(arch, engine, 4)
    )
    programs = [make_program(plan, rank, dtype=torch.float32, bucket_bytes=bucket) for rank in range(4)]
    sent: list[tuple[int, int, Transfer]] = []
    received: list[tuple[int, int, Transfer]] = []
    for rank, program in enumerate(programs):
        for step in program.rounds:
            sent += [(rank, peer, t) for peer, part in step.sends.items() for t in part]
            received += [(peer, rank, t) for peer, part in step.receives.items() for t in part]
    remote = [t for t in plan.transfers if not t.local]
    assert sorted(map(repr, sent)) == sorted(map(repr, received))
    assert len(sent) == len(remote)
    assert messages_complete([program.rounds for program in programs])
    assert sum(len(program.copies) for program in programs) == len(plan.transfers) - len(remote)


def messages_complete(ranks: list[tuple[Round, ...]]) -> bool:
    """Simulate ranks that wait, at the end of each round, for all its messages.

    A message is complete when both ends have posted it; the n-th from one rank to another meets the n-th that
    the other expects from it, as in NCCL and gloo.
    """
    at = [-1] * len(ranks)
    posted: dict[tuple[str, int, int], list[list[Transfer]]] = defaultdict(list)
    waiting: list[list[tuple[str, int, int, int]]] = [[] for _ in ranks]
    while any(position < len(ranks[rank]) for rank, position in enumerate(at)):
        moved = False
        for rank, steps in enumerate(ranks):
            done = all(len(posted[other, source, to]) > n for other, source, to, n in waiting[rank])
            if at[rank] == len(steps) or not done:
                continue
            moved, waiting[rank] = True, []
            at[rank] += 1
            if at[rank] < len(steps):
                for peer, part in steps[at[rank]].sends.items():
                    waiting[rank].append(("receive", rank, peer, len(posted["send", rank, peer])))
                    posted["send", rank, peer].append(list(part))
                for peer, part in steps[at[rank]].receives.items():
                    waiting[rank].append(("send", peer, rank, len(posted["receive", peer, rank])))
                    posted["receive", peer, rank].append(list(part))
        if not moved:
            return False
    return all(posted["send", source, to] == posted["receive", source, to] for _, source, to in list(posted))


@given(bucket=st.integers(1, 4000), engine=st.sampled_from([1, 2, 4]), pipeline=st.sampled_from([2, 4]))
def test_a_round_stays_within_its_bucket_and_one_transfer(bucket: int, engine: int, pipeline: int) -> None:
    arch = architecture(layers=4)
    parallel = ParallelSettings(tensor=2, pipeline=pipeline, sequence=False)
    processes = 2 * pipeline
    plan = make_plan(
        learner_layouts(arch, parallel, processes, transformer_engine=False),
        engine_layouts(arch, engine, processes),
    )
    largest = max(t.elements for t in plan.transfers)
    for rank in range(processes):
        program = make_program(plan, rank, dtype=torch.bfloat16, bucket_bytes=2 * bucket)
        for step in program.rounds:
            for side in (step.sends, step.receives):
                assert sum(t.elements for part in side.values() for t in part) < bucket + largest


def test_an_empty_plan_does_nothing() -> None:
    execute(make_program(Plan((), ()), 0, dtype=torch.float32), {}, {})
