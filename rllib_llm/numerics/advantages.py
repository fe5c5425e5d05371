"""From scores to advantages: token rewards, GAE, group baselines, whitening."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import one_hot, pad

from rllib_llm.shared.columns import fetched


def token_rewards(scores: Tensor, kl: Tensor, mask: Tensor, kl_coeff: float) -> Tensor:
    """Reward of each token, float32 [batch, completion_len].

    r_t = -kl_coeff * kl_t, and the score [batch] is added at the last masked-in token
    (Stiennon et al. 2020, section 3.4). Masked-out tokens get 0; a row without a masked-in token
    has nowhere to put its score.
    """
    rewards = torch.where(mask, -kl_coeff * kl.float(), torch.zeros_like(kl, dtype=torch.float32))
    at_end = one_hot(last_token_index(mask), mask.shape[1]).bool() & mask
    return rewards + torch.where(at_end, scores.float().unsqueeze(1), torch.zeros_like(rewards))


def last_token_index(mask: Tensor) -> Tensor:
    """Column of each row's last masked-in token, int64 [batch]; 0 for a row without one."""
    columns = torch.arange(mask.shape[1], device=mask.device)
    return torch.where(mask, columns, torch.zeros_like(columns)).amax(dim=1)


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float = 1.0, lambda_: float = 0.95
) -> tuple[Tensor, Tensor]:
    """Generalised advantages and the critic's targets, two float32 [batch, completion_len].

    delta_t = r_t + gamma V_{t+1} - V_t,  A_t = delta_t + gamma lambda A_{t+1},  returns = A + V,
    with V = 0 beyond the end (Schulman et al. 2016, eq. 16). t+1 means the next masked-in token:
    A and V are carried across masked-out ones (tool output), which get 0 in both results and whose
    rewards do not count. Sums are float64.
    """
    # Tokens that count stand first, so that the next one is the one on the right.
    order = (~mask).to(torch.uint8).argsort(dim=1, stable=True)
    counts = mask.gather(1, order)
    reward, value = (x.double().gather(1, order).where(counts, 0.0) for x in (rewards, values))
    next_value = pad(value[:, 1:], (0, 1))
    summed = _discounted_sums(reward + gamma * next_value - value, gamma * lambda_)
    advantages = torch.zeros_like(summed).scatter(1, order, summed.where(counts, 0.0)).float()
    return advantages, (advantages + values.float()).where(mask, 0.0)


def _discounted_sums(x: Tensor, decay: float) -> Tensor:
    """sum_{u >= t} decay^(u-t) x_u of each row, [batch, length] float64.

    A scan in two levels (Blelloch 1990), whose number of operators does not depend on the length:
    sums inside n blocks of n tokens, then what each block adds to those before it.
    """
    length = x.shape[1]
    n = math.isqrt(max(0, length - 1)) + 1
    places = torch.arange(n, device=x.device, dtype=x.dtype)
    distance = places.unsqueeze(1) - places  # from t (columns) to u (rows)
    inside = (decay**distance).tril()
    between = (decay ** (n * (distance - 1))).tril(-1)
    sums = pad(x, (0, n * n - length)).unflatten(1, (n, n)) @ inside
    later = (sums[:, :, 0] @ between).unsqueeze(2) * decay ** (n - places)
    return (sums + later).flatten(1)[:, :length]


def reinforce_returns(rewards: Tensor, mask: Tensor, gamma: float = 1.0) -> Tensor:
    """Discounted reward-to-go of each token, float32 [batch, completion_len].

    G_t = r_t + gamma G_{t+1} over masked-in tokens, 0 at the others: the advantage of REINFORCE++
    before it is whitened over the global batch (Hu 2025, eq. 6 and 7).
    """
    returns, _ = gae(rewards, torch.zeros_like(rewards), mask, gamma=gamma, lambda_=1.0)
    return returns


def masked_whiten(
    x: Tensor,
    mask: Tensor,
    *,
    shift_mean: bool = True,
) -> Tensor:
    """(x - mean) * rsqrt(var + 1e-8) over masked-in elements, float32, 0 at the others.

    The mean is taken off first, so that a large one does not eat the variance. Without `shift_mean`
    it is put back: the spread becomes 1, the mean stays (for rewards). The variance is Ziegler's
    and OpenAI's (ddof = 0; TRL uses 1). A single element gives no NaN.
    """
    x = x.float()
    count = mask.sum().double().clamp(min=1)  # float32 cannot count beyond 2^24 tokens
    mean = _masked_sum(x, mask) / count
    centred = x.double() - mean
    variance = _masked_sum(centred.square(), mask) / count
    whitened = centred * torch.rsqrt(variance + 1e-8)
    if not shift_mean:
        whitened = whitened + mean
    return torch.where(mask, whitened, torch.zeros_like(whitened)).float()


def leave_one_out(scores: Tensor, groups: Tensor, valid: Tensor | None = None) -> Tensor:
    """Each score minus the mean of the others of its group, float32 [batch].

    A_i = s_i - sum_{j != i} s_j / (n - 1) (RLOO; Ahmadian et al. 2024, eq. 7), which equals
    n/(n-1) (s_i - mean). `groups` [batch] int64: rows alike in it are a group, wherever they lie
    and however many they are. Rows that are not `valid` [batch] are left out of the baselines and
    get 0, as does a row whose group has no other valid one.
    """
    table = _GroupTable.lay_out(scores, groups, valid)
    num_valid = table.counts.sum(dim=1, keepdim=True)
    return table.rows(table.centred() * num_valid / (num_valid - 1).clamp(min=1))


_EPS = 1e-4  # of group statistics, as in TRL


def group_normalized(
    scores: Tensor,
    groups: Tensor,
    *,
    scale_by_std: bool = True,
    valid: Tensor | None = None,
) -> Tensor:
    """Each score minus its group's mean, divided by the group's std + eps, float32 [batch].

    A_i = (s_i - mean) / (std + eps), std with ddof = 1 (GRPO; Shao et al. 2024, section 4.1.2; eps
    and ddof as in TRL). `scale_by_std=False` is Dr. GRPO's (Liu et al. 2025). `groups` [batch] as
    for `leave_one_out`; rows that are not `valid` [batch] stay out of the statistics and get 0.
    """
    table = _GroupTable.lay_out(scores, groups, valid)
    centred = table.centred()
    if scale_by_std:
        num_valid = table.counts.sum(dim=1, keepdim=True)
        variance = centred.square().sum(dim=1, keepdim=True) / (num_valid - 1).clamp(min=1)
        centred = centred / (variance.sqrt() + _EPS)
    return table.rows(centred)


def normalized_sum(
    parts: Tensor,
    weights: Tensor,
    groups: Tensor,
    *,
    scale_by_std: bool = True,
    valid: Tensor,
) -> Tensor:
    """Weighted sum of each reward's `group_normalized`, normalised over the batch, float32 [batch].

    A = (s - mean(s)) / (std(s) + eps), s = sum_k weights_k (r_k - mean_group) / (std_group + eps)
    (GDPO, Liu et al. 2026, eq. 4 to 6; TRL's "normalize_then_sum", std with ddof = 1), so that a
    reward that varies little is not drowned by one that varies much. `parts` and `weights`
    [rewards, batch], parts NaN where a row is not judged by one; rows not `valid` [batch] get 0.
    """
    total = torch.zeros(parts.shape[1], device=parts.device)
    for part, weight in zip(parts, weights, strict=True):
        judged = valid & ~part.isnan()
        normalized = group_normalized(
            part.nan_to_num(), groups, scale_by_std=scale_by_std, valid=judged
        )
        total = total + weight.where(judged, 0.0) * normalized
    count = valid.sum()
    centred = torch.where(valid, total - _masked_sum(total, valid) / count.clamp(min=1), 0.0)
    variance = centred.square().sum() / (count - 1).clamp(min=1)
    return (centred / (variance.sqrt() + _EPS)).float()


@dataclass(frozen=True)
class Turns:
    """The turns of a batch: runs of sampled tokens, S of them, in the order of the rows.

    places [batch, T] int64: each token's turn, S at the others; owners, numbers [S] int64: the
    rollout of each turn, by the number of its first row, and which of its turns it is. Computed
    from masks and ids on the host.
    """

    places: Tensor
    owners: Tensor
    numbers: Tensor

    @classmethod
    def of(cls, mask: Tensor, owners: Tensor) -> Turns:
        """From `mask` [batch, T] of sampled tokens and `owners` [batch], the first row of each
        row's rollout, whose rows are adjacent; all on the host."""
        begins = mask & ~pad(mask[:, :-1], (1, 0))
        count = int(begins.sum())
        places = (begins.flatten().cumsum(dim=0) - 1).view_as(mask).where(mask, count)
        of_turn = owners[begins.nonzero(as_tuple=True)[0]]
        numbers = torch.arange(count)
        first = torch.full_like(owners, count).scatter_reduce(0, of_turn, numbers, "amin")
        return cls(places, of_turn, numbers - first[of_turn])

    def returns(self, rewards: Tensor, gamma: float) -> Tensor:
        """sum_{j >= k} gamma^(j-k) r_j of each turn k of a rollout, float32 [S], where r_j is the
        sum of the `rewards` [batch, T] of turn j's tokens (GiGPO, Feng et al. 2025, eq. 7)."""
        device, size = rewards.device, len(self.owners)
        places, owners, numbers = (
            x.to(device, non_blocking=True) for x in (self.places, self.owners, self.numbers)
        )
        earned = torch.zeros(size + 1, dtype=torch.float64, device=device)
        earned.index_add_(0, places.flatten(), rewards.double().flatten())
        width = int(self.numbers.max()) + 1 if size else 1
        table = torch.zeros(len(rewards), width, dtype=torch.float64, device=device)
        table[owners, numbers] = earned[:size]
        return _discounted_sums(table, gamma)[owners, numbers].float()

    def spread(self, per_turn: Tensor) -> Tensor:
        """The value [S] of each token's turn, [batch, T]; 0 at tokens of none."""
        return pad(per_turn, (0, 1))[self.places.to(per_turn.device, non_blocking=True)]


def zero_variance_rows(
    scores: Tensor, groups: Tensor, valid: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """True for each row of a group whose valid scores are all equal, bool [batch]; and the share of
    these groups among all, float32 [].

    Scores of such a group teach nothing: their advantages are 0. Nor do those of one with fewer
    than two valid rows.
    """
    table = _GroupTable.lay_out(scores, groups, valid)
    largest, smallest = table.extremes()
    is_flat = smallest >= largest
    return table.rows(is_flat.expand_as(table.scores)), is_flat.float().mean()


@dataclass(frozen=True)
class _GroupTable:
    """The rows of a batch, one group a line; groups that have lost a member are filled up.

    scores [groups, rows of the largest group] float32, 0 where not valid; counts, of this shape:
    bool, True where a valid row is; places [batch] int64: where each row is in the flat table.
    """

    scores: Tensor
    counts: Tensor
    places: Tensor

    @classmethod
    def lay_out(cls, scores: Tensor, groups: Tensor, valid: Tensor | None) -> _GroupTable:
        """The rows of each group in the order of the batch."""
        assert scores.ndim == 1 and groups.shape == scores.shape, (groups.shape, scores.shape)
        here, device = fetched([groups])[0], scores.device
        line, sizes = torch.unique(here, return_inverse=True, return_counts=True)[1:]
        width = int(sizes.max())
        if width < 2:
            raise ValueError("groups must have two rows alike: scores are judged within a group")
        order = line.argsort(stable=True)
        starts = sizes.cumsum(dim=0) - sizes
        places = torch.empty_like(line)
        ranks = torch.arange(len(line))
        places[order] = line[order] * width + ranks - starts[line[order]]
        places = places.to(device, non_blocking=True)
        counts = torch.ones_like(scores, dtype=torch.bool) if valid is None else valid.bool()
        table = torch.zeros(len(sizes) * width, device=device)
        table[places] = torch.where(counts, scores.float(), torch.zeros_like(table[places]))
        is_valid = torch.zeros_like(table, dtype=torch.bool)
        is_valid[places] = counts
        return cls(table.view(-1, width), is_valid.view(-1, width), places)

    def rows(self, table: Tensor) -> Tensor:
        """The entries of a table of this shape in the order of the batch, [batch]."""
        return table.reshape(-1)[self.places]

    def extremes(self) -> tuple[Tensor, Tensor]:
        """Largest and smallest valid score of each group, two [groups, 1]; without one, -inf and
        inf."""
        largest = self.scores.masked_fill(~self.counts, -torch.inf).amax(dim=1, keepdim=True)
        smallest = self.scores.masked_fill(~self.counts, torch.inf).amin(dim=1, keepdim=True)
        return largest, smallest

    def centred(self) -> Tensor:
        """Scores minus the mean of their group's valid ones, a table; 0 where not valid."""
        count = self.counts.sum(dim=1, keepdim=True).clamp(min=1)
        mean = self.scores.sum(dim=1, keepdim=True) / count
        # Equal scores must give exactly 0: rounding of the mean would be blown up by 1 / eps.
        largest, smallest = self.extremes()
        teaches = self.counts & (smallest < largest)
        return torch.where(teaches, self.scores - mean, torch.zeros_like(self.scores))


def _masked_sum(x: Tensor, mask: Tensor) -> Tensor:
    """Sum in float64, blind to whatever (NaN included) lies where the mask is False."""
    return torch.where(mask, x, torch.zeros_like(x)).sum(dtype=torch.float64)
