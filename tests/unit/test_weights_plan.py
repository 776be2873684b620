"""The reshard plan: exact cover, identity of split and gather, choice of the sender, refusals."""

from collections import Counter

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from megatron_sparse_rl.learner.settings import ParallelSettings
from megatron_sparse_rl.settings import SettingError
from megatron_sparse_rl.weights.boxes import stack
from megatron_sparse_rl.weights.layouts import (
    check_layouts,
    engine_layouts,
    huggingface_layout,
    learner_layouts,
    megatron_layout,
)
from megatron_sparse_rl.weights.plan import make_plan
from tests.weight_shards import architecture, architectures, cut, empty, follow, random_tensors

PARALLEL = st.builds(
    ParallelSettings,
    tensor=st.sampled_from([1, 2, 4]),
    pipeline=st.sampled_from([1, 2]),
    sequence=st.just(False),
)


def possible(arch, parallel: ParallelSettings, engine: int) -> bool:
    try:
        check_layouts(arch, parallel, engine)
    except SettingError:
        return False
    return True


@given(
    arch=architectures(),
    parallel=PARALLEL,
    engine=st.sampled_from([1, 2, 4]),
    fused=st.booleans(),
    data=st.sampled_from([1, 2]),
)
def test_resharding_gives_every_engine_rank_its_shard(
    arch, parallel: ParallelSettings, engine: int, fused: bool, data: int
) -> None:
    assume(possible(arch, parallel, engine))
    processes = parallel.tensor * parallel.pipeline * data
    assume(processes % engine == 0)
    learner = learner_layouts(arch, parallel, processes, transformer_engine=fused)
    engines = engine_layouts(arch, engine, processes)
    whole = random_tensors(arch)
    received = [empty(layout) for layout in engines]
    follow(make_plan(learner, engines), [cut(layout, whole) for layout in learner], received)
    for layout, tensors in zip(engines, received, strict=True):
        for name, expected in cut(layout, whole).items():
            assert torch.equal(tensors[name], expected), name


@given(arch=architectures(), parallel=PARALLEL)
def test_splitting_and_gathering_is_the_identity(arch, parallel: ParallelSettings) -> None:
    assume(possible(arch, parallel, 1))
    learner = learner_layouts(arch, parallel, parallel.tensor * parallel.pipeline, transformer_engine=False)
    whole = random_tensors(arch)
    layout = huggingface_layout(arch)
    gathered = empty(layout)
    plan = make_plan(learner, [layout, *[{}] * (len(learner) - 1)])
    follow(plan, [cut(layout, whole) for layout in learner], [gathered, *[{}] * (len(learner) - 1)])
    assert gathered.keys() == whole.keys()
    assert all(torch.equal(gathered[name], whole[name]) for name in whole)
    assert gathered["model.embed_tokens.weight"].shape[0] == arch.vocab


@given(arch=architectures(), parallel=PARALLEL, engine=st.sampled_from([1, 2, 4]))
def test_every_destination_element_is_written_once(arch, parallel: ParallelSettings, engine: int) -> None:
    assume(possible(arch, parallel, engine))
    learner = learner_layouts(arch, parallel, parallel.tensor * parallel.pipeline, transformer_engine=True)
    engines = engine_layouts(arch, engine, engine)
    written = [{name: torch.zeros(t.rows, t.columns) for name, t in layout.items()} for layout in engines]
    plan = make_plan(learner, engines)
    for item in plan.transfers:
        count = written[item.destination_rank][item.destination_name]
        count[slice(*item.destination_rows), slice(*item.destination_cols)] += 1
    for pad in plan.padding:
        written[pad.rank][pad.name][slice(*pad.rows)] += 1
    assert all(torch.equal(c, torch.ones_like(c)) for tensors in written for c in tensors.values())


@pytest.mark.parametrize("ranks_per_node", [1, 4])
def test_what_a_rank_holds_itself_is_not_sent(ranks_per_node: int) -> None:
    arch = architecture()
    parallel = ParallelSettings(tensor=2, pipeline=1, sequence=False)
    learner = learner_layouts(arch, parallel, 4, transformer_engine=False)
    plan = make_plan(learner, engine_layouts(arch, 2, 4), ranks_per_node=ranks_per_node)
    remote = {t.hf_name for t in plan.transfers if not t.local}
    # The halves of everything but the vocabulary coincide: 256 padded rows against 192.
    assert remote == {"model.embed_tokens.weight", "lm_head.weight"}


def test_replicas_share_the_sending() -> None:
    arch = architecture()
    replica = megatron_layout(arch, 1, 0, 1, 0, transformer_engine=False)
    receivers = [{}] * 4 + engine_layouts(arch, 1, 4)
    plan = make_plan([replica] * 4 + [{}] * 4, receivers)
    load = Counter[int]()
    for transfer in plan.transfers:
        load[transfer.source_rank] += transfer.elements
    largest = max(transfer.elements for transfer in plan.transfers)
    assert set(load) == {0, 1, 2, 3}
    assert max(load.values()) - min(load.values()) <= largest
    assert plan == make_plan([replica] * 4 + [{}] * 4, receivers)


def test_a_sender_on_the_same_node_is_preferred() -> None:
    arch = architecture()
    replica = megatron_layout(arch, 1, 0, 1, 0, transformer_engine=False)
    sources, receivers = (
        [replica, {}, replica, {}],
        [{}, *engine_layouts(arch, 1, 1), {}, *engine_layouts(arch, 1, 1)],
    )
    plan = make_plan(sources, receivers, ranks_per_node=2)
    assert {(t.source_rank, t.destination_rank) for t in plan.transfers} == {(0, 1), (2, 3)}


def test_an_uncovered_destination_is_named() -> None:
    arch = architecture(layers=2)
    first_stage = megatron_layout(arch, 1, 0, 2, 0, transformer_engine=False)
    with pytest.raises(
        ValueError, match=r"model\.layers\.1\.input_layernorm\.weight on rank 0: .* 0 of the 16"
    ):
        make_plan([first_stage], engine_layouts(arch, 1, 1))


def test_a_hole_is_not_hidden_by_an_overlap() -> None:
    upper, middle = stack([("w", (0, 4))], (0, 2)), stack([("w", (2, 6))], (0, 2))
    with pytest.raises(ValueError, match="w: rows and columns"):
        make_plan([{"a": upper}, {"a": middle}], [{"b": stack([("w", (0, 8))], (0, 2))}])
