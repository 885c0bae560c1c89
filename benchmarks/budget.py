"""How far the sets that a budget chooses are from the best ones, where all sets are known.

    python benchmarks/budget.py

80 perceptrons on scikit-learn's digits, 2:4 by magnitude, and made-up nets of six and ten layers
whose losses do not add up by a third. Prints, for each kind, how many answers are more than 5 %
from the best possible set, of how many, and the mean number of sets that were measured for one.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

from twofour.budget.choosing import Cost, SetSearch

WIDTHS = 64, 48, 64, 32, 48, 32, 10
SHARES = 0.3, 0.5, 0.7
Net = tuple[Sequence[float], Mapping[frozenset[str], float]]
"""What each layer saves, and what each set of layers loses."""


def perceptrons(count: int) -> Iterator[Net]:
    """Mistakes in points of 800 digits; trained on the other 997."""
    digits, labels = map(torch.tensor, load_digits(return_X_y=True))
    digits = (digits / 16).float()
    for seed in range(count):
        torch.manual_seed(seed)
        order = np.random.default_rng(seed).permutation(len(digits))
        learned, tested = order[:997], order[997:]
        layers = [nn.Linear(a, b) for a, b in itertools.pairwise(WIDTHS)]
        net = nn.Sequential(*[part for layer in layers for part in (layer, nn.ReLU())][:-1])
        optimizer = torch.optim.Adam(net.parameters(), 3e-3)
        for _ in range(150):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(digits[learned]), labels[learned])
            loss.backward()  # type: ignore[no-untyped-call]  # torch lacks the types
            optimizer.step()
        dense = [layer.weight.detach().clone() for layer in layers]
        mistakes = {}
        for pruned in _sets(len(layers)):
            for number, layer in enumerate(layers):
                is_pruned = f"l{number}" in pruned
                layer.weight.data = _pruned(dense[number]) if is_pruned else dense[number]
            mistakes[pruned] = int((net(digits[tested]).argmax(1) != labels[tested]).sum())
        lost = {s: (number - mistakes[frozenset()]) / 8 for s, number in mistakes.items()}
        yield [weight.numel() for weight in dense], lost


def made_up(layers: int, count: int, seed: int) -> Iterator[Net]:
    """Losses alone and of pairs, as a metric of 450 samples shows them."""
    rng = random.Random(seed)
    for _ in range(count):
        gains = [round(math.exp(rng.gauss(0, 1)) * 100) or 1 for _ in range(layers)]
        alone = [math.exp(rng.gauss(-0.5, 1.2)) for _ in range(layers)]
        pairs = {
            (f"l{i}", f"l{j}"): rng.gauss(0, 0.35) * min(alone[i], alone[j])
            for i in range(layers)
            for j in range(i)
        }
        lost = {}
        for pruned in _sets(layers):
            whole = sum(alone[int(name[1:])] for name in pruned)
            whole += sum(more for pair, more in pairs.items() if pruned.issuperset(pair))
            lost[pruned] = round(whole * 4.5) / 4.5
        yield gains, lost


def _sets(layers: int) -> Iterator[frozenset[str]]:
    for flags in itertools.product((0, 1), repeat=layers):
        yield frozenset(f"l{number}" for number, flag in enumerate(flags) if flag)


def _pruned(weight: torch.Tensor) -> torch.Tensor:
    groups = weight.abs().reshape(len(weight), -1, 4)
    smallest = groups.argsort(-1)[..., :2]
    kept = torch.ones_like(groups).scatter_(-1, smallest, 0.0)
    return weight * kept.reshape(weight.shape)


def judge(nets: Iterator[Net], limits: Sequence[float]) -> str:
    """Answers that are far off, all answers, and sets measured for one."""
    far, measured = 0, []
    for gains, lost in nets:
        costs = [
            Cost(name=f"l{number}", gain=float(gain), loss=lost[frozenset({f"l{number}"})])
            for number, gain in enumerate(gains)
        ]
        saved = {s: sum(gains[int(name[1:])] for name in s) for s in lost}
        for asked, is_limit in (*((x, True) for x in limits), *((x, False) for x in SHARES)):
            search = SetSearch(costs, lambda sets, of=lost: [of[s] for s in sets])  # type: ignore[misc]  # a default
            search.measured(frozenset({cost.name}) for cost in search.order)
            known = len(search.trials)
            if is_limit:
                best = search.best_within(asked)
                most = max(saved[s] for s, loss in lost.items() if loss <= asked)
                far += best.gain < 0.95 * most
            else:
                best = search.best_reaching(asked)
                least = min(lost[s] for s in lost if saved[s] >= asked * sum(gains))
                far += best.measured > least + 0.05 * abs(least)
            measured.append(len(search.trials) - known)
    return f"{far} of {len(measured)}, {np.mean(measured):.0f} sets measured"


def main() -> None:
    """Print a line for each kind of net."""
    torch.set_num_threads(1)
    print("perceptrons:", judge(perceptrons(80), (0.5, 1, 2, 4)))
    print("made up, six layers:", judge(made_up(6, 80, 1), (1, 2, 4, 8)))
    print("made up, ten layers:", judge(made_up(10, 40, 2), (1, 2, 4, 8)))


if __name__ == "__main__":
    main()
