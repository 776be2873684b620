"""From a batch of trajectories to packed micro-batches: which rank, which micro-batch, which token where.

In: a `TrajectoryBatch`. Out: `MicroBatch`es of plain CPU tensors. Sequences are concatenated without
padding. With shared prompts, a prompt is packed once for all answers of its group, and what all prompts of a
micro-batch begin with (a system prompt, worked examples) once for all of them: answers attend to that
beginning, to the rest of their prompt and to themselves, which gives the same log-probs and gradients as
packing every answer with its own copy. The last token of an answer predicts nothing and is not packed.
"""

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatron_sparse_rl.kernels.policy_loss import LossColumns
from megatron_sparse_rl.learner.attention import AttentionBlock, Span
from megatron_sparse_rl.trajectory import Trajectory, TrajectoryBatch

# Tokens by which segments of one attention block may always differ: padding so few costs less than a block.
SHORT = 32
# Keys that torch's CPU attention takes at a time; only beyond them does causality save time.
CAUSAL_TILE = 512


@dataclass(frozen=True)
class Piece:
    """Trajectories (by index into the batch) that are packed behind one copy of their prompt, and the
    tokens they take beside the first `common` ones, which all pieces of a micro-batch share."""

    indices: tuple[int, ...]
    tokens: int
    common: int = 0


@dataclass(frozen=True)
class MicroBatch:
    """One packed micro-batch of T input tokens and n response tokens.

    tokens, positions: int64 [T]. blocks: what attends to what. predict_rows: int64 [n], the packed row
    whose hidden state predicts each response token; targets: int64 [n], that token. columns: the loss
    inputs, each [n]. indices: the trajectories (of the batch) in the order of the response tokens.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    blocks: tuple[AttentionBlock, ...]
    predict_rows: torch.Tensor
    targets: torch.Tensor
    columns: LossColumns
    indices: tuple[int, ...]

    def to(self, device: torch.device) -> "MicroBatch":
        if device.type == "cpu":
            return self
        return MicroBatch(
            self.tokens.to(device, non_blocking=True),
            self.positions.to(device, non_blocking=True),
            tuple(block.to(device) for block in self.blocks),
            self.predict_rows.to(device, non_blocking=True),
            self.targets.to(device, non_blocking=True),
            self.columns.to(device),
            self.indices,
        )


def common_prefix(prompts: Sequence[np.ndarray]) -> int:
    """How many tokens all of two or more prompts begin with; each keeps at least its last token, whose row
    predicts its answers."""
    if len(prompts) < 2:
        return 0
    first = prompts[0]
    length = min(map(len, prompts)) - 1
    for prompt in prompts[1:]:
        differing = np.flatnonzero(prompt[:length] != first[:length])
        length = int(differing[0]) if len(differing) else length
    return length


def cut_pieces(batch: TrajectoryBatch, budget: int, share_prompts: bool) -> list[Piece]:
    """Cut every group into pieces of at most `budget` tokens; a single answer longer than that is a piece
    of its own."""
    groups: dict[int, list[int]] = defaultdict(list)
    for index, trajectory in enumerate(batch):
        groups[trajectory.group_id].append(index)
    prompts = [batch.trajectories[members[0]].prompt_ids for members in groups.values()]
    common = common_prefix(prompts) if share_prompts else 0
    pieces = []
    for prompt, members in zip(prompts, groups.values(), strict=True):
        chosen: list[int] = []
        tokens = len(prompt)
        for index in members:
            answer = batch.trajectories[index].length - 1
            if chosen and (not share_prompts or tokens + answer > budget):
                pieces.append(Piece(tuple(chosen), tokens - common, common))
                chosen, tokens = [], len(prompt)
            chosen.append(index)
            tokens += answer
        pieces.append(Piece(tuple(chosen), tokens - common, common))
    return pieces


def assign(pieces: list[Piece], ranks: int, budget: int) -> list[list[list[Piece]]]:
    """Micro-batches of every data-parallel rank: `[rank][micro_batch][piece]`.

    Largest first to the least loaded rank, then first fit into micro-batches of at most `budget` tokens.
    Deterministic. A rank may get no piece at all; the caller gives it an empty micro-batch.
    """
    loads = [0] * ranks
    assigned: list[list[Piece]] = [[] for _ in range(ranks)]
    for piece in sorted(pieces, key=lambda p: (-p.tokens, p.indices)):
        rank = loads.index(min(loads))
        assigned[rank].append(piece)
        loads[rank] += piece.tokens
    return [_first_fit(own, budget) for own in assigned]


def _first_fit(pieces: list[Piece], budget: int) -> list[list[Piece]]:
    bins: list[list[Piece]] = []
    free: list[int] = []
    for piece in pieces:
        place = next((i for i, room in enumerate(free) if room >= piece.tokens), None)
        if place is None:
            bins.append([])
            free.append(budget - piece.common)
            place = len(bins) - 1
        bins[place].append(piece)
        free[place] -= piece.tokens
    return bins


def pack(
    batch: TrajectoryBatch, pieces: list[Piece], *, share_prompts: bool, multiple: int = 1
) -> MicroBatch:
    """Lay `pieces` out one after another; T is padded to a multiple of `multiple` (sequence parallelism
    needs it)."""
    layout = _Layout()
    chosen = [[batch.trajectories[i] for i in piece.indices] for piece in pieces]
    if share_prompts:
        layout.add_shared(chosen)
    else:
        layout.add_separate(list(itertools.chain.from_iterable(chosen)))
    layout.pad(multiple)
    indices = tuple(i for piece in pieces for i in piece.indices)
    return MicroBatch(
        tokens=torch.from_numpy(np.concatenate(layout.tokens)),
        positions=torch.from_numpy(np.concatenate(layout.positions)),
        blocks=tuple(layout.blocks),
        predict_rows=torch.from_numpy(_concatenate(layout.predict_rows, np.int64)),
        targets=torch.from_numpy(
            _concatenate([batch.trajectories[i].response_ids for i in indices], np.int64)
        ),
        columns=loss_columns(batch, indices),
        indices=indices,
    )


def loss_columns(batch: TrajectoryBatch, indices: tuple[int, ...]) -> LossColumns:
    """The per-token loss inputs of the given trajectories, concatenated in that order. An optional column
    is there when all of them have it, so an empty micro-batch has every one."""
    chosen = [batch.trajectories[i] for i in indices]

    def column(name: str) -> torch.Tensor | None:
        values = [getattr(t, name) for t in chosen]
        return None if any(v is None for v in values) else floats(values)

    def floats(values: list[np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(_concatenate(values, np.float32))

    lengths = torch.tensor([t.length for t in chosen], dtype=torch.int64)
    return LossColumns(
        advantages=floats([batch.advantages[i] for i in indices]),
        mask=torch.from_numpy(_concatenate([batch.loss_mask[i] for i in indices], np.bool_)),
        sequence_index=torch.repeat_interleave(torch.arange(len(chosen)), lengths),
        sampler_logprobs=floats([t.sampler_logprobs for t in chosen]),
        old_logprobs=column("old_logprobs"),
        stage_logprobs=_stage_logprobs(chosen),
        ref_logprobs=column("ref_logprobs"),
        sequences=len(chosen),
        weight_scale=batch.weight_scale,
    )


def _stage_logprobs(trajectories: list[Trajectory]) -> torch.Tensor | None:
    """NaN for the tokens of trajectories that lie within one stage; None where all do."""
    if all(t.stage_logprobs is None for t in trajectories):
        return None
    rows = [
        np.full(t.length, np.nan, np.float32) if t.stage_logprobs is None else t.stage_logprobs
        for t in trajectories
    ]
    return torch.from_numpy(np.concatenate(rows).astype(np.float32))


def _concatenate(arrays: list[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(arrays).astype(dtype) if arrays else np.zeros(0, dtype)


def _fits(length: int, longest: int, context: bool) -> bool:
    """Whether a segment belongs into the attention block whose first one has `longest` tokens."""
    if context:
        return longest - length <= max(longest // 2, SHORT)
    return longest <= CAUSAL_TILE and longest - length <= SHORT


class _Layout:
    """The growing packed sequence."""

    def __init__(self) -> None:
        self.tokens: list[np.ndarray] = []
        self.positions: list[np.ndarray] = []
        self.predict_rows: list[np.ndarray] = []
        self.blocks: list[AttentionBlock] = []
        self.size = 0

    def _append(self, ids: np.ndarray, first_position: int) -> Span:
        start = self.size
        self.tokens.append(np.asarray(ids, dtype=np.int64))
        self.positions.append(np.arange(first_position, first_position + len(ids), dtype=np.int64))
        self.size += len(ids)
        return start, self.size

    def add_separate(self, trajectories: list[Trajectory]) -> None:
        """Every answer behind its own copy of the prompt."""
        sequences = [np.concatenate([t.prompt_ids, t.response_ids[:-1]]) for t in trajectories]
        spans = self._append_segments((), sequences, 0)
        for trajectory, (start, stop) in zip(trajectories, spans, strict=True):
            self.predict_rows.append(np.arange(start + len(trajectory.prompt_ids) - 1, stop))

    def add_shared(self, pieces: list[list[Trajectory]]) -> None:
        """The beginning that all prompts share, the rest of each prompt, then each prompt's answers."""
        prompts = [members[0].prompt_ids for members in pieces]
        common = common_prefix(prompts)
        beginning = self._append_segments((), [prompts[0][:common]], 0) if common else []
        rests = self._append_segments(tuple(beginning), [prompt[common:] for prompt in prompts], common)
        for members, rest in zip(pieces, rests, strict=True):
            answers = [trajectory.response_ids[:-1] for trajectory in members]
            spans = self._append_segments((*beginning, rest), answers, len(members[0].prompt_ids))
            self.predict_rows += [np.concatenate([[rest[1] - 1], np.arange(*span)]) for span in spans]

    def _append_segments(
        self, context: tuple[Span, ...], segments: list[np.ndarray], first_position: int
    ) -> list[Span]:
        """Append segments that see `context` and themselves; their spans, in the order given.

        They are laid out longest first and a block takes those of similar length, because a block computes
        all as if they were as long as its first.
        """
        spans: dict[int, Span] = {}
        block: list[Span] = []
        longest = 0
        for number in sorted(range(len(segments)), key=lambda i: -len(segments[i])):
            length = len(segments[number])
            spans[number] = self._append(segments[number], first_position)
            if block and not _fits(length, longest, bool(context)):
                self.blocks.append(AttentionBlock(context, tuple(block)))
                block = []
            if length:
                longest = longest if block else length
                block.append(spans[number])
        if block:
            self.blocks.append(AttentionBlock(context, tuple(block)))
        return [spans[number] for number in range(len(segments))]

    def pad(self, multiple: int) -> None:
        """Also gives an empty layout one token, so that every rank has something to run."""
        missing = max(-self.size % multiple, multiple if self.size == 0 else 0)
        if missing:
            self.blocks.append(AttentionBlock((), (self._append(np.zeros(missing, np.int64), 0),)))
