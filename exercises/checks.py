"""What the checks of the exercises share: rules with points, and comparisons whose message a student can read.

grade.py runs the rules. They enumerate chance exactly, compare with slow and obvious references, and count target
passes.
"""
from collections import defaultdict

import torch
from exact import distribution

RULES = defaultdict(list)       # exercise -> [(rule, points, check)]


def rule(exercise: int, points: int, text: str):
    return lambda check: RULES[exercise].append((text, points, check))


# -- yours against expected --------------------------------------------------------------------------------------------

class Wrong(Exception):
    """Its text is shown to the student as it is."""


def shown(value) -> str:
    if isinstance(value, torch.Tensor):
        return f"{[round(x, 4) for x in value.tolist()]}" if value.dim() == 1 and len(value) <= 8 else \
            f"{value.item():.4g}" if value.dim() == 0 else f"a tensor {list(value.shape)}"
    return f"{value:.6g}" if isinstance(value, float) else f"{value!r}"[:120]


def same(yours, expected, what: str, tolerance: float = 1e-4) -> None:
    """Raises Wrong with both values, those of the first place where they differ."""
    if isinstance(expected, torch.Tensor):
        if not isinstance(yours, torch.Tensor) or yours.shape != expected.shape:
            shape = list(yours.shape) if isinstance(yours, torch.Tensor) else shown(yours)
            raise Wrong(f"{what}: yours has shape {shape}, expected {list(expected.shape)}")
        if yours.dtype != expected.dtype:
            raise Wrong(f"{what}: yours is {yours.dtype}, expected {expected.dtype}")
        a, b = yours.double(), expected.double()
        if (off := ~((a - b).abs().le(tolerance) | a.eq(b))).any():
            if a.dim() == 1 and len(a) <= 8:
                raise Wrong(f"{what}: yours {shown(yours)}, expected {shown(expected)}")
            at = off.nonzero()[0].tolist()
            raise Wrong(f"{what}: at {at} yours {shown(a[tuple(at)])}, expected {shown(b[tuple(at)])}")
    elif isinstance(expected, dict):
        for key in sorted(expected.keys() | yours.keys()):
            a, b = yours.get(key, 0.0), expected.get(key, 0.0)
            if not abs(a - b) < tolerance:
                raise Wrong(f"{what}: the chance of {list(key)} is {a:.5f} with yours, expected {b:.5f}")
    elif isinstance(expected, float):
        if not abs(yours - expected) < tolerance:
            raise Wrong(f"{what}: yours {shown(yours)}, expected {shown(expected)}")
    elif yours != expected or type(yours) is not type(expected):
        raise Wrong(f"{what}: yours {shown(yours)}, expected {shown(expected)}")


def exactly(run, expected: dict, what: str) -> None:
    """All outcomes of run(randomness), each with its weight, against their expected chances."""
    try:
        found = distribution(run)
    except AssertionError:
        raise Wrong(f"{what}: flip() was given no chance between 0 and 1, or draw() no probabilities") from None
    same(found, expected, what, 1e-5)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=seeded(seed))
