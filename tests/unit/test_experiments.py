"""The experiment on the correction: its problems have one answer, its runs are valid, its table is right."""

import json
import random
import sys
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from megatron_sparse_rl.config import from_tree
from tests.tool_scripts import TOOLS, tool_modules


@pytest.fixture(scope="module")
def experiment():
    with tool_modules(TOOLS / "experiments") as load:
        yield load("correction")


@given(seed=st.integers(0, 10**6))
def test_the_pairs_lead_from_the_first_symbol_to_the_end_of_the_answer(
    experiment: ModuleType, seed: int
) -> None:
    chains = sys.modules["chains"]
    prompt, answer = chains.make_problem(random.Random(seed), chains.TASK)
    listed, _, at = prompt.partition(":")
    pairs = listed.split(",")
    leads = dict(pairs)
    assert len(pairs) == len(leads) == chains.TASK.pairs, "a symbol leads to two others"
    followed = ""
    while at in leads:
        at = leads[at]
        followed += at
    assert followed == answer
    assert chains.TASK.shortest <= len(answer) <= chains.TASK.longest


def test_every_symbol_is_a_token(experiment: ModuleType, tmp_path: Path) -> None:
    chains = sys.modules["chains"]
    chains._tokenizer().save_pretrained(tmp_path)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    text = chains.SYMBOLS + ",:"
    assert tokenizer(text)["input_ids"] == [chains.IDS[symbol] for symbol in text]
    assert tokenizer.decode([*tokenizer(text)["input_ids"], 1], skip_special_tokens=True) == text
    tokens, labels = chains._batch([("ab:a", "b"), ("ab,bc:a", "bc")])
    assert tokens.shape == (2, 10)
    assert [label for label in labels[0].tolist() if label >= 0] == [chains.IDS["b"], 1]


def test_runs_are_valid_and_differ_as_their_names_say(experiment: ModuleType, tmp_path: Path) -> None:
    configs = {
        name: from_tree(experiment.configuration(tmp_path, variant, seed=1, steps=60))
        for name, variant in experiment.VARIANTS.items()
    }
    for name, config in configs.items():
        assert config.rollout.sparse_kv.enabled == name.startswith("budget")
        assert not config.rollout.sparse_kv.enabled or f"budget {config.rollout.sparse_kv.budget}" in name
        assert config.rollout.partial.enabled == ("partial" in name)
        assert config.algorithm.correction.preset == experiment.VARIANTS[name].preset
        assert not config.evaluation.sparse_kv
        assert config.rollout.max_prompt_tokens > 3 * 36
    assert len({str(experiment.run_folder(tmp_path, name, 0)) for name in configs}) == len(configs)


def test_figures_are_means_of_what_the_runs_recorded(experiment: ModuleType, tmp_path: Path) -> None:
    for name in experiment.VARIANTS:
        for seed in (0, 1):
            folder = experiment.run_folder(tmp_path, name, seed)
            folder.mkdir(parents=True)
            records = [{"kind": "evaluation", "step": 0, "evaluation/pass_at_1": 0.1}]
            for step in range(1, 21):
                records.append({"kind": "step", "step": step, "reward/mean": step / 20 + seed})
                records[-1] |= {"time/step_s": 2.0}
                records[-1] |= {"policy/sampler_kl": 0.5, "correction/sequence_veto_fraction": 0.25}
            records.append({"kind": "evaluation", "step": 20, "evaluation/pass_at_1": 0.4 + 0.2 * seed})
            (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    found = experiment.figures(tmp_path, 2)
    first, second = found["dense"]
    assert (first["pass_at_1_before"], first["pass_at_1_after"]) == (0.1, 0.4)
    assert second["rollout_reward"] - first["rollout_reward"] == pytest.approx(1.0)
    assert first["rollout_reward"] == pytest.approx(sum(range(11, 21)) / 10 / 20)
    row = experiment.table(found).splitlines()[2]
    assert row.startswith("| dense | 0.100 ± 0.000 | 0.500 ± 0.141 | 1.275 ± 0.707 | 0.250 ± 0.000 | 0.500")
    experiment.draw(tmp_path, 2, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 10_000
