"""Every method written down once more, from its paper, over plain Python numbers, with its own constants.

Exact gradients by the complex step: a log-probability becomes `x + ih` with h = 1e-30, and the imaginary part of
the loss over h is its derivative, without truncation or cancellation. Comparisons and stop-gradients look at the
real part. Rows are lists of tokens, so there is no padding and no mask here.
"""

from cmath import exp
from math import inf
from math import log as ln

STEP = 1e-30


def sg(x):
    return complex(x).real


def pick_min(a, b):
    return a if sg(a) <= sg(b) else b


def clip(x, low, high):
    return low if sg(x) < low else high if sg(x) > high else x


def mean(values):
    return sum(values) / len(values)


def clipped_surrogate(r, a, low, high):
    return pick_min(r * a, clip(r, low, high) * a)


def out_of_gradient(r, a, low, high):
    return (a > 0 and sg(r) > high) or (a < 0 and sg(r) < low)


def token_ratios(row):
    return [exp(x - y) for x, y in zip(row["logps"], row["old"], strict=True)]


def sequence_ratio(row, anchor="old"):
    return exp(mean([x - y for x, y in zip(row["logps"], row[anchor], strict=True)]))


def clip_row(row, low, high, ceiling=inf):
    values, out = [], []
    for r, a in zip(token_ratios(row), row["adv"], strict=True):
        value = clipped_surrogate(r, a, low, high)
        if a < 0 and sg(value) < ceiling * a:
            value = ceiling * a
        values.append(value)
        out.append(out_of_gradient(r, a, low, high) or (a < 0 and sg(r) > ceiling))
    return values, out


def gspo_row(row, anchor="old", low=1 - 3e-4, high=1 + 4e-4):
    # arXiv:2507.18071, eq. 5; with token advantages each token's term has its own
    s = sequence_ratio(row, anchor)
    values = [clipped_surrogate(s, a, low, high) for a in row["adv"]]
    return values, [out_of_gradient(s, a, low, high) for a in row["adv"]]


def gspo_token_row(row):  # eqs 13, 14
    s = sg(sequence_ratio(row))
    ratios = [s * exp(x) / sg(exp(sg(x))) for x in row["logps"]]
    values = [clipped_surrogate(r, a, 1 - 3e-4, 1 + 4e-4) for r, a in zip(ratios, row["adv"], strict=True)]
    return values, [out_of_gradient(s, a, 1 - 3e-4, 1 + 4e-4) for a in row["adv"]]


def cispo_row(row):
    values = [min(sg(r), 5.0) * a * x for r, a, x in zip(token_ratios(row), row["adv"], row["logps"], strict=True)]
    return values, [False] * len(values)


def sapo_row(row):
    values = []
    for r, a in zip(token_ratios(row), row["adv"], strict=True):
        tau = 1.0 if a > 0 else 1.05
        values.append(4 / tau / (1 + exp(-tau * (r - 1))) * a)
    return values, [False] * len(values)


def gmpo_row(row, gamma_before=None, gamma_after=None):
    n = len(row["adv"])
    before, after = gamma_before or [1.0] * n, gamma_after or [1.0] * n
    product, out = 1.0, []
    for r, a, b, c in zip(token_ratios(row), row["adv"], before, after, strict=True):
        sign = (a > 0) - (a < 0)
        bounded = clip(r * b, exp(-0.4).real, exp(0.4).real)
        product *= (sign * pick_min(sign * r * b, sign * bounded) if sign else r * b) * c
        out.append(out_of_gradient(r * b, a, exp(-0.4).real, exp(0.4).real))
    geometric = product ** (1 / n)
    return [geometric * a for a in row["adv"]], out


def minirl_row(row):
    values, out = [], []
    for r, a, x, old, mu in zip(token_ratios(row), row["adv"], row["logps"], row["old"], row["rollout"], strict=True):
        blocked = out_of_gradient(r, a, 0.8, 1.27)
        values.append(0.0 if blocked else sg(r) * min(exp(old - mu).real, 5.0) * a * x)
        out.append(blocked)
    return values, out


def dppo_row(row, moved_too_far):
    """arXiv:2602.04879; `moved_too_far(p, q)` of the token's probabilities, now and before."""
    values, out = [], []
    for r, a, x, old in zip(token_ratios(row), row["adv"], row["logps"], row["old"], strict=True):
        p, q = exp(sg(x)).real, exp(old).real
        away = (a > 0 and p > q) or (a < 0 and p < q)
        blocked = away and moved_too_far(p, q)
        values.append(0.0 if blocked else min(sg(r), 20.0) * a * x)
        out.append(blocked)
    return values, out


def binary_kl(p, q):
    rest = [max(1 - probability, 1e-8) for probability in (p, q)]
    return q * ln(q / p) + rest[1] * ln(rest[1] / rest[0])


def drpo_row(row):  # arXiv:2606.09821, eq. 8, delta 0.15
    values = []
    for r, a, old in zip(token_ratios(row), row["adv"], row["old"], strict=True):
        values.append(r * a - abs(a) / (2 * 0.15) * exp(old).real * (r - 1) ** 2)
    return values, [False] * len(values)


def vespo_row(row):  # arXiv:2602.10693: phi(w) = e^lambda w^k e^(-lambda w), w of the whole sequence
    w = product([sg(r) for r in token_ratios(row)])
    values = []
    for a, x in zip(row["adv"], row["logps"], strict=True):
        k, lam = (2.0, 3.0) if a >= 0 else (3.0, 2.0)
        values.append(exp(lam).real * w**k * exp(-lam * w).real * a * x)
    return values, [False] * len(values)


def likelihood_row(row):
    return [a * x for a, x in zip(row["adv"], row["logps"], strict=True)], [False] * len(row["adv"])


def engine_weights(row):
    return [exp(old - mu).real for old, mu in zip(row["old"], row["rollout"], strict=True)]


def product(values):
    result = 1.0
    for value in values:
        result *= value
    return result


def corrected(copy_weights):
    def row_value(row):
        values, out = clip_row(row, 0.8, 1.27)
        return [w * v for w, v in zip(copy_weights(row), values, strict=True)], out

    return row_value


def tis(row):
    return [min(w, 2.0) for w in engine_weights(row)]


def mis(row):
    return [w if w <= 3.0 else 0.0 for w in engine_weights(row)]


def decoupled(row):  # AReaL: pi_old / mu, tokens above the cap dropped
    return [w if w <= 5.0 else 0.0 for w in engine_weights(row)]


def icepop(row):
    return [w if 0.5 <= w <= 5.0 else 0.0 for w in engine_weights(row)]


def kpop(row):
    pairs = [(exp(old).real, exp(mu).real) for old, mu in zip(row["old"], row["rollout"], strict=True)]
    return [p / q if binary_kl(p, q) <= 0.1 and binary_kl(q, p) <= 0.1 else 0.0 for p, q in pairs]


def seq_tis(row):
    return [min(product(engine_weights(row)), 3.0)] * len(row["adv"])


def seq_mis(row):
    w = product(engine_weights(row))
    return [w if w <= 3.0 else 0.0] * len(row["adv"])


def geo_rs(row):
    w = product(engine_weights(row)) ** (1 / len(row["adv"]))
    return [1.0 if 0.99 <= w <= 1.01 else 0.0] * len(row["adv"])


def opsm(row):
    gap = mean([mu - sg(x) for mu, x in zip(row["rollout"], row["logps"], strict=True)])
    return [0.0 if a < 0 and gap > 0.1 else 1.0 for a in row["adv"]]


def floored(row):
    return [max(g, 0.8) for g in row["gamma"]]


ROWS = {
    "ppo": lambda row: clip_row(row, 0.8, 1.2),
    "grpo": lambda row: clip_row(row, 0.8, 1.27),
    "gspo": gspo_row,
    "gspo_token": gspo_token_row,
    "dr_grpo": lambda row: clip_row(row, 0.8, 1.2),
    "dapo": lambda row: clip_row(row, 0.8, 1.28),
    "bnpo": lambda row: clip_row(row, 0.8, 1.27),
    "dual_clip": lambda row: clip_row(row, 0.8, 1.27, ceiling=3.0),
    "luspo": lambda row: gspo_row(row, low=1 - 2e-3, high=1 + 2.5e-3),
    "cispo": cispo_row,
    "sapo": sapo_row,
    "gmpo": gmpo_row,
    "minirl": minirl_row,
    "vespo": vespo_row,
    "dppo_tv": lambda row: dppo_row(row, lambda p, q: abs(p - q) > 0.15),
    "dppo_kl": lambda row: dppo_row(row, lambda p, q: binary_kl(p, q) > 0.05),
    "drpo": drpo_row,
    "rspo": lambda row: gmpo_row(row, gamma_before=floored(row)),
    "rspo_after_clip": lambda row: gmpo_row(row, gamma_after=floored(row)),
    "gspo_rollout": lambda row: gspo_row(row, "rollout"),
    "grpo_tis": corrected(tis),
    "grpo_mis": corrected(mis),
    "grpo_decoupled": corrected(decoupled),
    "grpo_icepop": corrected(icepop),
    "grpo_kpop": corrected(kpop),
    "grpo_seq_tis": corrected(seq_tis),
    "grpo_seq_mis": corrected(seq_mis),
    "grpo_geo_rs": corrected(geo_rs),
    "grpo_opsm": corrected(opsm),
    "sft": likelihood_row,
    "rft": likelihood_row,
    "online_rft": likelihood_row,
}
TOKEN_MEAN = {"dapo", "bnpo", "cispo", "vespo", "dppo_tv", "dppo_kl"}
SUM = {"minirl", "dr_grpo", "luspo", "drpo"}


def loss(name, rows):
    """(loss, clipped tokens of each row), over the rows that have tokens."""
    per_row = [ROWS[name](row) for row in rows]
    sums = [sum(values) for values, _ in per_row]
    if name in TOKEN_MEAN:
        total = sum(sums) / sum(len(row["adv"]) for row in rows)
    elif name in SUM:
        total = mean(sums)
    else:
        total = mean([s / len(row["adv"]) for s, row in zip(sums, rows, strict=True)])
    return -complex(total), [out for _, out in per_row]


def gradient(name, rows):
    """d loss / d logps of each token of each row."""
    slopes = []
    for row in rows:
        kept, slopes_of_row = row["logps"], []
        for t in range(len(kept)):
            row["logps"] = [complex(x, STEP if u == t else 0.0) for u, x in enumerate(kept)]
            slopes_of_row.append(loss(name, rows)[0].imag / STEP)
        row["logps"] = kept
        slopes.append(slopes_of_row)
    return slopes
