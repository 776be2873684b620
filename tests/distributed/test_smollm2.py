"""The default model under the learner against Transformers, float32, token by token."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_sparse_rl.weights.default_model import NAME, resolve_model
from tests.processes import run_ranks

CONVERSATIONS = [
    (
        "What is 17 plus 25? Answer in one sentence.",
        ["17 plus 25 is 42, since 17 + 20 = 37 and 37 + 5 = 42.", "The answer is 41."],
    ),
    (
        "Write a short poem about the sea, and say which of its words rhyme.",
        [
            "The waves come in, the waves go out,\nThe gulls above them wheel and shout;\n"
            "The moon that pulls them, pale and round,\nGoes by and does not make a sound.\n\n"
            "'Out' rhymes with 'shout', and 'round' with 'sound'.",
            "Blau ist das Meer, und weit.",
        ],
    ),
]


@pytest.fixture(scope="module")
def folder() -> Path:
    return resolve_model(NAME)


@pytest.fixture(scope="module")
def batch(folder: Path) -> dict[str, np.ndarray]:
    """Token ids of prompts and responses, in the form the ranks read."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    arrays: dict[str, np.ndarray] = {}
    for group, (question, answers) in enumerate(CONVERSATIONS):
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        for answer in answers:
            index = len(arrays) // 3
            arrays[f"group{index}"] = np.asarray(group)
            arrays[f"prompt{index}"] = np.asarray(tokenizer(text).input_ids)
            arrays[f"response{index}"] = np.asarray(
                [*tokenizer(answer).input_ids, tokenizer.eos_token_id], dtype=np.int64
            )
    return arrays


@pytest.fixture(scope="module")
def expected(folder: Path, batch: dict[str, np.ndarray]) -> list[np.ndarray]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    found = []
    for index in range(len(batch) // 3):
        prompt, response = batch[f"prompt{index}"], batch[f"response{index}"]
        ids = torch.from_numpy(np.concatenate([prompt, response]))[None]
        with torch.no_grad():
            logits = model(ids).logits[0, len(prompt) - 1 : -1]
        found.append(logits.log_softmax(-1).gather(1, torch.from_numpy(response)[:, None])[:, 0].numpy())
    return found


@pytest.mark.parametrize("stages", [1, 2])
def test_logprobs_equal_transformers(
    folder: Path, batch: dict[str, np.ndarray], expected: list[np.ndarray], tmp_path: Path, stages: int
) -> None:
    np.savez(tmp_path / "batch.npz", **batch)
    output = tmp_path / "logprobs.npz"
    run_ranks(
        "tests.distributed.smollm2_ranks",
        stages,
        timeout=150,
        args=[str(folder), str(tmp_path / "batch.npz"), str(output), f"parallel.pipeline={stages}"],
    )
    found = [*np.load(output).values()]
    assert sum(len(column) for column in found) > 100
    assert min(column.min() for column in expected) < -4, "some tokens must be unlikely"
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)
