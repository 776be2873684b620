"""Which tokens a KV head retains: the published policies as pure tensor functions.

In: the keys of the tokens that may be evicted, in the order of their positions, and the queries of the last
`window` of them. Out: int64 [requests, kv_heads, keep], ascending indices of the tokens to retain; every KV
head has its own, and the last `window` tokens are always among them. The protected beginning of a prompt is
not among the candidates and takes no part in any softmax here.

Shapes: keys [requests, kv_heads, length, head_dim]; queries [requests, kv_heads, group, window, head_dim],
where a group is the query heads that share a KV head; both after rotary embedding, in any precision. Scores
are float32.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_sparse_rl.rollout.settings import SparseKVSettings

SIMILAR = 0.5  # R-KV, arXiv:2505.24133: keys with a larger cosine similarity count as repetitions
RECENT_COLUMNS = 16  # where nearly every key finds a similar one


@dataclass(frozen=True)
class Policy:
    """A policy with its settings filled in; `observes`: whether it looks at the queries.

    `select(keys, queries, salts, keep)`: `salts` int64 [requests, kv_heads] are numbers that depend on
    layer, KV head and length of the request alone; only the random policy uses them.
    """

    select: Callable[[Tensor, Tensor, Tensor, int], Tensor]
    observes: bool


def make_policy(settings: SparseKVSettings) -> Policy:
    """The policy that the settings name; it must not be "none"."""
    window, pooling = settings.window, settings.pooling
    if settings.policy == "rkv":
        score = partial(rkv, pooling=pooling, balance=settings.rkv_lambda)
        return Policy(lambda keys, queries, salts, keep: score(keys, queries, keep), observes=True)
    if settings.policy == "snapkv":
        return Policy(lambda keys, queries, salts, keep: snapkv(keys, queries, keep, pooling=pooling), True)
    if settings.policy == "h2o":
        return Policy(lambda keys, queries, salts, keep: h2o(keys, queries, keep), observes=True)
    if settings.policy == "streaming_llm":
        sinks = settings.sinks
        return Policy(lambda keys, queries, salts, keep: streaming_llm(keys, keep, sinks=sinks), False)
    if settings.policy == "random":
        return Policy(lambda keys, queries, salts, keep: random(keys, salts, keep, window=window), False)
    raise ValueError(f"policy={settings.policy!r} selects nothing")


def rkv(keys: Tensor, queries: Tensor, keep: int, *, pooling: int, balance: float) -> Tensor:
    """R-KV (arXiv:2505.24133, section 3): important tokens that do not repeat others.

    Importance I: the attention logits of the window's queries, the largest over the query heads of the
    group, softmax over the keys before the window, mean over the window, max-pooled over neighbours.
    Redundancy R: `redundancy`. Retained are the tokens with the largest balance * I - (1 - balance) * R,
    and the window.
    """
    keys, candidates = keys.float(), keys.shape[2] - queries.shape[3]
    logits = _logits(queries, keys[:, :, :candidates]).amax(2)
    importance = _pooled(logits.softmax(-1).mean(2), pooling)
    scores = balance * importance - (1 - balance) * redundancy(keys)[..., :candidates]
    return _best_and_rest(scores, keep, keys.shape[2])


def redundancy(keys: Tensor, columns: int | None = None) -> Tensor:
    """How much each key repeats others, float32 [requests, kv_heads, length], a distribution over the keys.

    Softmax over the keys of the mean over rows of the matrix of cosine similarities, with a zero diagonal
    and, in each row, a zero for the most recent key with a similarity above `SIMILAR`: the last of several
    repetitions does not count as one. The result does not depend on `columns`, the last keys among which a
    similar one is looked for before all others; by default all on a GPU, where the whole matrix costs less
    than to wait for the number of rows that are left.
    """
    keys = keys.float()
    length = keys.shape[2]
    columns = columns or (length if keys.is_cuda else RECENT_COLUMNS)
    scale = torch.linalg.vector_norm(keys, dim=-1).clamp(min=1e-12).reciprocal()
    total = scale[:, :, None] @ keys  # the sum of all keys of length 1
    sums = (total @ keys.transpose(2, 3)).squeeze(2) * scale - 1  # 1: each key's with itself
    recent = max(0, length - columns)
    rows = torch.arange(length, device=keys.device).expand(keys.shape[:3])
    missing = ~_exempt_most_recent(sums, keys, scale, keys, rows, scale, recent, length)
    if recent and (left := int(missing.sum(-1).max())):  # few rows, as a rule: look at the earlier keys
        wanted, rows = missing.to(torch.uint8).topk(left, dim=-1)
        picked = keys.gather(2, rows[..., None].expand(-1, -1, -1, keys.shape[3]))
        row_scale = scale.gather(2, rows) * wanted  # nothing is similar to a row that is not wanted
        _exempt_most_recent(sums, keys, scale, picked, rows, row_scale, 0, recent)
    return (sums / length).softmax(-1)


def _exempt_most_recent(
    sums: Tensor,
    keys: Tensor,
    scale: Tensor,
    picked: Tensor,
    rows: Tensor,
    row_scale: Tensor,
    first: int,
    last: int,
) -> Tensor:
    """Subtract from `sums`, for each of some rows, its similarity to the most recent similar key in
    first:last.

    `picked` are the keys of the `rows` int64 [requests, kv_heads, n]; `scale` and `row_scale` make keys and
    rows of length 1. Returns bool of the shape of `rows`: where there is such a key.
    """
    backwards = keys[:, :, first:last].flip(2).transpose(2, 3)
    similarity = (picked @ backwards) * row_scale[..., None] * scale[:, :, None, first:last].flip(3)
    own = last - 1 - rows[..., None]  # the diagonal, of rows that are among the columns
    inside = (own >= 0) & (own < last - first)
    own = own.clamp(0, last - first - 1)
    similarity.scatter_(3, own, similarity.gather(3, own).masked_fill_(inside, 0.0))
    found, place = (similarity > SIMILAR).to(torch.uint8).max(-1)  # the first of them, so the most recent
    exempt = similarity.gather(3, place[..., None]).squeeze(3) * found
    sums.scatter_add_(2, last - 1 - place, -exempt)
    return found.bool()


def snapkv(keys: Tensor, queries: Tensor, keep: int, *, pooling: int) -> Tensor:
    """SnapKV (arXiv:2404.14469, section 4): tokens that the observation window attends to.

    Attention of the window's queries (causal softmax over all keys), mean over the window, max-pooled over
    neighbours, mean over the query heads of the group; retained are the largest, and the window.
    """
    length, window = keys.shape[2], queries.shape[3]
    votes = _attention(queries, keys)[..., : length - window].mean(3)
    return _best_and_rest(_pooled(votes, pooling).mean(2), keep, length)


def h2o(keys: Tensor, queries: Tensor, keep: int) -> Tensor:
    """H2O (arXiv:2306.14048, section 4): heavy hitters and, as the other half, the most recent tokens.

    A heavy hitter has gathered the largest mass of attention, summed over the queries and the query heads of
    the group. The engine keeps the queries of the window, so the mass is that of the window, not of all
    queries since the beginning: a window as long as the buffer observes every query of the last stretch.
    """
    length, recent = keys.shape[2], keep // 2
    mass = _attention(queries, keys).sum((2, 3))
    return _best_and_rest(mass[..., : length - recent], keep, length)


def streaming_llm(keys: Tensor, keep: int, *, sinks: int) -> Tensor:
    """StreamingLLM (arXiv:2309.17453, section 3): the first tokens, which serve as attention sinks, and the
    most recent ones.
    """
    requests, heads, length, _ = keys.shape
    places = torch.arange(length, device=keys.device)
    chosen = torch.cat([places[:sinks], places[length - keep + sinks :]])
    return chosen.expand(requests, heads, keep)


def random(keys: Tensor, salts: Tensor, keep: int, *, window: int) -> Tensor:
    """Tokens by lot, and the window: what a policy has to beat.

    The lots are hashes of salt and place (SplitMix64, doi:10.1145/2660193.2660195), so the choice is the same
    on every machine and in every batch.
    """
    length = keys.shape[2]
    places = torch.arange(length - window, device=keys.device)
    return _best_and_rest(_mixed(_mixed(salts)[..., None] + places), keep, length)


def _logits(queries: Tensor, keys: Tensor) -> Tensor:
    """float32 [requests, kv_heads, group, window, length], divided by the root of head_dim."""
    requests, heads, group, window, width = queries.shape
    rows = (queries.float() * width**-0.5).reshape(requests, heads, group * window, width)
    return (rows @ keys.float().transpose(2, 3)).view(requests, heads, group, window, keys.shape[2])


def _attention(queries: Tensor, keys: Tensor) -> Tensor:
    """Causal attention of the window's queries, float32 [requests, kv_heads, group, window, length]."""
    length, window = keys.shape[2], queries.shape[3]
    places = torch.arange(length, device=keys.device)
    hidden = places > places[length - window :, None]
    return _logits(queries, keys).masked_fill_(hidden, float("-inf")).softmax(-1)


def _pooled(scores: Tensor, kernel: int) -> Tensor:
    """The largest score among the `kernel` neighbours of each place along the last dimension."""
    flat = F.max_pool1d(scores.flatten(0, -2), kernel, stride=1, padding=kernel // 2)
    return flat.view(scores.shape)


def _best_and_rest(scores: Tensor, keep: int, length: int) -> Tensor:
    """The places with the largest scores, so many that they make up `keep` with all places that have none.

    Among equal scores, which pooling makes often, the earlier place wins, on every device.
    """
    scored = scores.shape[-1]
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    best = order[..., : keep - (length - scored)].sort(-1).values
    rest = torch.arange(scored, length, device=scores.device).expand(*scores.shape[:2], length - scored)
    return torch.cat([best, rest], dim=-1)


def _mixed(numbers: Tensor) -> Tensor:
    """SplitMix64's finaliser, on int64 with wrap-around."""
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        numbers = (numbers ^ (numbers >> shift & (1 << 64 - shift) - 1)) * factor
    return numbers ^ (numbers >> 31 & (1 << 33) - 1)
