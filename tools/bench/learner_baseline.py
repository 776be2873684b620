"""The other side of the learner benchmark: Transformers and torch's AdamW, as a careful user writes them.

Rows are sorted by length and cut into micro-batches by their padded size, so little is padded. Padding is on
the right, where a causal model needs no mask: attention runs as plain causal SDPA. AdamW is torch's fused
kernel. bf16 is autocast over float32 weights. Logits are made for the response tokens only, or, with the
last argument `all`, for every token.
Arguments: model folder, fp32 or bf16, tokens of a micro-batch, response or all.
"""

import contextlib
import sys
import time
from typing import Any

import torch
from common import peak_rss_bytes, rss_bytes, serve
from transformers import AutoModelForCausalLM

IMPORTED = rss_bytes()
CLIP, CLIP_NORM = 0.2, 1.0


def to_rows(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row an answer, longest first."""
    rows = [{**answer, "prompt": g["prompt"]} for g in groups for answer in g["answers"]]
    return sorted(rows, key=lambda row: -len(row["prompt"]) - len(row["tokens"]))


def micro_batches(rows: list[dict[str, Any]], budget: int) -> list[list[dict[str, Any]]]:
    """Rows in order, cut so that rows times the longest is at most `budget` tokens."""
    batches: list[list[dict[str, Any]]] = []
    longest = 0
    for row in rows:
        if not batches or (len(batches[-1]) + 1) * longest > budget:
            batches.append([])
            longest = len(row["prompt"]) + len(row["tokens"])
        batches[-1].append(row)
    return batches


class Side:
    def __init__(self, folder: str, precision: str, micro_batch: str, logits: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa"
        ).train()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1e-6, betas=(0.9, 0.98), weight_decay=0.0, fused=True
        )
        self.bf16 = precision == "bf16"
        self.budget = int(micro_batch)
        self.all_logits = logits == "all"
        self.rows: list[dict[str, Any]] = []

    def answer(self, request: dict[str, Any]) -> Any:
        """`logprobs`: of every answer of the groups; `load`: take the groups, warm up on the first;
        `step`: one measured update."""
        if request["do"] == "logprobs":
            return self.answer_logprobs(request["groups"])
        if request["do"] == "load":
            self.step(to_rows(request["groups"][:1]))
            self.rows = to_rows(request["groups"])
            padded = [len(b) * (len(b[0]["prompt"]) + len(b[0]["tokens"])) for b in self.cut(self.rows)]
            return {"micro_batches": len(padded), "tokens_computed": sum(padded)}
        began = time.perf_counter()
        loss, norm = self.step(self.rows)
        return {
            "seconds": time.perf_counter() - began,
            "loss": loss,
            "grad_norm": norm,
            "imports_rss": IMPORTED,
            "peak_rss": peak_rss_bytes(),
        }

    def cut(self, rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
        return micro_batches(rows, self.budget)

    def step(self, rows: list[dict[str, Any]]) -> tuple[float, float]:
        """(mean loss, gradient norm before clipping) of one optimizer step on `rows`."""
        count = sum(len(row["tokens"]) for row in rows)
        total = 0.0
        for batch in self.cut(rows):
            loss = self.loss(batch) / count
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total, norm.item()

    def loss(self, batch: list[dict[str, Any]]) -> torch.Tensor:
        """Sum of PPO's clipped loss over the response tokens, the sampler as the old policy."""
        pi = self.logprobs(batch)
        lengths = torch.tensor([len(row["tokens"]) for row in batch])
        advantages = torch.tensor([row["advantage"] for row in batch]).repeat_interleave(lengths)
        sampler = torch.tensor([value for row in batch for value in row["sampler_logprobs"]])
        ratio = torch.exp(pi - sampler)
        return -torch.min(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages).sum()

    def logprobs(self, batch: list[dict[str, Any]]) -> torch.Tensor:
        """float32 log-probs of the batch's response tokens, row after row."""
        sequences = [[*row["prompt"], *row["tokens"]] for row in batch]
        longest = max(map(len, sequences))
        tokens = torch.tensor([ids + [0] * (longest - len(ids)) for ids in sequences])
        # The row whose hidden state predicts each response token, in the flattened batch.
        predict = [
            number * longest + len(row["prompt"]) - 1 + offset
            for number, row in enumerate(batch)
            for offset in range(len(row["tokens"]))
        ]
        rows = torch.tensor(predict)
        targets = torch.tensor([token for row in batch for token in row["tokens"]])
        with torch.autocast("cpu", torch.bfloat16) if self.bf16 else contextlib.nullcontext():
            hidden = self.model.model(input_ids=tokens, use_cache=False).last_hidden_state.flatten(0, 1)
            if self.all_logits:
                logits = self.model.lm_head(hidden).float().index_select(0, rows)
            else:
                logits = self.model.lm_head(hidden.index_select(0, rows)).float()
        return -torch.nn.functional.cross_entropy(logits, targets, reduction="none")

    @torch.no_grad()
    def answer_logprobs(self, groups: list[dict[str, Any]]) -> list[list[list[float]]]:
        """Per group and answer, the log-prob of each response token."""
        found = []
        for group in groups:
            rows = [{**answer, "prompt": group["prompt"]} for answer in group["answers"]]
            lengths = [len(row["tokens"]) for row in rows]
            found.append([part.tolist() for part in self.logprobs(rows).split(lengths)])
        return found


if __name__ == "__main__":
    serve(Side(*sys.argv[1:]).answer)
