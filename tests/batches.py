"""Hand-made trajectory batches for tests that need no engine."""

import numpy as np

from megatron_sparse_rl.trajectory import Trajectory, TrajectoryBatch


def random_batch(
    *,
    groups: int = 3,
    samples: int = 4,
    vocab: int = 151,
    longest: int = 9,
    seed: int = 0,
    masked: bool = True,
    beginning: int = 0,
) -> TrajectoryBatch:
    """Groups of answers of random lengths (one of them a single token), with random log-probs, advantages
    and masks; all prompts start with the same `beginning` tokens."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(0, vocab, beginning)
    trajectories, advantages, masks = [], [], []
    for group in range(groups):
        prompt = np.concatenate([shared, rng.integers(0, vocab, rng.integers(2, 8))])
        for sample in range(samples):
            length = 1 if (group, sample) == (0, 1) else int(rng.integers(1, longest + 1))
            trajectories.append(
                Trajectory(
                    group_id=group,
                    sample_index=sample,
                    prompt_ids=prompt,
                    response_ids=rng.integers(0, vocab, length),
                    sampler_logprobs=rng.normal(-4, 1, length).astype(np.float32),
                    policy_versions=np.zeros(length, np.int32),
                    finish_reason="stop",
                    reward=0.0,
                )
            )
            advantages.append(np.full(length, rng.normal(), np.float32))
            masks.append(rng.random(length) > 0.2 if masked else np.ones(length, bool))
    return TrajectoryBatch(tuple(trajectories), tuple(advantages), tuple(masks))
