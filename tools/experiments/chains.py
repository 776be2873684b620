"""A task that a very small model can learn and that a small KV cache hurts, and such a model, half taught.

A problem is a shuffled list of pairs and a first symbol: `ab,kf,bk:a`. The answer follows the pairs from it
to the symbol from which none leads on: `bkf`. Every step needs a pair from anywhere in the prompt, which one
cannot be known before. The model, a Llama of 0.6 million parameters with a token for each symbol, is taught
chains by imitation, so far that it solves some of those that it is then trained on.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SYMBOLS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUV"
PAD, END = "<pad>", "<end>"
TOKENS = (PAD, END, ",", ":", *SYMBOLS)
IDS = {token: index for index, token in enumerate(TOKENS)}
VOCABULARY = 64
IGNORED = -100  # label of a token that is not learned


@dataclass(frozen=True)
class Difficulty:
    """Chains of `shortest` to `longest` steps among `pairs` pairs."""

    shortest: int
    longest: int
    pairs: int


TASK = Difficulty(6, 24, 36)
# What to teach, and the share of answers that must be right throughout before the next lesson.
LESSONS = (
    (Difficulty(2, 4, 6), 0.7),
    (Difficulty(3, 8, 12), 0.7),
    (Difficulty(4, 14, 20), 0.7),
    (TASK, 0.25),
)


def make_problem(draw: random.Random, difficulty: Difficulty) -> tuple[str, str]:
    """(prompt, answer). Pairs that are not of the chain lead from other symbols to any."""
    steps = draw.randint(difficulty.shortest, difficulty.longest)
    symbols = draw.sample(SYMBOLS, len(SYMBOLS))
    chain, others = symbols[: steps + 1], symbols[steps + 1 :]
    pairs = [first + second for first, second in pairwise(chain)]
    pairs += [first + draw.choice(symbols) for first in others[: max(0, difficulty.pairs - steps)]]
    draw.shuffle(pairs)
    return f"{','.join(pairs)}:{chain[0]}", "".join(chain[1:])


def write_problems(path: Path, seed: int, count: int) -> None:
    """JSON lines with `prompt` and `answer`."""
    draw = random.Random(seed)
    problems = [make_problem(draw, TASK) for _ in range(count)]
    lines = [json.dumps({"prompt": prompt, "answer": answer}) for prompt, answer in problems]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_model(folder: Path, say: Callable[[str], None], *, seed: int = 0) -> None:
    """Teach a model the lessons and save it with its tokenizer; a few minutes on two cores."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=512,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=IDS[END],
            pad_token_id=IDS[PAD],
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0, betas=(0.9, 0.95))
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 100))
    draw = random.Random(seed)
    for number, (lesson, enough) in enumerate(LESSONS, 1):
        known, step = 0.0, 0
        while known < enough:
            known = _teach(model, optimizer, [make_problem(draw, lesson) for _ in range(64)])
            warm_up.step()
            step += 1
            if step % 100 == 0 or known >= enough:
                say(f"lesson {number} of {len(LESSONS)}, step {step}: {known:.0%} of the answers are right")
    model.generation_config = GenerationConfig(eos_token_id=IDS[END], pad_token_id=IDS[PAD])
    model.save_pretrained(folder)
    _tokenizer().save_pretrained(folder)


def _teach(
    model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, problems: list[tuple[str, str]]
) -> float:
    """One step of imitation; the share of answers whose likeliest tokens were all right before it."""
    tokens, labels = _batch(problems)
    output = model(input_ids=tokens, labels=labels)
    output.loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    wrong = (output.logits[:, :-1].argmax(-1) != labels[:, 1:]) & (labels[:, 1:] != IGNORED)
    return float((~wrong.any(-1)).float().mean())


def _batch(problems: list[tuple[str, str]]) -> tuple[Tensor, Tensor]:
    """int64 [problems, longest]: padded tokens, and labels of the answers alone."""
    rows = [[IDS[token] for token in prompt + answer] + [IDS[END]] for prompt, answer in problems]
    tokens = torch.full((len(rows), max(map(len, rows))), IDS[PAD])
    labels = torch.full_like(tokens, IGNORED)
    for row, (ids, (prompt, _)) in enumerate(zip(rows, problems, strict=True)):
        tokens[row, : len(ids)] = torch.tensor(ids)
        labels[row, len(prompt) : len(ids)] = torch.tensor(ids[len(prompt) :])
    return tokens, labels


def _tokenizer() -> PreTrainedTokenizerFast:
    filled = {**IDS, **{f"<unused_{index}>": index for index in range(len(TOKENS), VOCABULARY)}}
    tokenizer = Tokenizer(models.WordLevel(filled, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([PAD, END])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, model_max_length=512
    )
